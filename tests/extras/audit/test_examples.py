"""The shipped scripts: right ones pass for every seed, broken ones are flagged by the attack."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from zdp_bench.extras.audit.foreign import step
from zdp_bench.extras.audit.release import Finding

FOLDER = "zdp_bench.extras.audit.examples"


def attack(script: str, function: str, runs: int, **claimed: Any) -> Finding:
    module = importlib.import_module(f"{FOLDER}.{script}")
    make_step = getattr(module, function)
    return step(make_step, module.EXAMPLES, module.CLAIMED | claimed, runs=runs, seed=0)


@pytest.mark.parametrize(
    ("function", "runs"),
    [
        ("loss_mean", 200),
        pytest.param("noise_per_micro_batch", 400, marks=pytest.mark.slow),
    ],
)
def test_faults_written_by_hand_are_flagged(function: str, runs: int) -> None:
    assert attack("by_hand", function, runs).verdict == "flagged"


def test_dp_sgd_written_by_hand_passes() -> None:
    assert attack("by_hand", "right", 100).verdict == "passes"


@pytest.mark.slow
def test_it_would_be_flagged_at_a_smaller_claim() -> None:
    """It passes because its claim is right, not because the attack is blind."""
    assert attack("by_hand", "right", 200, noise_multiplier=4.0).verdict == "flagged"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "function", "runs", "claimed", "verdict"),
    [
        ("opacus_loop", "shuffled", 160, {}, "flagged"),
        ("opacus_loop", "poisson", 60, {}, "passes"),
        ("opacus_loop", "poisson", 160, {"sample_rate": 0.15}, "flagged"),
    ],
)
def test_loops_with_opacus_are_judged(
    script: str, function: str, runs: int, claimed: dict[str, float], verdict: str
) -> None:
    pytest.importorskip("opacus")
    assert attack(script, function, runs, **claimed).verdict == verdict
