"""One run, read from top to bottom: data, model, algorithm, steps, metrics, record."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch

from zdp_bench.config.digests import experiment_digest
from zdp_bench.config.schema import Run
from zdp_bench.data import Splits
from zdp_bench.privacy.noise import run_key
from zdp_bench.records import Record
from zdp_bench.training import checkpoint, distributed
from zdp_bench.training.build import build_scheduler, scale_rate
from zdp_bench.training.devices import pick_device, reserve_gpu
from zdp_bench.training.distributed import Ranks
from zdp_bench.training.environment import code_digest, execution_digest, foreign_code
from zdp_bench.training.evaluation import evaluate_trained
from zdp_bench.training.interrupts import stop_signals
from zdp_bench.training.loop import Loop, Watcher
from zdp_bench.training.public_start import digest_of
from zdp_bench.training.record import Stopwatch, epsilon_of, privacy_report, run_record
from zdp_bench.training.run_folder import Outcome, find_or_run, open_ledger
from zdp_bench.training.setup import Setup, load_data
from zdp_bench.training.spending import reserve
from zdp_bench.training.step import Training, private_step

log = logging.getLogger(__name__)

# Carries a run out on a device; the last argument says whether to wait for another process at it.
Runner = Callable[[Run, Watcher, torch.device, bool], Outcome]


def run(config: Run, watcher: Watcher, wait: bool = True, runner: Runner | None = None) -> Outcome:
    """Carry out one run, or find it done. Each rank brings its share, and rank 0 writes.

    Args:
        wait: for another process at this very run; otherwise `Busy` is raised.
        runner: `run_central` if it is not given; a federation brings its own.

    Formal guarantees:
        - the record's tight ε composes every release in the ledger, of this process and of those
          killed before it;
        - nothing computed from training examples leaves through log, progress or record, but for
          the trained weights.

    Raises:
        UserError: the data, the device, the ledger or the checkpoint is not usable, the disk cannot
            be written to, or the model diverged; says which and why.
        Busy: another process is at this run, and `wait` is false.
        Stopped: a signal asked for it; the run is saved.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    with reserve_gpu(config.device) as name:
        return (runner or run_central)(config, watcher, pick_device(name), wait)


def run_central(config: Run, watcher: Watcher, device: torch.device, wait: bool) -> Outcome:
    """Train one model on one training set: every recipe without `federated.nodes`."""
    ranks, data = distributed.join(device.type), load_data(config)
    digest = digest_of(config, data.digest)
    same = {"configuration": (experiment_digest(config), config.seed, config.execution)}
    ranks.require_same(
        same | {"data set": data.digest, "start": digest, "code": code_digest(config.plugins)}
    )

    def train(home: Path) -> Record:
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
) -> Record:
    """Train and evaluate; return the record on rank 0, and nothing on the others."""
    watch = Stopwatch()
    setup = Setup.of(config, data, device)
    config, plan, mechanism = setup.config, setup.plan, setup.mechanism
    ranks.require_same({"mechanism": mechanism.digest(), "plan": plan})
    scale_rate(config, setup.optimizer, plan)
    scheduler = build_scheduler(config, setup.optimizer, data, plan.steps)
    fixed_state = setup.check_model()
    size, save_every = setup.micro_batch_size(), config.execution.checkpoint_steps
    loop = Loop(setup, plan, scheduler, digest, home, watcher, size, save_every, ranks)
    saved = ranks.broadcast(
        checkpoint.load(home / "checkpoint.pt", digest) if ranks.is_first else None
    )
    loop.restore(saved)

    def state() -> tuple[str, int, str]:
        """Name what the next step starts from; see `Ledger.begin`."""
        deterministic = config.execution.deterministic
        made = execution_digest(config.plugins, device, size.examples, ranks.size, deterministic)
        return made, loop.step, checkpoint.state_digest(*loop.states())

    repeatable, at_least = not config.privacy.secure, saved.ledger if saved else None
    file, facts = home / "ledger.jsonl", {"epsilon_of": epsilon_of(config, data.unit)}
    ledger = open_ledger(file, mechanism, repeatable, at_least, state(), ranks, facts=facts)
    if ledger.counted_again:
        log.warning(
            f"{config.recipe} seed {config.seed}: {ledger.counted_again:,} steps that a stopped "
            "process had taken are taken again, but code, libraries, machine, threads, micro-batch "
            "or weights are not provably the same: they get new noise, and count again in every ε."
        )
    key = run_key(digest, mechanism, foreign_code(config.plugins)) + ledger.generation
    limit = setup.affordable(ledger.releases + plan.steps - loop.step)
    planned = ledger.releases + plan.steps - loop.step if limit is None else limit
    training = Training(
        setup.algorithm, setup.model, setup.optimizer, setup.noise(key), ledger, limit, ranks
    )

    def take_step(step: int) -> bool:
        batches, divisor = setup.draw(key, step, size, ranks)
        private_step(training, step, batches, divisor)
        return True

    def epsilon(steps: int) -> float:
        return setup.epsilon(ledger.releases_before(steps))

    def save() -> None:
        if ranks.is_first:
            ledger.note(*state())  # before the checkpoint: a saved state is always a noted one
            loop.save(ledger.position)

    with closing(ledger), setup.arithmetic(), stop_signals() as signal:
        loop.guard = setup.guard()  # here, where the hooks of bf16 are the model's
        if ranks.is_first:
            reserve(config, data, mechanism, plan.range_test_steps + planned, home)
        stopped_by = loop.take_steps(take_step, epsilon, save, signal)
        if not ranks.is_first:
            return {}
        metrics = evaluate_trained(home, loop.trained, setup.task, data.test, device, size.examples)
    privacy = privacy_report(setup, ledger, data.examples_per_patient, data.unit)
    return run_record(loop, watch, fixed_state, privacy, stopped_by, metrics)
