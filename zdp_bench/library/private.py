"""A private training in your own loop: the steps of a run, one at a time."""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any, NoReturn
from weakref import finalize

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from zdp_bench.algorithms import Algorithm
from zdp_bench.errors import UserError, first_line, printable
from zdp_bench.gradients.parts import takes_parts
from zdp_bench.library import trails
from zdp_bench.library.examples import Items, owners_digest
from zdp_bench.library.keys import Keys
from zdp_bench.library.model_check import require_gradients, says_python
from zdp_bench.library.optimizers import (
    Regulariser,
    adds_gradient,
    each_of,
    in_private_step,
    require_held,
    watch_steps,
)
from zdp_bench.library.trails import Trail
from zdp_bench.privacy.accounting import affordable_steps, part_epsilon, tight_epsilon
from zdp_bench.privacy.composition import Spent, together
from zdp_bench.privacy.ledger import Ledger
from zdp_bench.privacy.noise import SecureNoise
from zdp_bench.training import checkpoint
from zdp_bench.training.batches import Size, draw_all, read_in_pieces
from zdp_bench.training.distributed import Ranks
from zdp_bench.training.evaluation import DIVERGED, GROWTH, WATCHED
from zdp_bench.training.interrupts import explain_write_errors, stop_signals
from zdp_bench.training.machine import arithmetic
from zdp_bench.training.model_checks.state import Guard, Marks, WrittenError, mark_weights
from zdp_bench.training.plan import Patients, Plan
from zdp_bench.training.run import released_report
from zdp_bench.training.step import Training, private_step

log = logging.getLogger(__name__)
_STEP = Lock()  # one thread steps at a time: a step's hooks and generators are the process's


@dataclass(frozen=True)
class PrivateSetup:
    """What stays the same from step to step.

    Attributes:
        run: the digest of mechanism, plan and `whose`; a checkpoint of another training is refused.
        named: the algorithm's name.
        ledger_file: rank 0 writes it.
        count_earlier: steps of the ledger that the model has not taken may count in ε.
        owners: whose the examples are, if owners are drawn; None: an example is its own unit.
        units: how many examples, or owners, a step draws from.
        most_owned: the most examples that one of them brings to a step.
        whose: what the ledger says of the owners; empty without.
        ranks: the processes that train together.
        fixed_state: what `check_model` returned.
        guard: finds what else than the trained weights has changed on the model since.
        checked_loss: gives the model's loss on what it was checked on, random or public examples.
        regulariser: its gradient is added to each step's.
    """

    model: nn.Module
    optimizer: Any
    algorithm: Algorithm
    named: str
    examples: Items
    plan: Plan
    delta: float
    target_epsilon: float | None
    precision: str | None
    keys: Keys
    fixed_state: list[str]
    guard: Guard
    checked_loss: Callable[[], float]
    regulariser: Regulariser | None
    run: str
    ledger_file: Path
    count_earlier: bool
    owners: Patients | None
    units: int
    most_owned: int
    whose: str
    ranks: Ranks


@dataclass(frozen=True, eq=False)
class Batch:
    """The batch of one step, for `Private.step`, which draws it.

    Nobody else sees its examples, or how many there are: both are private.

    Attributes:
        number: the step's, from 0.
    """

    number: int


