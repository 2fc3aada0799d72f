"""A private training in your own loop, which takes its steps one at a time."""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any, NoReturn
from weakref import finalize

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from zdp_bench.algorithms import Algorithm
from zdp_bench.errors import UserError, first_line, for_python, printable
from zdp_bench.gradients import PerExample, reference
from zdp_bench.gradients.losses import preserve_random_state, set_seed
from zdp_bench.gradients.parts import takes_parts
from zdp_bench.gradients.program import renew
from zdp_bench.library import starts
from zdp_bench.library.examples import Items
from zdp_bench.library.journal import Journal, writable
from zdp_bench.library.keys import Keys
from zdp_bench.library.model_check import require_gradients
from zdp_bench.library.optimizers import (
    Regulariser,
    adds_gradient,
    each_of,
    in_private_step,
    require_held,
    watch_steps,
)
from zdp_bench.library.starts import Earlier, Trainings
from zdp_bench.library.units import Units
from zdp_bench.privacy.accounting import affordable_steps, example_epsilon, tight_epsilon
from zdp_bench.privacy.composition import compose_epsilon
from zdp_bench.privacy.noise import SecureNoise
from zdp_bench.privacy.tally import Tally
from zdp_bench.registry import lookup
from zdp_bench.training import checkpoint
from zdp_bench.training.batches import Size, draw_batch, read_in_pieces
from zdp_bench.training.distributed import Ranks
from zdp_bench.training.evaluation import DIVERGED, GROWTH, WATCHED
from zdp_bench.training.interrupts import explain_write_errors, stop_signals
from zdp_bench.training.machine import arithmetic
from zdp_bench.training.model_checks import Checked
from zdp_bench.training.model_checks.state import Marks, WrittenError, mark_weights
from zdp_bench.training.plan import Plan
from zdp_bench.training.run import released_report
from zdp_bench.training.step import Training, private_step

log = logging.getLogger(__name__)
EARLIER = "earlier trainings"  # a key of the file that `save` writes
_STEP = Lock()  # threads step one at a time: hooks and generators belong to the whole process


@dataclass(frozen=True, eq=False)
class Batch:
    """The batch of one step, which `Private.step` draws.

    It gives no access to its examples or their number: both are private.

    Attributes:
        number: Number of the step, from 0.
    """

    number: int


@dataclass(frozen=True)
class Terms:
    """The arguments of `make_private` that hold for the whole training.

    Attributes:
        algorithm: Name of the algorithm.
        target_epsilon: No step that would exceed it is taken; None for no limit.
        count_earlier: Count steps of the ledger in ε although this model may not have taken them.
    """

    algorithm: str
    delta: float
    target_epsilon: float | None
    precision: str | None
    regulariser: Regulariser | None
    count_earlier: bool


