"""Carry out one run: set it up, take its steps, evaluate the model and write the record."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from zdp_bench.config.digests import experiment_digest
from zdp_bench.config.schema import NOT_RECORDED, Run
from zdp_bench.data import Splits
from zdp_bench.errors import UserError
from zdp_bench.gradients.clipping import trainable
from zdp_bench.gradients.program import renew
from zdp_bench.nn.state import state_digest
from zdp_bench.nn.surgery import surgery
from zdp_bench.privacy.accounting import (
    example_epsilon,
    patient_interval,
    rdp_epsilon,
    tight_interval,
)
from zdp_bench.privacy.mechanism import Mechanism
from zdp_bench.privacy.noise import run_key
from zdp_bench.privacy.tally import BudgetExceeded, Position, Tally
from zdp_bench.records import Document
from zdp_bench.tasks.metric import metric_of
from zdp_bench.training import checkpoint, distributed
from zdp_bench.training.batches import Size
from zdp_bench.training.build import build_scheduler, count_real
from zdp_bench.training.distributed import ALONE, Ranks
from zdp_bench.training.evaluation import (
    WATCHED,
    UntrainedError,
    doubt,
    evaluate,
    evaluate_trained,
    quick_loss,
    refuse_divergence,
    step_schedule,
)
from zdp_bench.training.interrupts import Stopped, stop_signals
from zdp_bench.training.labels import labels_of
from zdp_bench.training.machine import (
    code_digest,
    environment,
    execution_digest,
    foreign_code,
    join_digests,
    peak_memory,
    pick_device,
)
from zdp_bench.training.plan import Plan
from zdp_bench.training.progress import Evaluation, Watcher
from zdp_bench.training.public_start import run_digest_of
from zdp_bench.training.reservation import reserve
from zdp_bench.training.run_folder import Outcome, find_or_run, open_ledger
from zdp_bench.training.setup import ModelSetup, Setup, load_data
from zdp_bench.training.spending import find_other_ledgers
from zdp_bench.training.step import Training, private_step

log = logging.getLogger(__name__)

# (configuration, watcher, device, wait) -> the outcome of the run; see `execute`
Runner = Callable[[Run, Watcher, torch.device, bool], Outcome]


def execute(
    config: Run,
    watcher: Watcher,
    wait: bool = True,
    runner: Runner | None = None,
) -> Outcome:
    """Carry out a run, or return its outcome if it has finished before.

    With several ranks, each computes a part of every step, and rank 0 writes the files.

    Args:
        config: the run's configuration.
        watcher: is told about the run's progress.
        wait: whether to wait for another process that is carrying out the same run. Otherwise,
            `Busy` is raised.
        runner: carries out the run. Default: `run_central`. A federation passes its own.

    Formal guarantees:
        - The record's tight ε composes every release in the ledger, of this process and of those
          killed before it.
        - Nothing computed from training examples leaves through log, progress or record, except
          through the trained weights.

    Raises:
        UserError: the data, the device, the ledger or the checkpoint cannot be used, the disk
            cannot be written to, or the model diverged.
        Busy: another process is carrying out this run, and `wait` is false.
        Stopped: a signal stopped the run, which is saved.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    return (runner or run_central)(config, watcher, pick_device(config.device), wait)


def run_central(
    config: Run,
    watcher: Watcher,
    device: torch.device,
    wait: bool,
) -> Outcome:
    """Train one model on one training set, as every recipe without `federated.nodes` does."""
    ranks = distributed.join(device.type)
    data = load_data(config)
    digest = run_digest_of(config, data.digest)
    ranks.require_same(
        {
            "configuration": (experiment_digest(config), config.seed, config.execution),
            "data set": data.digest,
            "start": digest,
            "code": code_digest(config.plugins),
        }
    )

    def train(home: Path) -> Document:
        return _train(config, data, digest, home, device, watcher, ranks)

    return find_or_run(config, digest, ranks, wait, train)


