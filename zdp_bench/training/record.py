"""What a run's record says: the run, its privacy, its results, and what it was made on."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from zdp_bench.config.digests import experiment_digest
from zdp_bench.config.schema import OPERATIONAL, Run
from zdp_bench.gradients.clipping import trainable
from zdp_bench.nn.batchnorm import surgery
from zdp_bench.privacy.accounting import patient_interval, rdp_epsilon, tight_interval
from zdp_bench.privacy.ledger import Ledger
from zdp_bench.privacy.mechanism import Mechanism
from zdp_bench.records import Record
from zdp_bench.training.build import count_real
from zdp_bench.training.checkpoint import state_digest
from zdp_bench.training.environment import environment, peak_memory
from zdp_bench.training.loop import Loop
from zdp_bench.training.setup import ModelSetup, Setup

# Keys that may differ between a run and its resumption.
NOT_RECORDED = set(OPERATIONAL) - {"claims"}


class Stopwatch:
    """Measures a run's seconds from its creation."""

    def __init__(self) -> None:
        self.started, self._clock = datetime.now(UTC), time.perf_counter()

    def seconds(self) -> float:
        return time.perf_counter() - self._clock


def run_record(
    loop: Loop,
    watch: Stopwatch,
    fixed_state: list[str],
    privacy: dict[str, Any],
    stopped_by: str,
    metrics: dict[str, float],
) -> Record:
    """Return the record of a run that has ended.

    Args:
        fixed_state: what `Setup.check_model` returned.
        privacy: the section that `privacy_report` returned.
        metrics: of the trained model on the test set.
    """
    setup = loop.setup
    config, data, headline = setup.config, setup.data, setup.task.headline
    start, ema = setup.start, config.trainer.ema
    return {
        "format": 1,
        "recipe": config.recipe,
        "run": loop.run,
        "experiment": experiment_digest(config),
        "seed": config.seed,
        "claims": vars(config.claims),
        "config": {key: value for key, value in config.resolved.items() if key not in NOT_RECORDED},
        "data": {
            "name": config.dataset.name,
            "provenance": data.provenance,
            "digest": data.digest,
            "notes": "; ".join(part for part in (data.notes, start and start.note()) if part),
            "train": len(data.train),
            "test": len(data.test),
            "validation": len(data.validation) if data.validation else 0,
            "example": _example(setup),
        },
        "model": {
            "parameters_real": count_real(trainable(setup.model).values()),
            "surgery": surgery(setup.model),
            "fixed_state": fixed_state,
            **({"weights": f"averaged, decay {ema:g}"} if ema else {}),
        },
        **({"representation": data.representation} if data.representation else {}),
        **({"start": start.described()} if start else {}),
        "privacy": privacy,
        "stopped_by": stopped_by,
        "headline": {"name": headline, "value": metrics[headline]},
        "metrics": metrics,
        "epochs": loop.epochs,
        "environment": environment(setup.device, config.plugins)
        | {"ranks": loop.ranks.size, "execution": vars(config.execution)},
        "measured": {
            "started_utc": watch.started.isoformat(timespec="seconds"),
            "train_seconds": round(watch.seconds(), 2),
            "peak_memory_bytes": peak_memory(setup.device),
            "micro_batch": loop.size.examples,
            "resumed_at_step": loop.resumed_at,
            # Of the trained model, in this folder; `zdp-bench export` reads them.
            "weights": {
                "file": "checkpoint.pt",
                "digest": state_digest(loop.trained.state_dict()),
            },
        },
    }


def _example(setup: ModelSetup) -> dict[str, Any]:
    """Return shapes and dtypes of an example: what the model takes, and what the loss holds it to.

    `zdp-bench export` builds the model from them where no data is.
    """
    inputs, targets = setup.empty_batch()
    return {
        "input_shape": list(inputs.shape[1:]),
        "input_dtype": str(inputs.dtype).removeprefix("torch."),
        "outputs": setup.data.outputs,
        "target_shape": list(targets.shape[1:]),
        "target_dtype": str(targets.dtype).removeprefix("torch."),
    }


def privacy_report(
    setup: Setup, ledger: Ledger, examples_per_patient: int, unit: str
) -> dict[str, Any]:
    """Return a record's section on privacy: ε claimed beside ε tight, and what they follow from."""
    config, plan, mechanism = setup.config, setup.plan, setup.mechanism
    releases, delta = plan.range_test_steps + ledger.releases, config.privacy.delta
    by_patient, most = config.privacy.by_patient, config.privacy.max_records
    together = 1 if by_patient else examples_per_patient  # shares of one patient
    patient_at_least, patient = patient_interval(mechanism, together, releases, delta)
    return {
        "epsilon_claimed": setup.claimed_epsilon(ledger.releases),
        "claimed_by": config.accountant,
        "epsilon_patient": patient,
        "epsilon_patient_at_least": patient_at_least,
        "records_per_patient": min(examples_per_patient, most or examples_per_patient),
        "unit": unit,
        "epsilon_of": epsilon_of(config, unit),
        "range_test_steps": plan.range_test_steps,
        "noise_multiplier": setup.algorithm.noise_multiplier,
        **released_report(mechanism, ledger, releases, delta, config.privacy.secure),
    }


def epsilon_of(config: Run, unit: str) -> str:
    """Return whose ε a run's is: that of an example ("record"), or of who owns several."""
    return unit if config.privacy.by_patient else "record"


def released_report(
    mechanism: Mechanism, ledger: Ledger, releases: int, delta: float, secure: bool
) -> dict[str, Any]:
    """Return what follows from the releases alone: tight ε, and what it was computed from."""
    position = ledger.position
    at_least, tight = tight_interval(mechanism, releases, delta)
    return {
        "epsilon_tight": tight,
        "epsilon_tight_at_least": at_least,
        "epsilon_rdp": rdp_epsilon(mechanism, releases, delta),
        "delta": delta,
        "z": mechanism.z,
        "steps": releases,
        "adjacency": mechanism.sampling.adjacency,
        "sampling": vars(mechanism.sampling),
        "mechanism": mechanism.as_dict(),
        "randomness": "cryptographic" if secure else "seeded",
        "ledger": {"entries": position.entries, "digest": position.digest},
    }
