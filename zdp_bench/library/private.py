"""`Private`: a private training in your own loop, one step at a time."""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any, NoReturn
from weakref import WeakSet, finalize

import torch
from torch import nn

from zdp_bench.algorithms import Algorithm
from zdp_bench.errors import UserError, first_line, for_python, printable
from zdp_bench.gradients import PerExample, reference
from zdp_bench.gradients.losses import preserve_random_state, set_seed
from zdp_bench.gradients.parts import takes_parts
from zdp_bench.gradients.program import renew
from zdp_bench.library import starts
from zdp_bench.library.batch import Batch
from zdp_bench.library.examples import Items
from zdp_bench.library.journal import TERMS, Journal, writable
from zdp_bench.library.keys import Keys, randomness_kind
from zdp_bench.library.model_check import require_gradients
from zdp_bench.library.optimizers import (
    Regulariser,
    adds_gradient,
    each_of,
    in_private_step,
    require_held,
    watch_steps,
)
from zdp_bench.library.schedules import Scheduler, Schedules, read_schedules
from zdp_bench.library.starts import Earlier, Trainings
from zdp_bench.library.units import PRIVATE_OWNERS, Units
from zdp_bench.privacy.accounting import affordable_steps, example_epsilon, tight_epsilon
from zdp_bench.privacy.composition import compose_epsilon
from zdp_bench.privacy.noise import SecureNoise
from zdp_bench.privacy.tally import Tally
from zdp_bench.registry import lookup
from zdp_bench.training import checkpoint
from zdp_bench.training.batches import MicroBatches, Size, draw_batch, read_in_pieces
from zdp_bench.training.captured import CapturedSums
from zdp_bench.training.distributed import Ranks
from zdp_bench.training.evaluation import DIVERGED, GROWTH, WATCHED
from zdp_bench.training.interrupts import explain_write_errors, stop_signals
from zdp_bench.training.machine import arithmetic
from zdp_bench.training.model_checks import Checked, require_no_hooks
from zdp_bench.training.model_checks.state import (
    WeightsChangedError,
    WeightVersions,
    record_versions,
)
from zdp_bench.training.plan import Plan
from zdp_bench.training.run import released_report
from zdp_bench.training.step import Training, private_step

log = logging.getLogger(__name__)
# Keys of the file that `save` writes
EARLIER = "earlier trainings"
COUNTED = "counts steps that the model may not have taken"
# Threads step one at a time, because hooks and random generators belong to the whole process.
_STEP_LOCK = Lock()
_LIVE: WeakSet[Private] = WeakSet()  # all trainings of this process
MIN_LOSS = 1e-6  # of a smaller initial loss, a later one of normal size would be a large multiple


@dataclass(frozen=True)
class Terms:
    """The arguments of `make_private` that hold for the whole training.

    Attributes:
        algorithm: Name of the algorithm.
        delta: δ of (ε, δ)-differential privacy.
        target_epsilon: Largest tight ε that the steps may reach; None for no limit.
        precision: Precision of the forward pass, such as "bf16"; None for float32.
        regulariser: Function of the model whose gradient is added after the noise, or None.
        count_earlier: Whether ε counts steps in the ledger that this model may not have taken.
    """

    algorithm: str
    delta: float
    target_epsilon: float | None
    precision: str | None
    regulariser: Regulariser | None
    count_earlier: bool