def _train(
    config: Run,
    data: Splits,
    digest: str,
    home: Path,
    device: torch.device,
    watcher: Watcher,
    ranks: Ranks,
) -> Document:
    """Train and evaluate; return the record on rank 0, and an empty one on other ranks."""
    beginning = Beginning()
    setup = Setup.of(config, data, device)
    plan, mechanism = setup.plan, setup.mechanism
    ranks.require_same({"mechanism": mechanism.digest(), "plan": plan})
    checked = setup.check_model()
    size = setup.micro_batch_size()
    save_every = setup.config.execution.checkpoint_steps
    loop = Loop(setup, plan, digest, home, watcher, size, save_every, ranks)
    saved = ranks.broadcast(
        checkpoint.load(home / "checkpoint.pt", digest) if ranks.is_first else None
    )
    loop.restore(saved)
    steps = CentralSteps(setup, loop, saved.ledger if saved else None)
    with closing(steps.ledger), setup.arithmetic(), stop_signals() as signal:
        steps.begin()
        stopped_by = loop.take_steps(steps, signal)
        if not ranks.is_first:
            return {}
        task, examples = setup.task, size.examples
        metrics, chance = evaluate_trained(home, loop.trained, task, data.test, device, examples)
        validation_metrics = {}
        if data.validation:
            validation_metrics = evaluate(loop.trained, task, data.validation, device, examples)
    privacy = privacy_report(setup, steps.ledger, data.examples_per_patient, data.unit)
    record = run_record(loop, beginning, checked.fixed_state, privacy, stopped_by, metrics, chance)
    if validation_metrics:
        record["validation"] = validation_metrics
    return record


class Steps(Protocol):
    """Takes the steps of a plan, which are rounds for a federation's server."""

    def take(self, step: int, /) -> bool:
        """Take a step. Return False if a stop signal came before it was taken."""

    def epsilon(self, steps: int, /) -> float:
        """Return the tight ε once the first `steps` steps are done."""

    def save(self) -> None:
        """Write the checkpoint."""


class CentralSteps:
    """Takes the steps of a central run: private steps of this process, listed in its ledger."""

    def __init__(
        self,
        setup: Setup,
        loop: Loop,
        checkpoint_position: Position | None,
    ) -> None:
        """Open the ledger, and derive the run's key.

        Args:
            setup: what the run trains with.
            loop: the training loop, at the step from which this process starts.
            checkpoint_position: end of the ledger at the checkpoint; None without a checkpoint.
        """
        self.setup, self.loop = setup, loop
        config, plan, ranks = setup.config, setup.plan, loop.ranks
        self.ledger_path = loop.home / "ledger.jsonl"
        self.ledger = ledger = open_ledger(
            self.ledger_path,
            setup.mechanism,
            repeatable=not config.privacy.secure,
            checkpoint_position=checkpoint_position,
            start=loop.starting_point(),
            find_other_ledgers=partial(find_other_ledgers, config.results, loop.run, loop.home),
            ranks=ranks,
            facts={"epsilon_of": epsilon_of(config, setup.data.unit)},
        )
        if num_repeated := ledger.num_to_count_again:
            log.warning(
                f"{config.recipe} seed {config.seed}: {num_repeated:,} steps of an earlier "
                "process are repeated, but code, libraries, machine, threads, micro-batch or "
                "weights are not provably the same. They get new noise and count again in every ε."
            )
        # Steps that this process cannot repeat bit for bit are of a new generation. Its name in the
        # key gives them new noise.
        self.key = run_key(loop.run, setup.mechanism, foreign_code(config.plugins))
        self.key += ledger.generation
        num_steps_left = plan.steps - loop.step
        max_releases = setup.affordable_releases(ledger.releases + num_steps_left)
        if max_releases is None:
            self.planned_releases = ledger.releases_after(loop.step, plan.steps)
        else:
            self.planned_releases = max_releases
        self.training = Training(
            setup.algorithm,
            setup.model,
            setup.optimizer,
            setup.noise(self.key),
            ledger,
            max_releases,
            ranks,
        )

    def begin(self) -> None:
        """Reserve the releases of all steps in `spending.json`.

        Raises:
            UserError: `privacy.total_budget` would be exceeded. Or the noise of later steps depends
                on noise in the ledger that this process cannot draw again.
        """
        setup = self.setup
        if setup.mechanism.sampling.cycle > 1 and self.ledger.has_other_noise:
            raise UserError(
                f"{self.ledger_path}: holds steps whose noise this process cannot draw again, and "
                f"the next noise of algorithm={setup.config.algorithm.name} depends on it. "
                "Continue with the code, machine and threads that began the run, without "
                "privacy.secure; or rename the run's folder, which `zdp-bench budget` still counts."
            )
        if self.loop.ranks.is_first:
            self.ledger.sync()  # because `spending.json` states the releases in it
            planned = self.planned_releases
            is_secure = setup.config.privacy.secure
            max_releases = setup.affordable_releases(2 * planned) if is_secure else None
            reserve(
                setup.config,
                setup.data,
                setup.mechanism,
                planned,
                self.loop.home,
                setup.start.sources if setup.start else frozenset(),
                run=self.loop.run,
                max_releases=max_releases,
            )

    def take(self, step: int) -> bool:
        """Take a private step; return True."""
        loop = self.loop
        batches, divisor = self.setup.draw(self.key, step, loop.size, loop.ranks)
        private_step(self.training, step, batches, divisor)
        return True

    def epsilon(self, steps: int) -> float:
        """Return the tight ε once the first `steps` steps are done."""
        self.ledger.sync()  # because metrics of the weights after these steps are shown with it
        return self.setup.epsilon(self.ledger.releases_before(steps))

    def save(self) -> None:
        """Write the checkpoint on rank 0; all ranks have the same weights."""
        start = self.loop.starting_point()
        if self.loop.ranks.is_first:
            # Before the checkpoint, so that a process that loads it finds its start recorded.
            self.ledger.record_start(*start)
            self.ledger.sync()
            self.loop.save(self.ledger.position)


