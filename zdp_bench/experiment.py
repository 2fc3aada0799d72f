"""ONE run, read top to bottom: data -> model -> algorithm -> steps -> metrics -> record."""

from __future__ import annotations

import os
import platform
import random
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from zdp_bench import __version__, checkpoint, checks, distributed, records
from zdp_bench.algorithms import Algorithm, Problem
from zdp_bench.assets import CONF
from zdp_bench.config import OPERATIONAL, Plugin, Run, experiment_digest, optimizer_class, run_digest, scheduler_class
from zdp_bench.data import CHANCES, Augment, Outline, Source, Splits, sampling
from zdp_bench.devices import ahead, arithmetic, own_gpu, pick_device, pinned
from zdp_bench.distributed import ALONE, Ranks
from zdp_bench.engine import Training, private_step
from zdp_bench.errors import Busy, UserError, require
from zdp_bench.gradients import Batch
from zdp_bench.gradients.clipping import trainable
from zdp_bench.memory import MicroBatches, Size, largest
from zdp_bench.optimizers import BY_MAGNITUDE
from zdp_bench.privacy.accounting import ACCOUNTANTS, Claim, affordable_steps, patient_epsilon, rdp_epsilon, tight_epsilon
from zdp_bench.privacy.calibration import calibrate, calibrate_mechanism
from zdp_bench.privacy.ledger import BudgetExceeded, Copy, Ledger, LedgerError, Position
from zdp_bench.privacy.mechanism import Mechanism, Sampling
from zdp_bench.privacy.noise import NoiseSource, SecureNoise, SecureRandom, SeededNoise, stream
from zdp_bench.records import Record
from zdp_bench.registry import lookup
from zdp_bench.survival import Stopped, stop_signals, writes
from zdp_bench.tasks import Condensing, Scoring, Task

MICRO_BATCH = 2048
EVALUATION_BATCH = 1000
EVALUATION_NUMBERS = 2**21  # fewer records at once where they are images: a U-Net's maps take 64 times as much as its input
NOT_RECORDED = set(OPERATIONAL) - {"claims"}  # of the configuration: what may differ between a run and its resumption


class Watcher(Protocol):
    """Who is told how a run goes. Only what costs no privacy is told: nothing computed from training records."""

    def started(self, recipe: str, seed: int, steps: int, done: int) -> None: ...
    def stepped(self, step: int) -> None: ...
    def evaluated(self, epoch: int, step: int, metrics: dict[str, float], epsilon: float) -> None: ...


@dataclass(frozen=True)
class Outcome:
    """A run's record, and whether it was there already."""

    record: Record
    path: Path
    found: bool


Carrying = Callable[[Run, Watcher, torch.device, bool], Outcome]  # how a run is carried out, on a device, and whether it waits