@dataclass(eq=False, repr=False)
class Private:
    """A private training. `make_private` creates it.

        for batch in private.batches():
            private.step(batch)
        print(private.epsilon)

    Formal guarantees, provided that the training examples are used in `step` only:
        - At any time, the weights are (`epsilon`, δ)-differentially private for data sets that
          differ in one example or, with `unit`, in all examples of one owner. If they started from
          weights of other private trainings, this holds given those weights, and `epsilon_with`
          and `report` compute the ε of all trainings together.
        - `epsilon` counts every step in the ledger, including those of earlier processes.
        - With `target_epsilon`, `batches` ends before ε would exceed it.
        - A forked copy of the process takes no steps. Threads take steps one after the other.

    Attributes:
        model: The model that is trained.
        optimizer: The optimizer, or several in one.
        steps: Total number of steps in all epochs.
        done: Number of steps that this training has taken, of `steps`. Steps that
            `count_earlier` counts are not among them.
    """

    model: nn.Module
    optimizer: Any
    loss: PerExample
    algorithm: Algorithm
    terms: Terms
    examples: Items
    units: Units
    plan: Plan
    keys: Keys
    checked: Checked
    journal: Journal
    ranks: Ranks
    size: Size
    done: int = 0

    def __post_init__(self) -> None:
        finalize(self, _release, self.journal.resources)  # users of notebooks rarely call close()
        self._pending: Batch | None = None  # the batch that `batches` yielded and `step` must take
        self._num_steps_here = 0  # taken in this process
        self._is_closed = False
        self._num_untaken = 0 if self.terms.count_earlier else self.ledger.releases
        # Whether the model may have taken more steps than `done`
        self._has_counted = self.terms.count_earlier and self.ledger.releases > 0
        self._checked_parameters = _trained_parameters(dict(self.model.named_parameters()))
        self._earlier: Trainings = frozenset()
        self._was_warned_of_parts = False
        self._look_up_start()
        self._was_warned = False  # of a change of the weights
        self._write_error: WeightsChangedError | None = None
        self._modes = {module: module.training for module in self.model.modules()}
        self._initial_loss = max(self._checked_loss(), MIN_LOSS)
        self._max_releases: int | None = None
        target = self.terms.target_epsilon
        if target is not None:
            all_releases = self.ledger.releases + self.steps
            mechanism = self.algorithm.mechanism()
            self._max_releases = affordable_steps(mechanism, self.delta, target, all_releases)
        self._training = Training(
            self.algorithm,
            self.model,
            self.optimizer,
            SecureNoise(),  # a placeholder: each step has its own noise source
            self.ledger,
            self._max_releases,
            self.ranks,
            # A graph would not see what your code changes between steps: a weight of the loss, or
            # the memory of the parameters.
            CapturedSums(refused="other code may run between the steps"),
        )
        watch_steps(self.model, self.optimizer, self.journal.resources)
        self._record_versions()
        _LIVE.add(self)

    def __repr__(self) -> str:
        return f"Private(done={self.done})"

    @property
    def steps(self) -> int:
        """Total number of steps in all epochs."""
        return self.plan.steps

    @property
    def delta(self) -> float:
        """δ of (ε, δ)-differential privacy."""
        return self.terms.delta

    @property
    def ledger(self) -> Tally:
        """The ledger, which lists the steps of this training in all processes so far."""
        return self.journal.ledger

    def batches(self) -> Iterator[Batch]:
        """Yield the batch of each remaining step. Call `step` on every batch.

        It ends early if `target_epsilon` is used up.

        Raises:
            UserError: The previous batch was skipped, the model has diverged, or the ledger holds
                steps that the model has not taken.
        """
        self._require_taken()
        try:
            while self.done < self.steps and not self._is_spent():
                self._pending = Batch(self.done)
                yield self._pending
                if self._pending is not None:
                    raise UserError(
                        f"the batch of step {self.done:,} was skipped: call private.step(batch) on "
                        "every batch. Steps that depend on a batch's contents are not private."
                    )
        finally:
            # A training that starts from these weights can then compose its ε with this one's.
            if self._num_steps_here:
                self._note_weights()
        self._require_sound()
        if self.done < self.steps:
            log.warning(
                "stopped at %d of %d steps, because target_epsilon is used up: %d more steps in "
                "the ledger (lost, or taken by another model) also count",
                self.done,
                self.steps,
                self.ledger.releases - self.done,
            )

    def _require_taken(self) -> None:
        """Reject a model that has not taken the steps in the ledger."""
        if not self._num_untaken:
            return
        if self.journal.saved is None:
            name = self.checkpoint.name
            advice = f"there is no saved state in {name} to continue from (private.save() saves it)"
        else:
            advice = "call private.resume() to continue from the saved state"
        raise UserError(
            f"{self.journal.path}: holds {self._num_untaken:,} steps that this model has not "
            f"taken: {advice}. If the model took them, or may have, pass count_earlier=True so "
            "that every ε includes them. To train another, untrained model, use another ledger."
        )

    def _is_spent(self) -> bool:
        return self._max_releases is not None and self.ledger.releases >= self._max_releases

    def step(self, batch: Batch) -> None:
        """Draw the batch, and take one private step of the optimizer on it.

        The step is written to the ledger before its noise is drawn. Every module is set to the mode
        that it had when `make_private` checked it, so you may leave the model in `eval()` after an
        evaluation. SIGTERM and Ctrl-C take effect after the step, even if it fails; a second Ctrl-C
        takes effect at once.

        Args:
            batch: The batch that `batches` yielded last.

        Raises:
            UserError: `batch` is another one, the model is not the one that was checked, the model
                has diverged, `target_epsilon` is used up, or the training was closed or belongs to
                another process.
        """
        self.ledger.require_own_process()
        if self._is_closed:
            raise UserError(
                f"{self.journal.path}: this training was closed. To continue it, call make_private "
                "with the same ledger, and then resume."
            )
        explaining = explain_write_errors(self.journal.path, "call it again")
        with _STEP_LOCK, _signals_afterwards(), for_python(), explaining:
            self._step(batch)

    def _step(self, batch: Batch) -> None:
        if batch is None or batch is not self._pending:
            raise UserError(
                "private.step takes the batch that private.batches() yielded last, and only once."
            )
        if self._is_spent():
            raise UserError(
                "target_epsilon is used up, because steps that failed count too: the training ends "
                "here."
            )
        parameters = self._check_weights()
        self._check_trained(parameters)
        device = next(iter(parameters.values())).device
        require_gradients("private.step", device)
        if self._num_steps_here % WATCHED == 0:
            self._require_sound()
        steps_per_epoch = max(1, self.steps // self.plan.epochs)
        if self.done % steps_per_epoch == 0:
            renew(self.model, self.done)
        self._num_steps_here += 1
        self._restore_modes()
        model, keys, ranks = self.model, self.keys, self.ranks
        ranks.require_same({"step": (batch.number, self.ledger.releases)})
        key = ranks.broadcast(keys.step_key(model, self.ledger))
        training = replace(self._training, noise=keys.noise(key))
        regularised = adds_gradient(model, self.optimizer, self.terms.regulariser, ranks)
        # Dropout and random augmentation draw numbers for every example, so the generators' states
        # after the step would reveal how many examples there were.
        own_generators = preserve_random_state([device] if device.type == "cuda" else [])
        precision = arithmetic(self.terms.precision, False, model, self.algorithm, device)
        with regularised, own_generators, takes_parts(model), precision:
            micro_batches, divisor = self._draw(batch, key, device)
            try:
                with in_private_step():
                    private_step(training, batch.number, micro_batches, divisor)
            except WeightsChangedError as error:
                self._write_error = error
                raise
            except KeyboardInterrupt:
                # The weights may hold part of the step. They change only after its noise was added,
                # so ε still holds, and the change must not cause a warning.
                self._record_versions()
                raise
        self.done += 1
        self._pending = None
        self._record_versions()

    def _restore_modes(self) -> None:
        """Set every module to the mode in which the model was checked."""
        for module, mode in self._modes.items():
            if module.training != mode:
                module.training = mode

    def _draw(self, batch: Batch, key: str, device: torch.device) -> tuple[MicroBatches, float]:
        """Draw a step's examples; return them in micro-batches, and the divisor of their sum."""
        indices, shares, divisor = draw_batch(
            self.plan,
            key,
            batch.number,
            self.keys.secure,
            self.ranks,
            self.units.owners,
            self.units.count,
        )
        already_read: dict[str, Any] = {}  # by slice, which cannot be hashed itself

        def read(cut: slice) -> Any:
            return already_read.pop(str(cut), None) or self.examples.batch(indices[cut])

        micro_batches = read_in_pieces(read, len(indices), self.size, device, shares=shares)
        # Read the first micro-batch now, so that items that do not form a batch raise an error
        # before the step is in the ledger.
        for cut, _ in micro_batches.cuts()[:1]:
            already_read[str(cut)] = read(cut)
        return micro_batches, divisor

    def _require_sound(self) -> None:
        """Reject a model that has diverged; warn once if it seems to have.

        This looks at the noisy weights and at public examples, never at training examples.
        """
        advice = "Lower the learning rate, the noise or max_grad_norm."
        if not all(bool(p.isfinite().all()) for p in self.model.parameters()):
            raise UserError(f"{DIVERGED} step {self.done:,}: the weights are not finite. {advice}")
        loss = self._checked_loss()
        # `not <=` instead of `>`, because the loss may be NaN.
        if self._initial_loss < math.inf and not loss <= GROWTH * self._initial_loss:
            log.warning(
                "%s step %d, it seems: the loss on the check's examples rose from %.3g to %.3g. %s",
                *(DIVERGED, self.done, self._initial_loss, loss, advice),
            )
            self._initial_loss = math.inf  # do not warn again

    def _checked_loss(self) -> float:
        """Return the mean loss on the check's examples, with the same random draws each time."""
        inputs, targets = self.checked.batch
        with torch.no_grad(), takes_parts(self.model), preserve_random_state():
            set_seed(0)
            return float(self.loss(reference.compute_outputs(self.model, inputs), targets).mean())

    def _check_weights(self) -> dict[str, nn.Parameter]:
        """Return the parameters.

        If something other than `step` changed them, look up their earlier trainings, and warn once.
        """
        if self._write_error is not None:
            raise self._write_error
        parameters = dict(self.model.named_parameters())
        is_changed = not self._has_own_weights()
        # Versions do not detect a change through `.data`, so a start is always looked up.
        if is_changed or not self.done:
            self._look_up_start()
            self._record_versions()
        if is_changed and not self._was_warned:
            self._was_warned = True
            log.warning(
                "the weights were changed outside private.step: ε holds for them only if what "
                "changed them, such as averaging or clamping, used no private data"
            )
        return parameters

    def _record_versions(self) -> None:
        """Record the versions of the weights, so that `_check_weights` detects a change."""
        self._versions = self._versions_now()

    def _versions_now(self) -> WeightVersions:
        """Return the versions of all weights, also of those that another training changes."""
        return record_versions(dict(self.model.named_parameters()))

    def _note_weights(self) -> None:
        """Record in this process the trainings that the weights come from."""
        trainings = [self._as_earlier(), *self._earlier]
        starts.note_trained(self.model, self._checked_parameters, trainings)

    def _has_own_weights(self) -> bool:
        """Return True if the last change of the weights was a step of this training."""
        return self._versions == self._versions_now()

    def _look_up_start(self) -> None:
        """Add the known earlier trainings of the weights to those known so far."""
        for training in [*_LIVE]:  # whose loops may be suspended
            if training._num_steps_here and training._has_own_weights():
                training._note_weights()
        trainings = starts.find(self.model, self.journal.path.parent)
        others = self._exclude_own(trainings)
        self._earlier = starts.merge([*self._earlier, *others])
        self._warn_of_parts()

    def _exclude_own(self, trainings: Trainings) -> Trainings:
        """Return the trainings without the steps that the ledger counts."""
        return starts.exclude(trainings, self.ledger)

    def _warn_of_parts(self) -> None:
        """Warn once if a part of the weights comes from a training that ε does not count."""
        if self._was_warned_of_parts:
            return
        counted_ids = {earlier.id for earlier in self._earlier}
        for name, trainings in starts.find_in_part(self.model).items():
            others = self._exclude_own(trainings)
            uncounted = [training for training in others if training.id not in counted_ids]
            if uncounted:
                log.warning(
                    "parameter '%s' comes from the training with the ledger %s, but other weights "
                    "do not, so no ε here counts it: if both use the same data, state the ε of "
                    "both, private.epsilon_with(...), or use its ledger with count_earlier=True",
                    name,
                    Path(uncounted[0].ledger).name,
                )
                self._was_warned_of_parts = True
                return

    def _check_trained(self, parameters: dict[str, nn.Parameter]) -> None:
        """Reject a model whose parameters have hooks, or are not those that were checked."""
        before = self._checked_parameters
        now = _trained_parameters(parameters)
        names = now.keys() | before.keys()
        changed = [name for name in names if not _is_same(now.get(name), before.get(name))]
        if changed:
            raise UserError(
                f"parameter '{min(changed)}' was frozen, unfrozen or replaced after make_private "
                "checked the model: call make_private again with another ledger, and state the ε "
                "of both trainings, private.epsilon_with(...)."
            )
        require_no_hooks(parameters)
        require_held(parameters, self.optimizer)

    def _sync(self) -> None:
        """Force the ledger to disk. Call this before any result of its steps leaves the process."""
        with explain_write_errors(self.journal.path, "call it again"):
            self.ledger.sync()

    @property
    def epsilon(self) -> float:
        """The tight ε of all releases so far. Reading it forces the ledger to disk."""
        self._sync()
        mechanism = self.algorithm.mechanism()
        return tight_epsilon(mechanism, self.ledger.releases, self.delta)

    def epsilon_with(self, *others: Private) -> float:
        """Return the tight ε of several trainings together.

        Noise, bound and sampling rate may differ, as between the stages of a schedule. Weights that
        took part in all trainings have this ε. All steps in every ledger count, as do the trainings
        that starting weights are known to come from. Their order does not matter
        (`composition.compose_epsilon`).

        Args:
            others: Trainings on the same data, each with a ledger of its own.

        Returns:
            ε of all of them at `delta`.

        Raises:
            UserError: Another training has a different δ or protects different units, or the ε of
                starting weights together with the trainings is unknown.
        """
        trainings = (self, *others)
        if not all(isinstance(training, Private) for training in trainings):
            raise UserError(
                "private.epsilon_with: pass trainings that make_private returned, such as "
                "first.epsilon_with(second)."
            )
        ledgers = {training.journal.path.resolve() for training in trainings}
        if len(ledgers) < len(trainings):
            raise UserError("private.epsilon_with: pass each training once.")
        for training in trainings:
            training._sync()
            if training.delta != self.delta or training.units.digest != self.units.digest:
                raise UserError("private.epsilon_with: all trainings need the same delta and unit.")
            training._look_up_start()
        own = [training._as_earlier() for training in trainings]
        before = starts.merge(earlier for training in trainings for earlier in training._earlier)
        for training in trainings:
            before = training._exclude_own(before)
        for earlier in before:
            if earlier.owners != self.units.stated or earlier.owners == PRIVATE_OWNERS:
                raise UserError(
                    "private.epsilon_with: the starting weights also come from "
                    f"{Path(earlier.ledger).name}, which has another or a private list of owners: "
                    "pass this training too."
                )
        spent = [training.spent for training in (*own, *before)]
        try:
            return compose_epsilon(spent, self.delta)
        except ValueError as error:
            raise UserError(f"private.epsilon_with: {error}.") from None

    def report(self) -> dict[str, Any]:
        """Return the `privacy` section of a record, without a paper's claimed ε.

        Returns:
            The fields of the section, and these:
                - `epsilon_of`: what ε protects, an example or, with `unit`, an owner;
                - `examples_per_owner`: with `unit`, the largest number of an owner's examples in a
                  step;
                - `epsilon_part`: with `unit`, the ε of one of these examples;
                - `randomness_from`: the source of noise and batches;
                - `fixed_state`: names of the buffers and frozen parameters that the output depends
                  on, and that no ε covers;
                - `start`: the earlier trainings that the starting weights are known to come from,
                  and the ε of all trainings together;
                - `steps_taken`: number of steps that led to these weights, or None if it is
                  unknown because `count_earlier` counted steps. `steps` counts all steps in the
                  ledger, as ε does.
        """
        self._check_weights()
        self._sync()
        releases = self.ledger.releases
        mechanism = self.algorithm.mechanism()
        in_order = sorted(self._earlier, key=lambda earlier: (earlier.ledger, earlier.steps))
        start = starts.describe(self._as_earlier(), in_order, self.delta)
        randomness = randomness_kind(self.keys.source())
        report = released_report(mechanism, self.ledger, self.delta, randomness)
        unit: dict[str, Any] = {"epsilon_of": "example"}
        if self.units.owners is not None:
            unit = {
                "epsilon_of": "owner",
                "epsilon_part": example_epsilon(mechanism, releases, self.delta),
                "examples_per_owner": self.units.max_owned,
            }
        return (
            unit
            | report
            | self.algorithm.report(releases, self.delta)
            | {
                "steps_taken": None if self._has_counted else self.done,
                "noise_multiplier": self.algorithm.noise_multiplier,
                "randomness_from": self.keys.source(),
                "fixed_state": self.checked.fixed_state,
                "start": start,
            }
        )

    def _as_earlier(self) -> Earlier:
        """Describe this training for a later one that starts from its weights."""
        mechanism = self.algorithm.mechanism()
        return Earlier(
            ledger=str(self.journal.path.resolve()),
            owners=self.units.stated,
            z=mechanism.z,
            sampling=mechanism.sampling,
            steps=self.ledger.releases,
            id=self.ledger.part,
        )

    def export(
        self,
        folder: str | Path,
        *,
        name: str | None = None,
        data: str = "own data",
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Write the model in its current state to a folder that can be shared.

        `zdp_bench.load(folder, model=...)` reads it, and `zdp-bench verify` recomputes its ε.

        Args:
            folder: Folder to create; if it exists, it must be empty.
            name: Name of the model on its card. Default: the name of its class.
            data: Name of the training data on the card. Default: "own data".
            metrics: Metrics by name, measured on data that was not used in training. Default: none.

        Raises:
            UserError: The folder is not empty, a metric is not a number, a buffer or frozen
                parameter has changed, the model has diverged, or the weights also come from an
                earlier training and the ε of both together is unknown.
        """
        write_own = lookup("exporter", "folder")
        self._require_sound()
        report = self.report()
        if report["start"].get("epsilon_tight", 0.0) is None:
            names = sorted(Path(training.ledger).name for training in self._earlier)
            owners = {training.owners for training in (self._as_earlier(), *self._earlier)}
            reason = "has another unit or sampling"
            if owners == {PRIVATE_OWNERS}:
                reason = "protects owners whose list is private and cannot be compared"
            raise UserError(
                f"private.export: these weights were also trained with {', '.join(names)}, which "
                f"{reason}, so the folder cannot state the ε of both together: save the weights "
                "yourself, and state this."
            )
        if not self.ranks.is_first:  # all ranks have the same weights
            return
        self._sync()
        train = len(self.examples) if self.plan.sampling.records else None  # None: private
        about = {
            "name": _join_lines(name or type(self.model).__name__),
            "algorithm": self.terms.algorithm,
            "inputs": self.examples.describe(),
            "data": {"name": _join_lines(data), "provenance": "own", "train": train},
            "owners": self.units.stated,
        }
        card_metrics = {}
        for metric, value in (metrics or {}).items():
            card_metrics[_join_lines(metric)] = value
        with writable("folder", folder):
            write_own(Path(folder), self.model, self.journal.path, about, report, card_metrics)

    @property
    def checkpoint(self) -> Path:
        """The file that `save` writes, beside the ledger."""
        return self.journal.path.with_suffix(".pt")

    def save(self, scheduler: Scheduler | Sequence[Scheduler] | None = None) -> None:
        """Save weights, optimizer and scheduler beside the ledger, atomically.

        Args:
            scheduler: Learning rate scheduler of your loop, or a list of them. Default: none.

        Raises:
            UserError: `scheduler` is something else, or the weights cannot be saved.
        """
        schedules = read_schedules("private.save", scheduler)
        self._check_weights()
        if not self.ranks.is_first:  # all ranks have the same weights
            return
        self._sync()
        state = checkpoint.Checkpoint(
            run=self.journal.training_digest,
            step=self.done,
            model=self.model.state_dict(),
            optimizer=self.optimizer.state_dict(),
            ledger=self.ledger.position,
            epochs=[],
            scheduler=schedules.state_dict(),
            carried=dict(self.algorithm.carried),
            built=self._describe_built(schedules)
            | {
                EARLIER: [training.as_dict() for training in self._earlier],
                COUNTED: self._has_counted,
                TERMS: self.journal.terms,
            },
        )
        with explain_write_errors(self.checkpoint, "call it again"):
            checkpoint.save(self.checkpoint, state)
            trained = self._checked_parameters
            starts.save(self.journal.path, self.model, trained, self._as_earlier(), self._earlier)

    def _describe_built(self, schedules: Schedules) -> dict[str, Any]:
        """Return what must be the same when resuming, but is not compared by torch."""
        optimizer = self.optimizer
        names = {id(p): name for name, p in self.model.named_parameters()}
        return {
            "class of the optimizer": [type(member).__name__ for member in each_of(optimizer)],
            "order of the optimizer's parameters": [
                [names.get(id(p)) for p in group["params"]] for group in optimizer.param_groups
            ],
            "class of the schedule": schedules.kinds(),
        }

    def resume(self, scheduler: Scheduler | Sequence[Scheduler] | None = None) -> bool:
        """Continue from the state that an earlier process saved.

        Steps that a killed process took after saving are taken again. They are new releases and
        count again, because nothing guarantees that your code repeats them bit for bit.

        Args:
            scheduler: Learning rate scheduler, or a list of them, whose state is also loaded.
                Default: none.

        Returns:
            False if there is no saved state, else True.

        Raises:
            UserError: This process has already taken steps, `scheduler` is something else, or the
                saved state does not fit model, optimizer or scheduler.
        """
        schedules = read_schedules("private.resume", scheduler)
        if self.done:
            raise UserError("call private.resume() before the first step.")
        saved = self.journal.saved
        if saved is None:
            return False
        built = self._describe_built(schedules)
        try:
            earlier = map(Earlier.from_dict, saved.built.get(EARLIER, ()))
            for what, description in built.items():
                if saved.built[what] != description:
                    raise checkpoint.Misfit(f"the {what} differs")
            saved.restore(self.model, self.optimizer, schedules, self.algorithm.carried)
            self._earlier = frozenset(earlier)
            self._has_counted = bool(saved.built.get(COUNTED, False))
        except (checkpoint.Misfit, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{self.checkpoint}: does not fit this model, optimizer and schedule: "
                f"{first_line(error)} Create them as they were when it was saved."
            ) from None
        self.done = saved.step
        self._num_untaken = 0
        self._record_versions()
        if self.done:  # if the training is finished, no step of this process records it
            self._note_weights()
        return True

    def close(self) -> None:
        """Close the ledger and release its lock, as the end of the process does."""
        self._is_closed = True
        with explain_write_errors(self.journal.path, "the training can be resumed"):
            self.journal.resources.close()

    def __reduce__(self) -> NoReturn:
        raise UserError(
            "a private training cannot be copied or sent to another process, because its steps "
            "there would be counted separately: call make_private there, with another ledger."
        )

    def __enter__(self) -> Private:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def _signals_afterwards() -> Iterator[None]:
    """Let SIGTERM and the first Ctrl-C take effect after the context, even if it fails."""
    number = 0
    try:
        with stop_signals() as received_signal:
            try:
                yield
            finally:
                number = received_signal()
    finally:  # the earlier handlers are back
        if number:
            signal.raise_signal(number)


def _release(resources: ExitStack) -> None:
    """Close the ledger of a training that is garbage-collected."""
    with suppress(UserError):  # the folder was deleted, and no caller could handle the error
        resources.close()


def _join_lines(text: str) -> str:
    """Return a text on one line, because each field of a model card is one line."""
    return printable(" ".join(text.split()))


# A trained parameter and its dtype, which a conversion of the model changes in place.
_Trained = tuple[nn.Parameter, torch.dtype]


def _trained_parameters(parameters: dict[str, nn.Parameter]) -> dict[str, _Trained]:
    """Return each trained parameter and its dtype, by name."""
    return {name: (p, p.dtype) for name, p in parameters.items() if p.requires_grad}


def _is_same(now: _Trained | None, before: _Trained | None) -> bool:
    """Return True if both are the same object and dtype; False if one is missing."""
    if now is None or before is None:
        return False
    return now[0] is before[0] and now[1] == before[1]