@dataclass
class Loop:
    """The training loop: steps, evaluations after epochs, checkpoints and stop signals.

    A central run and a federation's server share it. A step of the server's plan is a round.

    Attributes:
        setup: what the run trains with.
        plan: plan of the steps.
        run: digest of the run. Checkpoints of other runs are rejected.
        home: the run's folder.
        watcher: receives the events of the run.
        size: number of examples that are processed at once, in steps and in evaluations.
        checkpoint_steps: number of steps after which a checkpoint is saved, in addition to the ends
            of epochs; None for none.
        ranks: processes that take each step together.
        round_steps: number of private steps in one step of the plan.
        step: number of steps of the plan that are done.
        epochs: the epochs' metrics, as in the record.
        resumed_at: number of private steps that were done when a checkpoint was loaded; None if
            none was.
        average: moving average of the weights, with `trainer.ema`.
    """

    setup: ModelSetup
    plan: Plan
    run: str
    home: Path
    watcher: Watcher
    size: Size
    checkpoint_steps: int | None
    ranks: Ranks = ALONE
    round_steps: int = 1
    step: int = 0
    epochs: list[dict[str, Any]] = field(default_factory=list)
    resumed_at: int | None = None
    average: AveragedModel | None = None

    def __post_init__(self) -> None:
        setup = self.setup
        config = setup.config
        self.scheduler = build_scheduler(config, setup.optimizer, setup.data, self.plan.steps)
        self.starting_loss = self._quick_loss()
        if config.trainer.ema is not None:
            self.average = average_weights(setup.model, config.trainer.ema)

    @property
    def trained(self) -> nn.Module:
        """The model that is evaluated and saved. It has the averaged weights, if any."""
        return self.average.module if self.average else self.setup.model

    @property
    def steps_done(self) -> int:
        """Number of private steps that the model has taken."""
        return self.step * self.round_steps

    def restore(self, saved: checkpoint.Checkpoint | None) -> None:
        """Continue from a checkpoint; do nothing if it is None.

        Raises:
            UserError: the checkpoint does not fit this run.
        """
        if saved:
            setup = self.setup
            average = self.average.module if self.average else None
            try:
                saved.restore(setup.model, setup.optimizer, self.scheduler, self.carried, average)
            except checkpoint.Misfit as error:
                raise UserError(
                    f"{self.home / 'checkpoint.pt'}: does not fit this run: {error} "
                    f"{checkpoint.ADVICE}"
                ) from None
            self._require_epochs(saved)
            self.step, self.epochs = saved.step, saved.epochs
            self.resumed_at = self.steps_done
            if self.average:
                self.average.n_averaged.fill_(self.step)

    def _require_epochs(self, saved: checkpoint.Checkpoint) -> None:
        """Reject a checkpoint without metrics of each epoch, if the configuration wants them."""
        if self.setup.config.execution.evaluate != "each":
            return
        evaluated = {epoch["step"] for epoch in saved.epochs}
        ends = {step * self.round_steps for step in self.plan.epoch_ends(saved.step)}
        if not ends <= evaluated:
            raise UserError(
                f"{self.home / 'checkpoint.pt'}: not all its epochs were evaluated. Continue with "
                "execution.evaluate=last, or add force=true to begin again."
            )

    @property
    def carried(self) -> dict[str, float]:
        """The numbers that the algorithm carries from step to step; see `Algorithm.carried`.

        A federation's server has no algorithm, so it carries none.
        """
        return self.setup.algorithm.carried if isinstance(self.setup, Setup) else {}

    def states(self) -> tuple[dict[str, Any], ...]:
        """Return the state of the model, the optimizer, the schedule and the algorithm."""
        setup = self.setup
        schedule = self.scheduler.state_dict() if self.scheduler else {}
        return setup.model.state_dict(), setup.optimizer.state_dict(), schedule, dict(self.carried)

    def starting_point(self) -> tuple[str, int, str]:
        """Return the arguments of `Ledger.choose_generation` for the next step.

        Every rank must call it, because the bits of a sum depend on the machine of each.
        """
        config = self.setup.config
        own_digest = execution_digest(
            config.plugins,
            self.setup.device,
            self.size.examples,
            self.ranks.size,
            config.execution.deterministic,
        )
        execution = join_digests(self.ranks.gather(own_digest))
        return execution, self.step, state_digest(*self.states())

    def save(
        self,
        ledger_position: Position,
        nodes: dict[int, dict[str, Any]] | None = None,
    ) -> None:
        """Write a checkpoint of the current state.

        Args:
            ledger_position: end of the ledger.
            nodes: what a federation's server knows about each node.
        """
        weights, optimizer, schedule, carried = self.states()
        state = checkpoint.Checkpoint(
            run=self.run,
            step=self.step,
            model=self.trained.state_dict() if self.average else weights,
            optimizer=optimizer,
            ledger=ledger_position,
            epochs=self.epochs,
            scheduler=schedule,
            nodes=nodes or {},
            last=weights if self.average else {},
            carried=carried,
        )
        checkpoint.save(self.home / "checkpoint.pt", state)

    def take_steps(
        self,
        steps: Steps,
        signal: Callable[[], int],
    ) -> str:
        """Take the remaining steps.

        Args:
            steps: takes a step, and accounts for it.
            signal: returns the number of the stop signal that was received, or 0.

        Returns:
            "epochs" if all steps were taken, or "budget" if the next step would exceed it.

        Raises:
            UserError: the model diverged, or changed something other than its weights.
            Stopped: a stop signal was received. The loop is saved.
        """
        config, plan = self.setup.config, self.plan
        num_steps = plan.steps * self.round_steps
        evaluations = []
        for row in self.epochs:  # the record numbers whole epochs only
            number = plan.epoch_of(row["step"] // self.round_steps)
            evaluations.append({**row, "epoch": number})
        self.watcher.started(config, self.home, num_steps, self.steps_done, evaluations)
        stopped_by = "epochs"
        while self.step < plan.steps and stopped_by == "epochs":
            try:
                if steps.take(self.step):
                    self._count_step()
            except BudgetExceeded:
                stopped_by = "budget"
                if self.step == 0:
                    raise self._without_steps() from None
            epoch = plan.epoch_ending_at(self.step)
            is_last = stopped_by == "budget" or self.step == plan.steps
            interval = self.checkpoint_steps
            is_save_due = is_last or (interval is not None and self.step % interval == 0)
            is_evaluated = bool(self.epochs) and self.epochs[-1]["step"] == self.steps_done
            if (epoch is not None or is_last) and not is_evaluated:
                renew(self.setup.model, self.step)
                if is_last or config.execution.evaluate == "each":
                    self._evaluate(epoch, steps)
                else:
                    self._check_outputs()
                if epoch is not None and epoch % config.trainer.checkpoint_epochs == 0:
                    is_save_due = True
            elif is_save_due or self.step % WATCHED == 0:  # a diverged model is not worth saving
                self._check_outputs()
            signal_number = self.ranks.max(signal())
            if is_save_due or signal_number:
                steps.save()
            if signal_number and self.step < plan.steps and stopped_by == "epochs":
                raise Stopped(signal_number)
        return stopped_by

    def _without_steps(self) -> UntrainedError:
        return UntrainedError(
            f"privacy.max_epsilon={self.setup.config.privacy.max_epsilon:g}: the steps in the "
            f"ledger of {self.home} have spent it, so the model would stay untrained. Raise "
            "privacy.max_epsilon, or train with another seed; these steps still count."
        )

    def _count_step(self) -> None:
        """Update average and learning rate after a step, and count it."""
        self.step += 1
        setup = self.setup
        if self.average:
            self.average.update_parameters(setup.model)
        is_epoch_end = self.plan.epoch_ending_at(self.step) is not None
        if self.scheduler and (is_epoch_end or getattr(self.scheduler, "each_step", False)):
            validation = setup.data.validation
            step_schedule(self.scheduler, self.trained, setup.task, validation, setup.device)
        self.watcher.stepped(self.steps_done)

    def _evaluate(
        self,
        epoch: int | None,
        steps: Steps,
    ) -> None:
        """Evaluate the model on the test set, on rank 0; all ranks have the same weights."""
        setup, step = self.setup, self.steps_done
        metrics: dict[str, float] = {}
        epsilon = 0.0
        if self.ranks.is_first:
            epsilon = steps.epsilon(self.step)
            test, examples = setup.data.test, self.size.examples
            metrics = evaluate(self.trained, setup.task, test, setup.device, examples)
        metrics, epsilon = self.ranks.broadcast((metrics, epsilon))
        self._refuse_divergence(metrics.get("loss", 0.0), epoch)
        self.epochs.append({"epoch": epoch, "step": step, "epsilon_tight": epsilon, **metrics})
        number = self.plan.epoch_of(self.step)
        self.watcher.evaluated(Evaluation(number, step, metrics, epsilon))

    def _check_outputs(self) -> None:
        """End the run if the model has diverged on a few public examples."""
        loss = self.ranks.broadcast(self._quick_loss() if self.ranks.is_first else 0.0)
        self._refuse_divergence(loss, self.plan.epoch_of(self.step))

    def _quick_loss(self) -> float:
        setup = self.setup
        return quick_loss(setup.model, setup.task, setup.data.test, setup.device)

    def _refuse_divergence(self, loss: float, epoch: int | None) -> None:
        rate = self.setup.config.optimizer.options.get("lr")
        refuse_divergence(math.isfinite(loss), epoch, self.steps_done, rate)


def average_weights(model: nn.Module, decay: float) -> AveragedModel:
    """Return an exponential moving average of a model's weights.

    At step t, its decay is min(decay, (1 + t)/(10 + t)). With the smaller decay of the first steps,
    the average forgets the initial weights sooner (De et al. 2022, section 3). Otherwise, this
    would take about 1/(1 − decay) steps. Buffers are copied, not averaged.
    """

    def update(
        average: Tensor,
        weights: Tensor,
        num_averaged: Tensor | int,
    ) -> Tensor:
        t = int(num_averaged)
        decay_now = min(decay, (1 + t) / (10 + t))
        return weights.lerp(average, decay_now)

    return AveragedModel(model, avg_fn=update)


@dataclass(frozen=True)
class Beginning:
    """The time at which this process began a run.

    Attributes:
        utc: date and time.
        monotonic: seconds of a clock that nobody can set back, unlike `utc`.
    """

    utc: datetime = field(default_factory=lambda: datetime.now(UTC))
    monotonic: float = field(default_factory=time.monotonic)


def run_record(
    loop: Loop,
    beginning: Beginning,
    fixed_state: list[str],
    privacy: dict[str, Any],
    stopped_by: str,
    metrics: dict[str, float],
    chance: float | None,
) -> Document:
    """Return the record of a finished run.

    Args:
        loop: the training loop, after its last step.
        beginning: when the run began.
        fixed_state: names of buffers and frozen parameters; see `Checked`.
        privacy: section "privacy" of the record.
        stopped_by: "epochs" or "budget".
        metrics: test metrics of the trained model.
        chance: the headline metric with shuffled targets; None if the task keeps no targets.
    """
    setup = loop.setup
    config, data, headline = setup.config, setup.data, setup.task.headline
    start, ema = setup.start, config.trainer.ema
    rate = config.optimizer.options.get("lr")
    measure = metric_of(setup.task, headline)
    warning = doubt(measure, metrics, chance, len(data.test), rate, loop.starting_loss)
    notes = [data.notes, start.note() if start else ""]
    resolved = config.resolved.items()
    execution = {"ranks": loop.ranks.size, "execution": vars(config.execution)}
    return {
        "format": 1,
        "recipe": config.recipe,
        "run": loop.run,
        "experiment": experiment_digest(config),
        "seed": config.seed,
        "claims": vars(config.claims),
        "config": {key: value for key, value in resolved if key not in NOT_RECORDED},
        "data": {
            "name": config.dataset.name,
            **({"title": data.title} if data.title else {}),
            "provenance": data.provenance,
            "digest": data.digest,
            "notes": "; ".join(note for note in notes if note),
            "train": len(data.train),
            "test": len(data.test),
            "validation": len(data.validation) if data.validation else 0,
            "example": _example(setup),
        },
        **({"representation": data.representation} if data.representation else {}),
        "model": {
            "parameters_real": count_real(trainable(setup.model).values()),
            "surgery": surgery(setup.model),
            "fixed_state": fixed_state,
            **({"weights": f"averaged, decay {ema:g}"} if ema else {}),
            **({"files": setup.weights_files} if setup.weights_files else {}),
        },
        **labels_of(config),
        **({"start": start.described()} if start else {}),
        "privacy": privacy,
        "stopped_by": stopped_by,
        **({"warning": warning} if warning else {}),
        "headline": {"name": headline, "value": metrics[headline]},
        "metrics": metrics,
        "epochs": loop.epochs,
        "environment": environment(setup.device, config.plugins) | execution,
        "measured": {
            "started_utc": beginning.utc.isoformat(timespec="seconds"),
            "train_seconds": round(time.monotonic() - beginning.monotonic, 2),
            "peak_memory_bytes": peak_memory(setup.device),
            "micro_batch": loop.size.examples,
            "resumed_at_step": loop.resumed_at,
            # Weights of the trained model, in the run's folder; `zdp-bench export` reads them.
            "weights": {
                "file": "checkpoint.pt",
                "digest": state_digest(loop.trained.state_dict()),
            },
        },
    }


def _example(setup: ModelSetup) -> dict[str, Any]:
    """Return an example's shapes and dtypes, from which `export` builds the model without data."""
    inputs, targets = setup.empty_batch()
    return {
        "input_shape": list(inputs.shape[1:]),
        "input_dtype": str(inputs.dtype).removeprefix("torch."),
        "outputs": setup.data.outputs,
        "target_shape": list(targets.shape[1:]),
        "target_dtype": str(targets.dtype).removeprefix("torch."),
    }


def privacy_report(
    setup: Setup, ledger: Tally, examples_per_patient: int, unit: str
) -> dict[str, Any]:
    """Return a record's privacy section: claimed and tight ε, and what they are computed from.

    Args:
        setup: what the run trains with.
        ledger: the ledger, or a tally of its releases.
        examples_per_patient: largest number of training examples of one patient.
        unit: what a patient is called in this data set.
    """
    config, mechanism = setup.config, setup.mechanism
    releases, delta = ledger.releases, config.privacy.delta
    by_owner, max_examples = config.privacy.by_owner, config.privacy.max_examples
    # If steps draw whole patients, a patient is a single share of the sum.
    shares_per_patient = 1 if by_owner else examples_per_patient
    patient_at_least, patient = patient_interval(mechanism, shares_per_patient, releases, delta)
    randomness = "cryptographic" if config.privacy.secure else "seeded"
    return {
        "epsilon_claimed": setup.claimed_epsilon(releases),
        "claimed_by": config.accountant,
        "epsilon_patient": patient,
        "epsilon_patient_at_least": patient_at_least,
        **({"epsilon_part": example_epsilon(mechanism, releases, delta)} if by_owner else {}),
        "examples_per_patient": min(examples_per_patient, max_examples or examples_per_patient),
        "unit": unit,
        "epsilon_of": epsilon_of(config, unit),
        "noise_multiplier": setup.algorithm.noise_multiplier,
        **released_report(mechanism, ledger, delta, randomness),
        **setup.algorithm.report(releases, delta),
    }


def epsilon_of(config: Run, unit: str) -> str:
    """Return what a run's ε protects: "example", or the unit that owns several examples."""
    return unit if config.privacy.by_owner else "example"


def released_report(
    mechanism: Mechanism,
    ledger: Tally,
    delta: float,
    randomness: str,
) -> dict[str, Any]:
    """Return the part of a record's privacy section that follows from the releases alone.

    Args:
        mechanism: mechanism of every release.
        ledger: the ledger, or a tally of its releases.
        delta: δ at which every ε is computed.
        randomness: source of noise and batches: "seeded", "keyed" (by a secret key, which follows
            from no seed) or "cryptographic".
    """
    position, releases = ledger.position, ledger.releases
    at_least, tight = tight_interval(mechanism, releases, delta)
    return {
        "epsilon_tight": tight,
        "epsilon_tight_at_least": at_least,
        "epsilon_rdp": rdp_epsilon(mechanism, releases, delta),
        "delta": delta,
        "z": mechanism.z,
        "steps": releases,
        "adjacency": mechanism.sampling.adjacency,
        "sampling": mechanism.sampling.as_dict(),
        "mechanism": mechanism.as_dict(),
        "randomness": randomness,
        "ledger": {"entries": position.releases, "digest": position.digest},
    }