def run(config: Run, watcher: Watcher, wait: bool = True, carrying: Carrying | None = None) -> Outcome:
    """Carry out one run, or find it done. One of several ranks brings its share, and rank 0 writes.

    Args:
        wait: for a process that is at this very run; else it is left to that one.
        carrying: how; here and centrally where nothing else is said (a federation says something else).

    Formal guarantees:
        - the record's tight ε composes every release in the ledger, of this process and of those killed before it;
        - nothing computed from training records leaves through log, progress or record, but for the trained weights.

    Raises:
        UserError: the data, the device, the ledger or the checkpoint is not usable, or the disk not to be written to; says
            which and why.
        Busy: another process is at this run, and `wait` is false.
        Stopped: a signal asked for it; the run is saved.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    with own_gpu(config.device) as name:
        return (carrying or centrally)(config, watcher, pick_device(name), wait)


def centrally(config: Run, watcher: Watcher, device: torch.device, wait: bool) -> Outcome:
    """One model, one training set: what every recipe without `federated.nodes` is."""
    ranks = distributed.join(device.type)
    data: Splits = lookup("dataset", config.dataset.name)(config.data_root, **config.dataset.options)
    digest = run_digest(config, data.digest)
    return once(config, digest, ranks, wait, lambda home: _train(config, data, digest, home, device, watcher, ranks))


def once(config: Run, digest: str, ranks: Ranks, wait: bool, train: Callable[[Path], Record]) -> Outcome:
    """Find the record of a run, or make it: one process at a time, and written by rank 0 alone.

    Args:
        train: carries the run out in its folder, on every rank.
    """
    home = records.folder(config.results, config.recipe, digest)
    with writes(home), only_one_process(home, wait) if ranks.first else nullcontext():
        if config.force and ranks.first:
            shutil.rmtree(home)
            home.mkdir()
        if done := ranks.broadcast(records.read(home / "record.json") if ranks.first else None):
            return Outcome(done, home / "record.json", found=True)
        record = ranks.broadcast(train(home))
        if ranks.first:
            records.write(home / "record.json", record)
            records.rebuild_csv(config.results)
    return Outcome(record, home / "record.json", found=False)


def _train(config: Run, data: Splits, digest: str, home: Path, device: torch.device, watcher: Watcher, ranks: Ranks) -> Record:
    started = datetime.now(UTC)
    clock = time.perf_counter()

    task: Task = lookup("task", config.task.name)(**config.task.options)
    model = build_model(config, data)
    check_fit(config, model, task, data)
    model = model.to(device)
    plan = Plan.of(config, len(data.train))
    problem = Problem(model, task.loss, plan.sampling, config.seed, data.train.batch(torch.arange(0))[0])
    config, algorithm = build_algorithm(config, problem, plan)
    optimizer = build_optimizer(config, model)
    scheduler = build_scheduler(config, optimizer, data)
    fixed = check_model(model, algorithm, task, data)
    mechanism = algorithm.mechanism()
    noise: NoiseSource = SecureNoise() if config.privacy.secure else SeededNoise(config.seed)

    saved = ranks.broadcast(checkpoint.load(home / "checkpoint.pt", digest) if ranks.first else None)
    step, epochs = 0, []
    if saved:
        saved.restore(model, optimizer, scheduler)
        step, epochs = saved.step, saved.epochs
    ledger = open_ledger(home / "ledger.jsonl", mechanism, noise.repeatable, saved.ledger if saved else None, ranks)
    delta, budget = config.privacy.delta, config.privacy.max_epsilon
    still = plan.before + ledger.releases + plan.steps - step  # the most that can have been released at the end
    limit = max(0, affordable_steps(mechanism, delta, budget, still) - plan.before) if budget else None
    training = Training(algorithm, model, optimizer, noise, ledger, limit, ranks)
    size = micro_batch_size(config, plan, model, task, data, device)

    def save() -> None:
        if ranks.first:
            rates = scheduler.state_dict() if scheduler else {}
            weights, moments = model.state_dict(), optimizer.state_dict()
            state = checkpoint.Checkpoint(digest, step, weights, moments, ledger.position, epochs, rates)
            checkpoint.save(home / "checkpoint.pt", state)

    def measured() -> tuple[dict[str, float], float]:
        """Test metrics and tight ε as they stand: rank 0's, for the others have the same weights."""
        if not ranks.first:
            return {}, 0.0
        spent = tight_epsilon(mechanism, plan.before + ledger.releases_before(step), delta)
        return evaluate(model, task, data.test, device, size.records), spent

    watcher.started(config.recipe, config.seed, plan.steps, step)
    stopped_by = "epochs"
    every = config.execution.checkpoint_steps
    policy = arithmetic(config.precision, config.execution.deterministic, model, algorithm, device)
    with closing(ledger), policy, stop_signals() as asked:
        while step < plan.steps and stopped_by == "epochs":
            try:
                indices, divisor = plan.draw(config.seed, step, config.privacy.secure)
                if config.privacy.secure:  # nobody can draw the same: rank 0's batch is the batch
                    indices = ranks.broadcast(indices)
                seed_layers(config.seed, step, ranks.rank)
                batches = micro_batches(
                    data.train, indices, config, device, step, data.augment, data.augment_targets, size, ranks
                )
                private_step(training, step, batches, divisor)
                step += 1
                if scheduler and plan.epoch_ending_at(step) is not None:
                    advance(scheduler, model, task, data, device)
                watcher.stepped(step)
            except BudgetExceeded:
                stopped_by = "budget"
            epoch = plan.epoch_ending_at(step)
            due = bool(every) and step % (every or 1) == 0
            if (epoch is not None or stopped_by == "budget") and not (epochs and epochs[-1]["step"] == step):
                metrics, epsilon = ranks.broadcast(measured())
                epochs.append({"epoch": epoch, "step": step, "epsilon_tight": epsilon, **metrics})
                watcher.evaluated(epoch or 0, step, metrics, epsilon)
                due = due or epoch is None or epoch % config.trainer.checkpoint_epochs == 0 or step == plan.steps
            signal = ranks.largest(asked())
            if due or signal:
                save()
            if signal and step < plan.steps and stopped_by == "epochs":
                raise Stopped(signal)
        if not ranks.first:
            return {}
        metrics = final_metrics(home, model, task, data.test, device, size.records)  # in the run's own arithmetic
    return described(config, data, digest, model, fixed) | {
        "privacy": account(config, mechanism, plan, ledger, data.records_per_patient),
        "stopped_by": stopped_by,
        "headline": {"name": task.headline, "value": metrics[task.headline]},
        "metrics": metrics,
        "epochs": epochs,
        "environment": environment(device) | {"ranks": ranks.size, "execution": vars(config.execution)},
        "measured": {
            "started_utc": started.isoformat(timespec="seconds"),
            "train_seconds": round(time.perf_counter() - clock, 2),
            "peak_memory_bytes": peak_memory(device),
            "micro_batch": size.records,
            "resumed_at_step": saved.step if saved else None,
        },
    }


