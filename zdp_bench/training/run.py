"""ONE run, read top to bottom: data -> model -> algorithm -> steps -> metrics -> record."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from zdp_bench import records
from zdp_bench.config.digests import experiment_digest, run_digest
from zdp_bench.config.schema import OPERATIONAL, Run
from zdp_bench.data import Splits
from zdp_bench.errors import Busy, UserError
from zdp_bench.gradients.clipping import trainable
from zdp_bench.nn.batchnorm import surgery
from zdp_bench.privacy.accounting import (
    patient_interval,
    rdp_epsilon,
    tight_interval,
)
from zdp_bench.privacy.ledger import BudgetExceeded, Copy, Ledger, LedgerError, Position, set_aside
from zdp_bench.privacy.mechanism import Mechanism
from zdp_bench.privacy.noise import run_key
from zdp_bench.records import Record
from zdp_bench.training import checkpoint, distributed
from zdp_bench.training.build import build_scheduler
from zdp_bench.training.devices import own_gpu, pick_device
from zdp_bench.training.distributed import ALONE, Ranks
from zdp_bench.training.environment import environment, foreign_code, made_with, peak_memory
from zdp_bench.training.evaluation import (
    WATCHED,
    advance,
    evaluate,
    final_metrics,
    refuse_divergence,
    still_answers,
)
from zdp_bench.training.interrupts import Stopped, stop_signals, writes
from zdp_bench.training.setup import Setup, load_data
from zdp_bench.training.step import Training, private_step

log = logging.getLogger(__name__)

NOT_RECORDED = set(OPERATIONAL) - {
    "claims"
}  # of the configuration: what may differ between a run and its resumption


class Watcher(Protocol):
    """Who is told how a run goes. Only what costs no privacy is told: nothing computed from training records."""

    def started(self, recipe: str, seed: int, steps: int, done: int) -> None: ...
    def stepped(self, step: int) -> None: ...
    def evaluated(
        self, epoch: int, step: int, metrics: dict[str, float], epsilon: float
    ) -> None: ...


@dataclass(frozen=True)
class Outcome:
    """A run's record, and whether it was there already."""

    record: Record
    path: Path
    found: bool


Carrying = Callable[
    [Run, Watcher, torch.device, bool], Outcome
]  # how a run is carried out, on a device, and whether it waits