@dataclass(eq=False)
class Private:
    """A private training. Make it with `make_private`.

        for batch in private.batches():
            private.step(batch)
        print(private.epsilon)

    Formal guarantees, as far as the training examples reach nothing but `step`:
        - the weights, at any time, are (`epsilon`, δ)-differentially private, for data sets that
          differ in one example or, with `unit`, in all examples of one owner;
        - `epsilon` counts every step that the ledger holds, of this process and of those before;
        - with `target_epsilon`, `batches` ends before ε would exceed it;
        - a copy of the process takes no step, and two threads take theirs one after the other.

    Attributes:
        steps: how many the epochs are.
        done: steps that the model has taken.
    """

    setting: PrivateSetup = field(repr=False)
    ledger: Ledger = field(repr=False)
    saved: checkpoint.Checkpoint | None = field(repr=False)
    size: Size = field(repr=False)
    resources: ExitStack = field(repr=False)
    done: int = 0

    def __post_init__(self) -> None:
        model = self.setting.model
        finalize(self, _let_go, self.resources)  # a notebook's user closes nothing
        self._next: Batch | None = None
        self._taken = 0  # steps of this process
        self._not_taken = 0 if self.setting.count_earlier else self.ledger.releases
        self._trained = _what_trains(dict(model.named_parameters()))
        self._left: Marks | None = {}  # the weights after the last step; None once a change is said
        self._trail: Trail | None = None
        self._written: WrittenError | None = None
        self._modes = {module: module.training for module in model.modules()}
        self._start = self.setting.checked_loss()
        self._limit: int | None = None
        if self.setting.target_epsilon is not None:
            most = self.ledger.releases + self.steps
            self._limit = affordable_steps(
                self.setting.algorithm.mechanism(),
                self.setting.delta,
                self.setting.target_epsilon,
                most,
            )
        self.ledger.reserve(self.steps, self._limit)
        setting = self.setting
        self._training = Training(
            setting.algorithm,
            model,
            setting.optimizer,
            SecureNoise(),  # each step brings its own
            self.ledger,
            self._limit,
            setting.ranks,
        )
        watch_steps(model, setting.optimizer, self.resources)

    @property
    def steps(self) -> int:
        return self.setting.plan.steps

    def batches(self) -> Iterator[Batch]:
        """Yield the batch of every step that is left; call `step` on each.

        Raises:
            UserError: the last batch was left out, or the ledger holds steps that the model has not
                taken.
        """
        self._require_taken()
        while self.done < self.steps and not self._is_spent():
            self._next = Batch(self.done)
            yield self._next
            if self._next is not None:
                raise UserError(
                    f"the batch of step {self.done:,} was skipped: call private.step(batch) on "
                    "every batch. Steps that depend on a batch's contents are not private."
                )
        self._require_sound()
        if self.done < self.steps:
            log.warning(
                "stopped at %d of %d steps, because target_epsilon is used up: %d more steps in "
                "the ledger (reserved, lost or of another model) count too",
                self.done,
                self.steps,
                self.ledger.releases - self.done,
            )

    def _require_taken(self) -> None:
        """Reject weights that are not those of the ledger's steps."""
        if not self._not_taken:
            return
        first = (
            f"no saved state in {self.checkpoint.name} to continue from (private.save() saves one)"
            if self.saved is None
            else "call private.resume() to continue from the saved state"
        )
        raise UserError(
            f"{self.setting.ledger_file}: holds {self._not_taken:,} steps that this model has not "
            f"taken: {first}. To train another model, use another ledger, or pass "
            "count_earlier=True so that every ε includes them."
        )

    def _is_spent(self) -> bool:
        return self._limit is not None and self.ledger.releases >= self._limit

    def step(self, batch: Batch) -> None:
        """Draw the batch, and take one private step of the optimiser on it.

        The step is in the ledger before its noise is drawn. Every module is in the mode it was in
        when `make_private` saw it, so evaluation in between may leave the model in `eval()`. A
        signal waits for the step's end; a second ctrl-C does not.

        Raises:
            UserError: it is not the batch that `batches` gave last, the model is another than the
                one that was checked, or another process began the training.
        """
        self.ledger.require_own_process()
        unwritten = explain_write_errors(self.setting.ledger_file, "call it again")
        with _STEP, says_python(), unwritten, stop_signals() as asked:
            self._step(batch)
        if number := asked():
            signal.raise_signal(number)

    def _step(self, batch: Batch) -> None:
        if batch is not self._next:
            raise UserError("private.step accepts the last batch of private.batches(), once.")
        require_gradients("private.step")
        parameters = self._check_weights()
        self._check_trained(parameters)
        if self._taken % WATCHED == 0:
            self._require_sound()
        self._taken += 1
        setting, model = self.setting, self.setting.model
        trained = [p for p in parameters.values() if p.requires_grad and p.numel() > 1]
        if self._trail is None:
            self._trail = trails.begin(setting.ledger_file, model, trained)
        keys, ranks = setting.keys, setting.ranks
        for module, mode in self._modes.items():
            if module.training != mode:
                module.training = mode
        adding = adds_gradient(model, setting.optimizer, setting.regulariser, ranks)
        told = batch.number, self.ledger.releases
        ranks.require_same({"step": told})
        key = ranks.broadcast(keys.of_step(model, self.ledger))
        device = next(iter(parameters.values())).device
        training = replace(self._training, noise=keys.noise(key))
        exact = arithmetic(setting.precision, False, model, setting.algorithm, device)
        # Dropout draws for every example, so the generator's state would tell how many there were.
        seeds = torch.random.fork_rng([device] if device.type == "cuda" else [])
        with adding, seeds, takes_parts(model), exact:
            drawn = setting.plan, key, batch.number, keys.secure, ranks, setting.units
            everyone, divisor = draw_all(*drawn)
            indices, shares = ranks.take_share(everyone), None
            if setting.owners is not None:
                indices, shares = setting.owners.take(indices, key, batch.number)
            first: dict[str, Any] = {}

            def read(cut: slice) -> Any:
                return first.pop(str(cut), None) or setting.examples.batch(indices[cut])

            pieces = read_in_pieces(read, len(indices), self.size, device, shares=shares)
            for cut, _ in pieces.cuts()[:1]:  # items that make no batch raise before a step counts
                first[str(cut)] = read(cut)
            try:
                with in_private_step():
                    private_step(training, batch.number, pieces, divisor)
            except WrittenError as error:
                self._written = error
                raise
            except KeyboardInterrupt:  # half a step may be in the weights: noisy, so no ε is lost
                self._left = {}
                raise
        self._trail.add(trained)
        self.done += 1
        self._next = None
        if self._left is not None:
            self._left = mark_weights(parameters)

    def _require_sound(self) -> None:
        """Reject a model that changed beside its weights, or diverged; warn once if that is likely.

        Of the examples nothing is looked at but the noisy weights.
        """
        setting = self.setting
        setting.guard.require_unchanged()
        advice = "Lower the learning rate, the noise or max_grad_norm."
        if not all(bool(p.isfinite().all()) for p in setting.model.parameters()):
            raise UserError(
                f"{DIVERGED} step {self.done:,}: the weights are not finite. {advice} The steps "
                "remain in the ledger."
            )
        loss = setting.checked_loss()
        if math.isfinite(self._start) and not loss <= GROWTH * max(self._start, 1e-6):
            log.warning(
                "%s step %d, it seems: the loss on the check's examples rose from %.3g to %.3g. %s",
                *(DIVERGED, self.done, self._start, loss, advice),
            )
            self._start = math.inf  # said

    def _check_weights(self) -> dict[str, nn.Parameter]:
        """Return the parameters; warn once of weights that are not those the last step left.

        Raises:
            WrittenError: examples reached them without noise.
        """
        if self._written is not None:
            raise self._written
        parameters = dict(self.setting.model.named_parameters())
        if self._left and self._left != mark_weights(parameters):
            self._left = None
            if self._trail:  # as of another training
                self._trail.origins |= trails.through(self.setting.model, self.setting.ledger_file)
            log.warning(
                "the weights were changed outside private.step: ε holds for them only if what "
                "changed them (an average, a clamp?) saw no private data"
            )
        return parameters

    def _check_trained(self, parameters: dict[str, nn.Parameter]) -> None:
        now = _what_trains(parameters)
        if changed := {name for name, _ in now.items() ^ self._trained.items()}:
            raise UserError(
                f"parameter '{min(changed)}' was frozen, set free, or replaced after make_private "
                "checked the model: call make_private again, with another ledger."
            )
        require_held(parameters, self.setting.optimizer)

    @property
    def epsilon(self) -> float:
        """The tight ε of all releases so far."""
        mechanism = self.setting.algorithm.mechanism()
        return tight_epsilon(mechanism, self.ledger.releases, self.setting.delta)

    def epsilon_with(self, *others: Private) -> float:
        """Return the tight ε of these trainings together, each with its own noise, bound and rate.

        The stages of a schedule, say: the weights that the last leaves have this ε. All steps of
        every ledger count, in any order (`composition.together`).

        Raises:
            UserError: another training has another δ, or hides other units.
        """
        spent: list[Spent] = []
        asked = self.setting.delta, owners_digest(self.setting.owners)
        trainings = (self, *others)
        if not all(isinstance(one, Private) for one in trainings):
            raise UserError("private.epsilon_with takes trainings that make_private made: (a, b).")
        if len({one.setting.ledger_file.resolve() for one in trainings}) < len(trainings):
            raise UserError("private.epsilon_with: pass each ledger's training once.")
        for one in trainings:
            setting = one.setting
            # `whose` names no owners where their number is private
            if (setting.delta, owners_digest(setting.owners)) != asked:
                raise UserError("private.epsilon_with: all trainings need the same delta and unit.")
            mechanism = setting.algorithm.mechanism()
            sampling = replace(mechanism.sampling, records=max(1, mechanism.sampling.records))
            spent.append(Spent(mechanism.z, sampling, one.ledger.releases))
        return together(spent, self.setting.delta)

    def report(self) -> dict[str, Any]:
        """Return what a record's `privacy` holds, but for a paper's claim.

        `epsilon_of` says whose ε it is: an example's or, with `unit`, an owner's, with at most
        `examples_per_owner` examples in a step; `epsilon_part` is that of one of these. Beside it:
        `randomness_from`, and `fixed_state`, the buffers and frozen parameters that the output
        depends on and no ε covers. `steps_taken` are those that led to these weights; `steps`,
        which ε counts, are all of the ledger.
        """
        setting, releases = self.setting, self.ledger.releases
        mechanism, secure = setting.algorithm.mechanism(), setting.keys.secure
        report = released_report(mechanism, self.ledger, releases, setting.delta, secure)
        whose: dict[str, Any] = {"epsilon_of": "example"}
        if setting.owners is not None:
            whose = {
                "epsilon_of": "owner",
                "epsilon_part": part_epsilon(mechanism, releases, setting.delta),
                "examples_per_owner": setting.most_owned,
            }
        return (
            whose
            | report
            | setting.algorithm.report(releases, setting.delta)
            | {
                "steps_taken": self.done,
                "noise_multiplier": setting.algorithm.noise_multiplier,
                "randomness_from": setting.keys.source(),
                "fixed_state": setting.fixed_state,
            }
        )

    def export(
        self,
        folder: str | Path,
        *,
        name: str | None = None,
        data: str = "own data",
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Write the model, as it is now, as a folder to share (`sharing`); its ε is that so far.

        `zdp_bench.load(folder, model=...)` reads it, `zdp-bench verify` computes its ε again.

        Args:
            folder: is made, or empty.
            name: of the model, on its card; the name of its class otherwise.
            data: what to call the training data.
            metrics: what you measured on data that is not of the training, by name.

        Raises:
            UserError: the folder holds something, a metric is no number, the model has changed
                beside its trained weights, or they had another private training, which the card of
                one ledger would not count.
        """
        from zdp_bench.extras.sharing.export import write_own

        setting = self.setting
        for other in trails.through(setting.model, setting.ledger_file):
            raise UserError(
                f"private.export: these weights were also trained under {other.name}, which the "
                "card's ε would not count: save them yourself, and state private.epsilon_with(...)."
            )
        self._require_sound()
        self._check_weights()
        if not setting.ranks.is_first:  # all have the same
            return
        self.ledger.settle()  # its file is copied
        train = len(setting.examples) if setting.plan.sampling.records else None  # None: private
        about = {
            "name": _join_lines(name or type(setting.model).__name__),
            "algorithm": setting.named,
            "inputs": setting.examples.describe(),
            "data": {"name": _join_lines(data), "provenance": "own", "train": train},
            "owners": setting.whose,
        }
        named = {_join_lines(metric): value for metric, value in (metrics or {}).items()}
        try:
            ledger = setting.ledger_file
            write_own(Path(folder), setting.model, ledger, about, self.report(), named)
        except OSError as error:
            raise UserError(
                f"folder={folder}: cannot be written ({error.strerror or error}); choose another "
                "one."
            ) from None

    @property
    def checkpoint(self) -> Path:
        """Where `save` writes: beside the ledger."""
        return self.setting.ledger_file.with_suffix(".pt")

    def save(self, scheduler: LRScheduler | None = None) -> None:
        """Save weights, optimiser and schedule beside the ledger, whole or not at all."""
        setting = self.setting
        self._check_weights()
        if not setting.ranks.is_first:  # all have the same
            return
        self.ledger.require_intact()
        state = checkpoint.Checkpoint(
            setting.run,
            self.done,
            setting.model.state_dict(),
            setting.optimizer.state_dict(),
            self.ledger.position,
            [],
            scheduler.state_dict() if scheduler else {},
            carried=dict(setting.algorithm.carried),
            built=self._describe_built(scheduler),
        )
        with explain_write_errors(self.checkpoint, "call it again"):
            checkpoint.save(self.checkpoint, state)

    def _describe_built(self, scheduler: LRScheduler | None) -> dict[str, Any]:
        """Return what torch does not compare when it loads a state."""

        def kinds(schedule: Any) -> list[Any]:
            inner = getattr(schedule, "_schedulers", ())
            return [type(schedule).__name__, *map(kinds, inner)]

        optimizer = self.setting.optimizer
        names = {id(p): name for name, p in self.setting.model.named_parameters()}
        return {
            "class of the optimizer": [type(one).__name__ for one in each_of(optimizer)],
            "order of the optimizer's parameters": [
                [names.get(id(p)) for p in group["params"]] for group in optimizer.param_groups
            ],
            "class of the schedule": kinds(scheduler),
        }

    def resume(self, scheduler: LRScheduler | None = None) -> bool:
        """Continue from the state that `save` stored before this process; False if there is none.

        Steps that a killed process took after it are taken again as new releases, and count again:
        nothing tells whether foreign code would repeat them bit for bit.

        Raises:
            UserError: steps were taken already, or another model or optimiser was saved.
        """
        setting = self.setting
        if self.done:
            raise UserError("private.resume() comes before the first step.")
        if self.saved is None:
            return False
        built = self._describe_built(scheduler)
        try:
            for what, saved in self.saved.built.items():
                if saved != built[what]:
                    raise checkpoint.Misfit(f"the {what} was another")
            self.saved.restore(
                setting.model, setting.optimizer, scheduler, setting.algorithm.carried
            )
        except (checkpoint.Misfit, KeyError) as error:
            raise UserError(
                f"{self.checkpoint}: does not fit this model, optimizer and schedule: "
                f"{first_line(error)} Create them as they were when it was saved."
            ) from None
        self.done, self._not_taken = self.saved.step, 0
        self._left = mark_weights(dict(setting.model.named_parameters()))
        return True

    def close(self) -> None:
        """Close the ledger and release its lock; the end of the process does so too."""
        with explain_write_errors(self.setting.ledger_file, "the training can be resumed"):
            self.resources.close()

    def __reduce__(self) -> NoReturn:
        raise UserError(
            "a private training is not copied or sent to another process, where its steps would "
            "be counted apart: call make_private there, with a ledger of its own."
        )

    def __enter__(self) -> Private:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _let_go(resources: ExitStack) -> None:
    """Close the ledger of a training that is no longer referenced."""
    with suppress(UserError):  # nobody is there to hear that the ledger's folder was deleted
        resources.close()


def _join_lines(text: str) -> str:
    """Return a text as a line of a model card, where a line break would begin another."""
    return printable(" ".join(text.split()))


def _what_trains(parameters: dict[str, nn.Parameter]) -> dict[str, tuple[int, torch.dtype]]:
    """Return the identity and type of each trained parameter, by name."""
    return {name: (id(p), p.dtype) for name, p in parameters.items() if p.requires_grad}