def final_metrics(home: Path, model: nn.Module, task: Task, test: Source, device: torch.device, size: int) -> dict[str, float]:
    """The trained model on the test set; what the task keeps of it beside the metrics is written into the run's folder."""
    outputs, targets = predict(model, task, test, device, size)
    if isinstance(task, Scoring):
        records.write_scores(home / "scores.csv", targets.numpy(), task.scores(outputs))
    if example := getattr(task, "example", None):  # something to look at, of the test set
        records.write_arrays(home / "example.npz", example(outputs, targets))
    return task.metrics(outputs, targets, test.groups)


def described(config: Run, data: Splits, digest: str, model: nn.Module, fixed: list[str]) -> Record:
    """What a record says of a run before it starts."""
    return {
        "format": 1,
        "recipe": config.recipe,
        "run": digest,
        "experiment": experiment_digest(config),
        "seed": config.seed,
        "claims": vars(config.claims),
        "config": {key: value for key, value in config.resolved.items() if key not in NOT_RECORDED},
        "data": {
            "name": config.dataset.name,
            "provenance": data.provenance,
            "digest": data.digest,
            "notes": data.notes,
            "train": len(data.train),
            "test": len(data.test),
            "validation": len(data.validation) if data.validation else 0,
        },
        "model": {
            "parameters_real": sum(p.numel() * (2 if p.is_complex() else 1) for p in trainable(model).values()),
            "surgery": checks.surgery(model),
            "fixed_state": fixed,
        },
        "optimizer": {"complex_second_moment": config.complex_second_moment},
    }