def run(
    config: Run, watcher: Watcher, wait: bool = True, carrying: Carrying | None = None
) -> Outcome:
    """Carry out one run, or find it done. One of several ranks brings its share, and rank 0 writes.

    Args:
        wait: for a process that is at this very run; else it is left to that one.
        carrying: how; here and centrally where nothing else is said (a federation says something else).

    Formal guarantees:
        - the record's tight ε composes every release in the ledger, of this process and of those killed before it;
        - nothing computed from training records leaves through log, progress or record, but for the trained weights.

    Raises:
        UserError: the data, the device, the ledger or the checkpoint is not usable, the disk not to be written to, or the model
            diverged; says which and why.
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
    data = load_data(config)
    digest = run_digest(config, data.digest)
    return once(
        config,
        digest,
        ranks,
        wait,
        lambda home: _train(config, data, digest, home, device, watcher, ranks),
    )


def once(
    config: Run, digest: str, ranks: Ranks, wait: bool, train: Callable[[Path], Record]
) -> Outcome:
    """Find the record of a run, or make it: one process at a time, and written by rank 0 alone.

    Args:
        train: carries the run out in its folder, on every rank.
    """
    home = records.folder(config.results, config.recipe, digest)
    with writes(home), only_one_process(home, wait) if ranks.first else nullcontext():
        if config.force and ranks.first:
            _start_anew(home)
        if done := ranks.broadcast(records.read(home / "record.json") if ranks.first else None):
            return Outcome(done, home / "record.json", found=True)
        record = ranks.broadcast(train(home))
        if ranks.first:
            records.write(home / "record.json", record)
            records.rebuild_csv(config.results)
    return Outcome(record, home / "record.json", found=False)


def _start_anew(home: Path) -> None:
    """Clear a run's folder but for its ledgers, which are set aside: what was released once stays counted.

    The record goes first: a kill on the way leaves a run to be made, never a record without its ledger.
    """
    ledgers = [*home.rglob("*.jsonl")]
    kept = {*ledgers, *home.rglob("*.jsonl.*")}
    for path in sorted(home.rglob("*"), key=lambda path: path.name != "record.json"):
        if path not in kept and not path.is_dir():
            path.unlink()
    for path in ledgers:
        set_aside(path)


def _train(
    config: Run,
    data: Splits,
    digest: str,
    home: Path,
    device: torch.device,
    watcher: Watcher,
    ranks: Ranks,
) -> Record:
    started = datetime.now(UTC)
    clock = time.perf_counter()

    setup = Setup.of(config, data, device)
    config, plan, mechanism = setup.config, setup.plan, setup.mechanism
    model, task, algorithm, optimizer = (
        setup.model,
        setup.task,
        setup.algorithm,
        setup.optimizer,
    )
    scheduler = build_scheduler(config, optimizer, data)
    fixed = setup.check_model()
    size = setup.micro_batch_size()

    saved = ranks.broadcast(
        checkpoint.load(home / "checkpoint.pt", digest) if ranks.first else None
    )
    step, epochs = 0, []
    if saved:
        saved.restore(model, optimizer, scheduler)
        step, epochs = saved.step, saved.epochs

    def states() -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        return (
            model.state_dict(),
            optimizer.state_dict(),
            scheduler.state_dict() if scheduler else {},
        )

    def made() -> str:
        return made_with(
            config.plugins, device, size.records, ranks.size, config.execution.deterministic
        )

    at_least, path = saved.ledger if saved else None, home / "ledger.jsonl"
    ledger = open_ledger(
        path,
        mechanism,
        not config.privacy.secure,
        at_least,
        (made(), step, checkpoint.state_digest(*states())),
        ranks,
    )
    if ledger.counted_again:
        log.warning(
            f"{config.recipe} seed {config.seed}: {ledger.counted_again:,} steps that a stopped process had taken are taken "
            "again, but code, libraries, machine, threads, micro-batch or weights are not provably the same: they get new "
            "noise, and count again in every ε."
        )
    key = run_key(digest, mechanism, foreign_code(config.plugins)) + ledger.generation
    limit = setup.affordable(ledger.releases + plan.steps - step)
    training = Training(algorithm, model, optimizer, setup.noise(key), ledger, limit, ranks)

    def save() -> None:
        if ranks.first:
            weights, moments, rates = states()
            ledger.note(
                made(), step, checkpoint.state_digest(weights, moments, rates)
            )  # first: what is saved is then known
            state = checkpoint.Checkpoint(
                digest, step, weights, moments, ledger.position, epochs, rates
            )
            checkpoint.save(home / "checkpoint.pt", state)

    def measured() -> tuple[dict[str, float], float]:
        """Test metrics and tight ε as they stand: rank 0's, for the others have the same weights."""
        if not ranks.first:
            return {}, 0.0
        spent = setup.epsilon(ledger.releases_before(step))
        return evaluate(model, task, data.test, device, size.records), spent

    watcher.started(config.recipe, config.seed, plan.steps, step)
    stopped_by = "epochs"
    every = config.execution.checkpoint_steps
    with closing(ledger), setup.arithmetic(), stop_signals() as asked:
        while step < plan.steps and stopped_by == "epochs":
            try:
                batches, divisor = setup.draw(key, step, size, ranks)
                private_step(training, step, batches, divisor)
                step += 1
                if scheduler and plan.epoch_ending_at(step) is not None:
                    advance(scheduler, model, task, data.validation, device)
                watcher.stepped(step)
            except BudgetExceeded:
                stopped_by = "budget"
            epoch = plan.epoch_ending_at(step)
            due = bool(every) and step % (every or 1) == 0
            if (epoch is not None or stopped_by == "budget") and not (
                epochs and epochs[-1]["step"] == step
            ):
                metrics, epsilon = ranks.broadcast(measured())
                refuse_divergence(metrics, epoch, step, config.optimizer.options.get("lr"))
                epochs.append({"epoch": epoch, "step": step, "epsilon_tight": epsilon, **metrics})
                watcher.evaluated(plan.epoch_of(step), step, metrics, epsilon)
                due = (
                    due
                    or epoch is None
                    or epoch % config.trainer.checkpoint_epochs == 0
                    or step == plan.steps
                )
            elif step % WATCHED == 0 or due:  # before a state that leads nowhere is kept
                loss = (
                    0.0
                    if ranks.broadcast(ranks.first and still_answers(model, data.test, device))
                    else math.nan
                )
                refuse_divergence(
                    {"loss": loss}, plan.epoch_of(step), step, config.optimizer.options.get("lr")
                )
            signal = ranks.largest(asked())
            if due or signal:
                save()
            if signal and step < plan.steps and stopped_by == "epochs":
                raise Stopped(signal)
        if not ranks.first:
            return {}
        metrics = final_metrics(
            home, model, task, data.test, device, size.records
        )  # in the run's own arithmetic
    return run_metadata(config, data, digest, model, fixed) | {
        "privacy": privacy_report(setup, ledger, data.examples_per_patient, data.unit),
        "stopped_by": stopped_by,
        "headline": {"name": task.headline, "value": metrics[task.headline]},
        "metrics": metrics,
        "epochs": epochs,
        "environment": environment(device)
        | {"ranks": ranks.size, "execution": vars(config.execution)},
        "measured": {
            "started_utc": started.isoformat(timespec="seconds"),
            "train_seconds": round(time.perf_counter() - clock, 2),
            "peak_memory_bytes": peak_memory(device),
            "micro_batch": size.records,
            "resumed_at_step": saved.step if saved else None,
        },
    }