@dataclass(eq=False, repr=False)
class Private:
    """A private training, made by `make_private`.

        for batch in private.batches():
            private.step(batch)
        print(private.epsilon)

    Formal guarantees, provided that the training examples are used in `step` only:
        - At any time, the weights are (`epsilon`, δ)-differentially private for data sets that
          differ in one example or, with `unit`, in all examples of one owner.
        - `epsilon` counts every step in the ledger, of this and of earlier processes.
        - With `target_epsilon`, `batches` ends before ε would exceed it.
        - A copy of the process takes no step, and threads take their steps one after the other.

    Attributes:
        steps: Number of steps of all epochs.
        done: Number of steps that the model has taken.
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
        finalize(self, _let_go, self.journal.resources)  # users of notebooks rarely call close()
        self._next: Batch | None = None
        self._taken = 0  # steps of this process
        self._not_taken = 0 if self.terms.count_earlier else self.ledger.releases
        self._trained = _what_trains(dict(self.model.named_parameters()))
        self._left: Marks | None = {}  # the weights after the last step; None once a change is said
        self._earlier: Trainings = starts.find(self.model, self.journal.path.parent)
        self._written: WrittenError | None = None
        self._modes = {module: module.training for module in self.model.modules()}
        self._start = max(self._checked_loss(), 1e-6)
        self._limit: int | None = None
        target = self.terms.target_epsilon
        if target is not None:
            most = self.ledger.releases + self.steps
            self._limit = affordable_steps(self.algorithm.mechanism(), self.delta, target, most)
        self._training = Training(
            self.algorithm,
            self.model,
            self.optimizer,
            SecureNoise(),  # each step brings its own
            self.ledger,
            self._limit,
            self.ranks,
        )
        watch_steps(self.model, self.optimizer, self.journal.resources)

    def __repr__(self) -> str:
        return f"Private(done={self.done})"

    @property
    def steps(self) -> int:
        return self.plan.steps

    @property
    def delta(self) -> float:
        """The δ of (ε, δ)."""
        return self.terms.delta

    @property
    def ledger(self) -> Tally:
        """The steps of this training in all processes so far."""
        return self.journal.ledger

    def batches(self) -> Iterator[Batch]:
        """Yield the batch of every remaining step; call `step` on each.

        Raises:
            UserError: The previous batch was skipped, or the ledger holds steps that the model has
                not taken.
        """
        self._require_taken()
        try:
            while self.done < self.steps and not self._is_spent():
                self._next = Batch(self.done)
                yield self._next
                if self._next is not None:
                    raise UserError(
                        f"the batch of step {self.done:,} was skipped: call private.step(batch) on "
                        "every batch. Steps that depend on a batch's contents are not private."
                    )
        finally:
            if (
                self._taken
            ):  # a training that starts from these weights then composes its ε with this one
                starts.note(self.model, self._trainings())
        self._require_sound()
        if self.done < self.steps:
            log.warning(
                "stopped at %d of %d steps, because target_epsilon is used up: %d more steps in "
                "the ledger (lost or of another model) count too",
                self.done,
                self.steps,
                self.ledger.releases - self.done,
            )

    def _require_taken(self) -> None:
        """Reject a model that has not taken the steps in the ledger."""
        if not self._not_taken:
            return
        first = (
            f"no saved state in {self.checkpoint.name} to continue from (private.save() saves one)"
            if self.journal.saved is None
            else "call private.resume() to continue from the saved state"
        )
        raise UserError(
            f"{self.journal.path}: holds {self._not_taken:,} steps that this model has not "
            f"taken: {first}. If it went through them, or may have, pass count_earlier=True so "
            "that every ε includes them. To train another, untrained model, use another ledger."
        )

    def _is_spent(self) -> bool:
        return self._limit is not None and self.ledger.releases >= self._limit

    def step(self, batch: Batch) -> None:
        """Draw the batch, and take one private step of the optimizer on it.

        The step is written to the ledger before its noise is drawn. Every module is set to the mode
        it had when `make_private` checked it, so you may leave the model in `eval()` after an
        evaluation. A signal is handled after the step; a second ctrl-C is not held back.

        Raises:
            UserError: `batch` is not the last one that `batches` yielded, the model is not the one
                that was checked, or the training belongs to another process.
        """
        self.ledger.require_own_process()
        unwritten = explain_write_errors(self.journal.path, "call it again")
        with _STEP, for_python(), unwritten, stop_signals() as received:
            self._step(batch)
        if number := received():
            signal.raise_signal(number)

    def _step(self, batch: Batch) -> None:
        if batch is not self._next:
            raise UserError("private.step accepts the last batch of private.batches(), once.")
        require_gradients("private.step")
        parameters = self._check_weights()
        self._check_trained(parameters)
        if self._taken % WATCHED == 0:
            self._require_sound()
        if self.done % max(1, self.steps // self.plan.epochs) == 0:
            renew(self.model)
        self._taken += 1
        model = self.model
        keys, ranks = self.keys, self.ranks
        for module, mode in self._modes.items():
            if module.training != mode:
                module.training = mode
        adding = adds_gradient(model, self.optimizer, self.terms.regulariser, ranks)
        told = batch.number, self.ledger.releases
        ranks.require_same({"step": told})
        key = ranks.broadcast(keys.of_step(model, self.ledger))
        device = next(iter(parameters.values())).device
        training = replace(self._training, noise=keys.noise(key))
        exact = arithmetic(self.terms.precision, False, model, self.algorithm, device)
        # Dropout draws for every example, so the generator's state would reveal their number.
        seeds = torch.random.fork_rng([device] if device.type == "cuda" else [])
        with adding, seeds, takes_parts(model), exact:
            units = self.units
            indices, shares, divisor = draw_batch(
                self.plan, key, batch.number, keys.secure, ranks, units.owners, units.count
            )
            first: dict[str, Any] = {}

            def read(cut: slice) -> Any:
                return first.pop(str(cut), None) or self.examples.batch(indices[cut])

            pieces = read_in_pieces(read, len(indices), self.size, device, shares=shares)
            # Read the first piece now: items that do not form a batch raise before the step counts.
            for cut, _ in pieces.cuts()[:1]:
                first[str(cut)] = read(cut)
            try:
                with in_private_step():
                    private_step(training, batch.number, pieces, divisor)
            except WrittenError as error:
                self._written = error
                raise
            except (
                KeyboardInterrupt
            ):  # the weights may hold half a step, with its noise: ε still holds
                self._left = {}
                raise
        self.done += 1
        self._next = None
        if self._left is not None:
            self._left = mark_weights(parameters)

    def _require_sound(self) -> None:
        """Reject a model that has diverged; warn once if it seems to.

        This looks at the noisy weights and at public examples, never at training examples.
        """
        advice = "Lower the learning rate, the noise or max_grad_norm."
        if not all(bool(p.isfinite().all()) for p in self.model.parameters()):
            raise UserError(f"{DIVERGED} step {self.done:,}: the weights are not finite. {advice}")
        loss = self._checked_loss()
        if self._start < math.inf and not loss <= GROWTH * self._start:
            log.warning(
                "%s step %d, it seems: the loss on the check's examples rose from %.3g to %.3g. %s",
                *(DIVERGED, self.done, self._start, loss, advice),
            )
            self._start = math.inf  # do not warn again

    def _checked_loss(self) -> float:
        """Return the mean loss on the examples of the check, with the same draws each time."""
        inputs, targets = self.checked.batch
        with torch.no_grad(), takes_parts(self.model), preserve_random_state():
            set_seed(0)
            return float(self.loss(reference.compute_outputs(self.model, inputs), targets).mean())

    def _check_weights(self) -> dict[str, nn.Parameter]:
        """Return the parameters; warn once if something other than `step` changed them."""
        if self._written is not None:
            raise self._written
        parameters = dict(self.model.named_parameters())
        if self._left and self._left != mark_weights(parameters):
            self._left = None
            self._earlier |= starts.find(self.model, self.journal.path.parent)
            log.warning(
                "the weights were changed outside private.step: ε holds for them only if what "
                "changed them (an average, a clamp?) saw no private data"
            )
        return parameters

    def _check_trained(self, parameters: dict[str, nn.Parameter]) -> None:
        """Reject a model whose trained parameters are not those that were checked."""
        now = _what_trains(parameters)
        names = now.keys() | self._trained.keys()
        unchanged = {name for name in names if _is_same(now.get(name), self._trained.get(name))}
        changed = names - unchanged
        if changed:
            raise UserError(
                f"parameter '{min(changed)}' was frozen, set free, or replaced after make_private "
                "checked the model: call make_private again, with another ledger, and state "
                "private.epsilon_with(...) of both."
            )
        require_held(parameters, self.optimizer)

    def _sync(self) -> None:
        """Force the ledger to disk, before any result of its steps leaves the process."""
        with explain_write_errors(self.journal.path, "call it again"):
            self.ledger.sync()

    @property
    def epsilon(self) -> float:
        """The tight ε of all releases so far, which this call forces to disk."""
        self._sync()
        mechanism = self.algorithm.mechanism()
        return tight_epsilon(mechanism, self.ledger.releases, self.delta)

    def epsilon_with(self, *others: Private) -> float:
        """Return the tight ε of several trainings together.

        Each may have its own noise, bound and sampling rate, such as the stages of a schedule: the
        final weights then have this ε. All steps of every ledger count, in whatever order they were
        taken (`composition.compose_epsilon`).

        Raises:
            UserError: Another training has a different δ or protects different units.
        """
        trainings = (self, *others)
        if not all(isinstance(training, Private) for training in trainings):
            raise UserError("private.epsilon_with takes what make_private returned: (a, b).")
        ledgers = {training.journal.path.resolve() for training in trainings}
        if len(ledgers) < len(trainings):
            raise UserError("private.epsilon_with: pass each ledger's run once.")
        spent = []
        for training in trainings:
            training._sync()
            if training.delta != self.delta or training.units.digest != self.units.digest:
                raise UserError("private.epsilon_with: all runs need the same delta and unit.")
            spent.append(training._as_earlier().spent)
        return compose_epsilon(spent, self.delta)

    def report(self) -> dict[str, Any]:
        """Return the `privacy` section of a record, without a paper's claimed ε.

        `epsilon_of` says what ε protects: an example or, with `unit`, an owner with at most
        `examples_per_owner` examples in a step; `epsilon_part` is then the ε of one of these
        examples. In addition:
            - `randomness_from` is the source of noise and batches;
            - `fixed_state` lists the buffers and frozen parameters that the output depends on, and
              that no ε covers;
            - `start` lists the earlier trainings that the starting weights are known to come from,
              and the ε of all together;
            - `steps_taken` counts the steps that led to these weights, and `steps`, which ε counts,
              all steps in the ledger.
        """
        self._sync()
        releases = self.ledger.releases
        mechanism, secure = self.algorithm.mechanism(), self.keys.secure
        start = starts.describe(self._as_earlier(), self._before(), self.delta)
        report = released_report(mechanism, self.ledger, releases, self.delta, secure)
        unit: dict[str, Any] = {"epsilon_of": "example"}
        if self.units.owners is not None:
            unit = {
                "epsilon_of": "owner",
                "epsilon_part": example_epsilon(mechanism, releases, self.delta),
                "examples_per_owner": self.units.most_owned,
            }
        return (
            unit
            | report
            | self.algorithm.report(releases, self.delta)
            | {
                "steps_taken": self.done,
                "noise_multiplier": self.algorithm.noise_multiplier,
                "randomness_from": self.keys.source(),
                "fixed_state": self.checked.fixed_state,
                "start": start,
            }
        )

    def _as_earlier(self) -> Earlier:
        """Describe this training for a later one that starts from its weights."""
        mechanism, steps = self.algorithm.mechanism(), self.ledger.releases
        ledger = str(self.journal.path.resolve())
        return Earlier(ledger, self.units.stated, mechanism.z, mechanism.sampling, steps)

    def _before(self) -> Trainings:
        """Return the other trainings that took part in these weights."""
        own = str(self.journal.path.resolve())
        return frozenset(training for training in self._earlier if training.ledger != own)

    def _trainings(self) -> Trainings:
        """Return all trainings that took part in these weights."""
        return self._before() | {self._as_earlier()}

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
            data: Name of the training data on the card.
            metrics: Metrics by name, measured on data that was not used in training.

        Raises:
            UserError: The folder is not empty, a metric is not a number, something other than the
                trained weights has changed, or no ε is known for this training together with an
                earlier one of these weights.
        """
        write_own = lookup("exporter", "folder")
        self._require_sound()
        self._check_weights()
        report = self.report()
        if report["start"].get("epsilon_tight", 0.0) is None:
            names = sorted(Path(training.ledger).name for training in self._before())
            raise UserError(
                f"private.export: these weights were also trained under {', '.join(names)}, of "
                "another unit or sampling, and no ε of both is known: save them yourself, and say "
                "so."
            )
        if not self.ranks.is_first:  # all have the same
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
        named = {_join_lines(metric): value for metric, value in (metrics or {}).items()}
        with writable("folder", folder):
            write_own(Path(folder), self.model, self.journal.path, about, report, named)

    @property
    def checkpoint(self) -> Path:
        """The file that `save` writes, beside the ledger."""
        return self.journal.path.with_suffix(".pt")

    def save(self, scheduler: LRScheduler | None = None) -> None:
        """Save weights, optimizer and scheduler beside the ledger, completely or not at all."""
        self._check_weights()
        if not self.ranks.is_first:  # all have the same
            return
        self._sync()
        state = checkpoint.Checkpoint(
            self.journal.training,
            self.done,
            self.model.state_dict(),
            self.optimizer.state_dict(),
            self.ledger.position,
            [],
            scheduler.state_dict() if scheduler else {},
            carried=dict(self.algorithm.carried),
            built=self._describe_built(scheduler)
            | {EARLIER: [training.as_dict() for training in self._before()]},
        )
        with explain_write_errors(self.checkpoint, "call it again"):
            checkpoint.save(self.checkpoint, state)
            starts.save(self.journal.path, self.model, self._trainings())

    def _describe_built(self, scheduler: LRScheduler | None) -> dict[str, Any]:
        """Return what must be equal on resuming although torch does not compare it."""

        def kinds(schedule: Any) -> list[Any]:
            inner = getattr(schedule, "_schedulers", ())
            return [type(schedule).__name__, *map(kinds, inner)]

        optimizer = self.optimizer
        names = {id(p): name for name, p in self.model.named_parameters()}
        return {
            "class of the optimizer": [type(member).__name__ for member in each_of(optimizer)],
            "order of the optimizer's parameters": [
                [names.get(id(p)) for p in group["params"]] for group in optimizer.param_groups
            ],
            "class of the schedule": kinds(scheduler),
        }

    def resume(self, scheduler: LRScheduler | None = None) -> bool:
        """Continue from the state that an earlier process saved; return False if there is none.

        Steps that a killed process took after saving are taken again as new releases, and count
        again, because nothing guarantees that your code repeats them bit for bit.

        Raises:
            UserError: This process has already taken steps, or the saved model, optimizer or
                scheduler is a different one.
        """
        if self.done:
            raise UserError("private.resume() comes before the first step.")
        if self.journal.saved is None:
            return False
        built = self._describe_built(scheduler)
        try:
            earlier = map(Earlier.from_dict, self.journal.saved.built.get(EARLIER, ()))
            for what, own in built.items():
                if self.journal.saved.built[what] != own:
                    raise checkpoint.Misfit(f"the {what} was another")
            self.journal.saved.restore(
                self.model, self.optimizer, scheduler, self.algorithm.carried
            )
            self._earlier = frozenset(earlier)
        except (checkpoint.Misfit, KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"{self.checkpoint}: does not fit this model, optimizer and schedule: "
                f"{first_line(error)} Create them as they were when it was saved."
            ) from None
        self.done, self._not_taken = self.journal.saved.step, 0
        self._left = mark_weights(dict(self.model.named_parameters()))
        return True

    def close(self) -> None:
        """Close the ledger and release its lock, as the end of the process does."""
        with explain_write_errors(self.journal.path, "the training can be resumed"):
            self.journal.resources.close()

    def __reduce__(self) -> NoReturn:
        raise UserError(
            "a private training run is not copied or sent to another process, where its steps "
            "would be counted apart: call make_private there, with a ledger of its own."
        )

    def __enter__(self) -> Private:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _let_go(resources: ExitStack) -> None:
    """Close the ledger of a training that nothing refers to any more."""
    with suppress(UserError):  # no caller is left to be told that the folder was deleted
        resources.close()


def _join_lines(text: str) -> str:
    """Return a text on one line, for a model card whose fields are lines."""
    return printable(" ".join(text.split()))


def _what_trains(
    parameters: dict[str, nn.Parameter],
) -> dict[str, tuple[nn.Parameter, torch.dtype]]:
    """Return each trained parameter and its dtype, by name."""
    return {name: (p, p.dtype) for name, p in parameters.items() if p.requires_grad}


def _is_same(
    now: tuple[nn.Parameter, torch.dtype] | None, before: tuple[nn.Parameter, torch.dtype] | None
) -> bool:
    if now is None or before is None:
        return False
    return now[0] is before[0] and now[1] == before[1]