def account(config: Run, mechanism: Mechanism, plan: Plan, ledger: Ledger, records_per_patient: int) -> dict[str, Any]:
    """Everything a record says of privacy: ε claimed and ε tight, side by side, and what they follow from."""
    releases, delta = plan.before + ledger.releases, config.privacy.delta
    sigma = float(config.algorithm.options.get("noise_multiplier", 0.0))
    claim = Claim(sigma, plan.sampling.sample_rate, releases, delta, plan.sampling.records, config.trainer.epochs)
    tight = tight_epsilon(mechanism, releases, delta)
    return {
        "epsilon_claimed": ACCOUNTANTS[config.accountant](claim),
        "claimed_by": config.accountant,
        "epsilon_tight": tight,
        "epsilon_rdp": rdp_epsilon(mechanism, releases, delta),
        "epsilon_patient": patient_epsilon(mechanism, records_per_patient, releases, delta),
        "records_per_patient": records_per_patient,
        "delta": delta,
        "noise_multiplier": sigma,
        "z": mechanism.z,
        "steps": releases,
        "range_test_steps": plan.before,
        "adjacency": plan.sampling.adjacency,
        "sampling": vars(plan.sampling),
        "mechanism": mechanism.as_dict(),
        "randomness": "cryptographic" if config.privacy.secure else "seeded",
        "ledger": {"entries": ledger.position.entries, "digest": ledger.position.digest},
    }


# ------------------------------------------------------------------------------------------------------ the parts