def run_metadata(
    config: Run, data: Splits, digest: str, model: nn.Module, fixed: list[str]
) -> Record:
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
            "parameters_real": sum(
                p.numel() * (2 if p.is_complex() else 1) for p in trainable(model).values()
            ),
            "surgery": surgery(model),
            "fixed_state": fixed,
        },
    }


def privacy_report(
    setup: Setup, ledger: Ledger, examples_per_patient: int, unit: str
) -> dict[str, Any]:
    """Return a record's section on privacy: ε claimed beside ε tight, and what they follow from."""
    config, plan, mechanism = setup.config, setup.plan, setup.mechanism
    releases, delta = plan.range_test_steps + ledger.releases, config.privacy.delta
    at_least, tight = tight_interval(mechanism, releases, delta)
    patient_at_least, patient = patient_interval(mechanism, examples_per_patient, releases, delta)
    return {
        "epsilon_claimed": setup.claimed_epsilon(ledger.releases),
        "claimed_by": config.accountant,
        "epsilon_tight": tight,
        "epsilon_tight_at_least": at_least,
        "epsilon_rdp": rdp_epsilon(mechanism, releases, delta),
        "epsilon_patient": patient,
        "epsilon_patient_at_least": patient_at_least,
        "records_per_patient": examples_per_patient,
        "unit": unit,
        "delta": delta,
        "noise_multiplier": setup.algorithm.noise_multiplier,
        "z": mechanism.z,
        "steps": releases,
        "range_test_steps": plan.range_test_steps,
        "adjacency": plan.sampling.adjacency,
        "sampling": vars(plan.sampling),
        "mechanism": mechanism.as_dict(),
        "randomness": "cryptographic" if config.privacy.secure else "seeded",
        "ledger": {"entries": ledger.position.entries, "digest": ledger.position.digest},
    }


# --------------------------------------------------------------------------------------------- lock, ledger, chance


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
    path: Path,
    mechanism: Mechanism,
    repeatable: bool,
    at_least: Position | None,
    start: tuple[str, int, str],
    ranks: Ranks = ALONE,
    whose: str = "",
) -> Ledger:
    """The run's ledger, begun at `start` (`Ledger.begin`): rank 0's is the file, the others' a copy that counts along.

    Raises:
        UserError: the file is not to be trusted.
    """
    if not ranks.first:
        return ranks.broadcast(Copy((), Position(0, ""), repeatable))
    try:
        ledger = Ledger(path, mechanism, repeatable, at_least, whose)
    except LedgerError as error:
        raise UserError(
            f"{error}. Its ε cannot be trusted: move the run's folder away, or add force=true, to start anew."
        ) from None
    ledger.begin(*start)
    ranks.broadcast(ledger.copy())
    return ledger