@dataclass(frozen=True)
class Plan:
    """How many steps a run takes, and which records each of them sees.

    Attributes:
        before: steps that a learning-rate range test has made on the same records, with the same mechanism.
    """

    sampling: Sampling
    epochs: int
    steps: int
    before: int = 0

    @staticmethod
    def of(config: Run, size: int) -> Plan:
        """The plan for `size` training records."""
        trainer, before = config.trainer, config.privacy.range_test_steps or 0
        if trainer.sampling == "poisson":
            expected = trainer.batch_size or 1
            require(expected <= size, "trainer.batch_size", expected, f"the training set has only {size:,} records")
            rate = trainer.sample_rate or expected / size
            steps = max(1, round(trainer.epochs / rate))
            return Plan(Sampling("poisson", rate, rate * size, size), trainer.epochs, steps, before)
        batch = trainer.batch_size or max(1, round((trainer.sample_rate or 0) * size))
        require(batch <= size, "trainer.batch_size", batch, f"the training set has only {size:,} records")
        scheme: Any = trainer.sampling
        per_epoch = -(-size // batch) if scheme == "shuffled" else size // batch
        return Plan(Sampling(scheme, batch / size, batch, size), trainer.epochs, trainer.epochs * per_epoch, before)

    def draw(self, seed: int, step: int, secure: bool = False) -> tuple[np.ndarray, float]:
        """The records of a step, and the divisor of its sum: a function of (seed, step) alone, or of nothing when `secure`."""
        size, batch = self.sampling.records, int(self.sampling.expected_batch_size)
        if self.sampling.scheme == "shuffled":
            per_epoch = self.steps // self.epochs
            rng = np.random.default_rng(stream(seed, "shuffle", step // per_epoch))
            indices = sampling.shuffled(size, batch, step % per_epoch, rng)
            return indices, len(indices)
        random: sampling.Random = SecureRandom() if secure else np.random.default_rng(stream(seed, "sample", step))
        if self.sampling.scheme == "poisson":
            return sampling.poisson(size, self.sampling.sample_rate, random), self.sampling.expected_batch_size
        return sampling.uniform(size, batch, random), self.sampling.expected_batch_size

    def epoch_ending_at(self, step: int) -> int | None:
        """The number (from 1) of the epoch that ends with the `step`-th step, or None inside an epoch."""
        epoch = round(step * self.epochs / self.steps)
        return epoch if epoch > 0 and round(epoch * self.steps / self.epochs) == step else None


def build_model(config: Run, data: Splits | Outline) -> nn.Module:
    """The model, initialised from the seed's own stream, whatever was drawn before.

    Raises:
        UserError: it cannot be built for this data: another shape, or more memory than there is.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(stream(config.seed, "model").generate_state(1, np.uint64)[0]))
        try:
            model: nn.Module = lookup("model", config.model.name)(data.input_shape, data.outputs, **config.model.options)
        except UNFIT as error:
            raise _unfit(config, data, error) from error
    return checks.replace_batchnorm(model, config.replace_batchnorm) if config.replace_batchnorm else model


# What torch and Python raise where sizes do not fit one another.
UNFIT = (RuntimeError, ValueError, TypeError, IndexError, ArithmeticError, MemoryError, AssertionError)


def _unfit(config: Run, data: Splits | Outline, error: Exception) -> UserError:
    words = (str(error).strip() or type(error).__name__).splitlines()[0][:300].rstrip(".")
    return UserError(
        f"model={config.model.name} and task={config.task.name} do not fit dataset={config.dataset.name} (records of shape "
        f"{list(data.input_shape)}, {data.outputs} outputs): {words}."
    )


def check_fit(config: Run, model: nn.Module, task: Task, data: Splits) -> None:
    """Try the model and the loss on one test record, which is public: what does not fit is told before anything is trained.

    Raises:
        UserError: the model does not take the records, or the loss not its outputs.
    """
    try:
        with torch.no_grad():
            inputs, targets = data.test.batch(torch.arange(1))
            losses = task.loss(model.eval()(inputs), targets)
    except UNFIT as error:
        raise _unfit(config, data, error) from error
    finally:
        model.train()
    if losses.shape != (1,) or losses.is_complex():
        raise _unfit(config, data, ValueError(f"the loss of one record is {losses.dtype} of shape {list(losses.shape)}"))


def build_algorithm(config: Run, problem: Problem, plan: Plan) -> tuple[Run, Algorithm]:
    """The algorithm, and the configuration with the noise multiplier it has: as configured, or calibrated to an ε.

    z is proportional to the noise multiplier, so that one tight ε is found once for all algorithms that share a plan.

    Raises:
        UserError: no noise multiplier reaches the ε.
    """
    make, options, privacy = lookup("algorithm", config.algorithm.name), dict(config.algorithm.options), config.privacy
    try:
        if privacy.target_epsilon:
            unit = make(problem, **(options | {"noise_multiplier": 1.0})).mechanism()
            if unit.z == 0:
                raise ValueError("some direction gets no noise, so its ε is ∞ at every noise multiplier")
            options["noise_multiplier"] = calibrate_mechanism(
                privacy.target_epsilon, unit, plan.before + plan.steps, privacy.delta
            )
        elif privacy.claimed_epsilon:
            claim = Claim(1.0, plan.sampling.sample_rate, plan.steps, privacy.delta, plan.sampling.records, plan.epochs)
            options["noise_multiplier"] = calibrate(privacy.claimed_epsilon, config.accountant, claim)
    except ValueError as error:
        asked = "target" if privacy.target_epsilon else "claimed"
        value = privacy.target_epsilon or privacy.claimed_epsilon
        raise UserError(f"privacy.{asked}_epsilon={value:g} with algorithm={config.algorithm.name}: {error}.") from None
    if options != config.algorithm.options:
        shown = config.resolved["algorithm"] | {"noise_multiplier": options["noise_multiplier"]}
        resolved = config.resolved | {"algorithm": shown}
        config = replace(config, algorithm=Plugin(config.algorithm.name, options), resolved=resolved)
    return config, make(problem, **options)


def check_model(model: nn.Module, algorithm: Algorithm, task: Task, data: Splits) -> list[str]:
    """`checks.check`, where the algorithm is private; of the data only shapes and dtypes are used.

    Raises:
        UserError: the model must not be trained privately as it is.
    """
    if not getattr(algorithm, "private", True):
        return []
    like = data.train.batch(torch.arange(0))
    return checks.check(model, algorithm, task.loss, like, data.outputs)


def build_optimizer(config: Run, model: nn.Module) -> torch.optim.Optimizer:
    """torch's optimiser over the trainable parameters, or ours where complex numbers are normalised by their modulus.

    Raises:
        UserError: it refuses one of its values, or would refuse the model at the first step.
    """
    if config.optimizer.options.get("fused") and any(parameter.is_complex() for parameter in trainable(model).values()):
        raise UserError("optimizer.fused=true: torch has no fused optimiser for complex parameters; leave it out.")
    by_magnitude = config.complex_second_moment == "magnitude"
    builder = BY_MAGNITUDE[config.optimizer.name] if by_magnitude else optimizer_class(config.optimizer.name)
    try:
        return builder(trainable(model).values(), **config.optimizer.options)
    except (ValueError, TypeError) as error:
        raise UserError(f"optimizer={config.optimizer.name}: {error}.") from None


def advance(
    scheduler: torch.optim.lr_scheduler.LRScheduler, model: nn.Module, task: Task, data: Splits, device: torch.device
) -> None:
    """One step of the schedule; `reduce_on_plateau` watches the loss over the validation records, which are public."""
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        assert data.validation is not None
        scheduler.step(evaluate(model, task, data.validation, device)["loss"])
    else:
        scheduler.step()


def build_scheduler(config: Run, optimizer: torch.optim.Optimizer, data: Splits) -> torch.optim.lr_scheduler.LRScheduler | None:
    """torch's schedule of the learning rate, one step an epoch; None where the recipe has none.

    Raises:
        UserError: it refuses one of its values, or watches a validation set that the data does not have.
    """
    if config.scheduler is None:
        return None
    if config.scheduler.name == "reduce_on_plateau" and data.validation is None:
        raise UserError(
            f"scheduler=reduce_on_plateau watches validation records, and dataset={config.dataset.name} has none: use another "
            "scheduler, or set dataset.validation_share."
        )
    try:
        schedule: torch.optim.lr_scheduler.LRScheduler = scheduler_class(config.scheduler.name)(
            optimizer, **config.scheduler.options
        )
    except (ValueError, TypeError) as error:
        raise UserError(f"scheduler={config.scheduler.name}: {error}.") from None
    return schedule


def micro_batch_size(config: Run, plan: Plan, model: nn.Module, task: Task, data: Splits, device: torch.device) -> Size:
    """How many records a step processes at once, to begin with: `trainer.micro_batch`, or with `auto` the most that fit."""
    fixed = config.trainer.micro_batch
    if not isinstance(fixed, str):
        return Size(fixed or MICRO_BATCH)
    inputs, targets = data.train.batch(torch.zeros(1, dtype=torch.long))
    like = inputs.to(device), targets.to(device)
    return largest(model, task.loss, like, plan.sampling.expected_batch_size, device)


def micro_batches(
    records_: Source,
    indices: np.ndarray,
    config: Run,
    device: torch.device,
    step: int = 0,
    augment: Augment | None = None,
    augment_targets: Augment | None = None,
    size: Size | None = None,
    ranks: Ranks = ALONE,
) -> MicroBatches:
    """This rank's share of the sampled records, in pieces, on the device.

    Args:
        step: names the chance by which records are made or `augment` changes their inputs: a resumed step meets the same.
        size: how large the pieces are; by default `trainer.micro_batch`.
    """
    chance = torch.empty(0)
    if augment or augment_targets or records_.by_chance:
        chance = torch.from_numpy(np.random.default_rng(stream(config.seed, "augment", step)).random((len(indices), CHANCES)))
        chance = ranks.share(chance)
    indices = ranks.share(indices)
    pin, prefetch = pinned(device), config.execution.prefetch

    def piece(cut: slice) -> Batch:
        own = chance[cut]
        inputs, targets = records_.batch(torch.from_numpy(indices[cut]), own if records_.by_chance else None)
        inputs = augment(inputs, own) if augment else inputs
        targets = augment_targets(targets, own) if augment_targets else targets
        return pin((inputs, targets))

    def placed(pieces: Iterator[Batch]) -> Iterator[Batch]:
        for inputs, targets in ahead(pieces, (device.type == "cuda") if prefetch is None else prefetch):
            yield inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)

    fixed = config.trainer.micro_batch
    return MicroBatches(len(indices), piece, size or Size(fixed if isinstance(fixed, int) else MICRO_BATCH), placed)


def evaluate(model: nn.Module, task: Task, test: Source, device: torch.device, size: int | None = None) -> dict[str, float]:
    """The task's metrics over a whole set."""
    return task.metrics(*predict(model, task, test, device, size), test.groups)


@torch.no_grad()
def predict(model: nn.Module, task: Task, test: Source, device: torch.device, size: int | None = None) -> Batch:
    """The model's outputs over a whole set, [n, ...], and the targets beside them, at most `size` records at a time.

    A task with maps condenses its outputs batch by batch, and needs no targets afterwards: then neither piles up in memory.
    """
    model.eval()
    one = max(1, test.batch(torch.arange(min(1, len(test))))[0].numel())
    at_once = max(1, min(size or EVALUATION_BATCH, EVALUATION_BATCH, EVALUATION_NUMBERS // one))
    outputs, kept = [], []
    for part in torch.arange(len(test)).split(at_once):
        inputs, targets = test.batch(part)
        answer = model(inputs.to(device))
        outputs.append((task.condense(answer, targets.to(device)) if isinstance(task, Condensing) else answer).cpu())
        kept.append(targets[:0] if isinstance(task, Condensing) else targets)
    model.train()
    return torch.cat(outputs), torch.cat(kept)


@contextmanager
def only_one_process(home: Path, wait: bool = True) -> Iterator[None]:
    """Hold the run's lock; a second process with the same run waits, and then finds it done.

    Raises:
        Busy: another process holds it, and `wait` is false.
    """
    import fcntl

    home.mkdir(parents=True, exist_ok=True)
    with open(home.with_suffix(".lock"), "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise Busy(f"{home}: another process is at this run.") from None
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)


def open_ledger(
    path: Path, mechanism: Mechanism, repeatable: bool, at_least: Position | None, ranks: Ranks = ALONE, whose: str = ""
) -> Ledger:
    """The run's ledger: rank 0's is the file, the others' a copy that counts along.

    Raises:
        UserError: the file is not to be trusted.
    """
    if ranks.first:
        try:
            ledger = Ledger(path, mechanism, repeatable, at_least, whose)
        except LedgerError as error:
            raise UserError(
                f"{error}. Its ε cannot be trusted: move the run's folder away, or add force=true, to start anew."
            ) from None
        ranks.broadcast((ledger.steps, ledger.position.digest))
        return ledger
    steps, digest = ranks.broadcast(((), ""))
    return Copy(steps, digest, repeatable)


def seed_layers(seed: int, step: int, rank: int) -> None:
    """Make what layers draw themselves (dropout) a function of (seed, step), like sampling and noise.

    So a checkpoint needs no state of any generator: torch's, on whatever device, numpy's and Python's own all start anew.
    """
    number = int(stream(seed, "layers", step, rank).generate_state(1, np.uint64)[0])
    torch.manual_seed(number)
    np.random.seed(number % 2**32)
    random.seed(number)


def environment(device: torch.device) -> dict[str, Any]:
    """What a run was made on and with."""
    named = ("torch", "numpy", "scipy", "dp-accounting", "hydra-core", "scikit-learn")
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})",
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {"zdp-bench": __version__} | {name: _version(name) for name in named},
        "commit": git_commit(),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def git_commit() -> str | None:
    """The commit of the checkout this code runs from, `-dirty` when its code was changed; None for an installed package."""
    root = CONF.parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True).stdout.strip()

    try:
        if not (root / ".git").exists():
            return None
        changed = git("status", "--porcelain", "--", "zdp_bench", "conf", "recipes", "datasets")
        return git("rev-parse", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def peak_memory(device: torch.device) -> int:
    """Peak bytes: allocated on the GPU, resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    kilo = 1 if os.uname().sysname == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kilo
