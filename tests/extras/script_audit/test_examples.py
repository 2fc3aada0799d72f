"""The shipped scripts: right ones pass for every seed, broken ones are flagged by the attack."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from zdp_bench.audit import Finding, step

FOLDER = "zdp_bench.extras.script_audit.examples"


def attack(script: str, function: str, runs: int, seed: int = 0, **claimed: Any) -> Finding:
    module = importlib.import_module(f"{FOLDER}.{script}")
    make_step = getattr(module, function)
    return step(make_step, module.EXAMPLES, module.CLAIMED | claimed, runs=runs, seed=seed)


@pytest.mark.parametrize(
    ("function", "runs"),
    [("loss_mean", 200), ("noise_before_averaging", 100), ("noise_per_micro_batch", 400)],
)
def test_faults_written_by_hand_are_flagged(function: str, runs: int) -> None:
    assert attack("by_hand", function, runs).verdict == "flagged"


@pytest.mark.parametrize("seed", range(2))
def test_dp_sgd_written_by_hand_passes(seed: int) -> None:
    assert attack("by_hand", "right", 100, seed).verdict == "passes"


def test_it_would_be_flagged_at_a_smaller_claim() -> None:
    """It passes because its claim is right, not because the attack is blind."""
    assert attack("by_hand", "right", 400, noise_multiplier=3.0).verdict == "flagged"


def test_shuffled_batches_with_opacus_are_flagged() -> None:
    pytest.importorskip("opacus")
    assert attack("opacus_loop", "shuffled", 160).verdict == "flagged"


@pytest.mark.parametrize("seed", range(2))
def test_poisson_batches_with_opacus_pass(seed: int) -> None:
    pytest.importorskip("opacus")
    assert attack("opacus_loop", "poisson", 60, seed).verdict == "passes"


def test_poisson_batches_would_be_flagged_at_a_smaller_rate() -> None:
    pytest.importorskip("opacus")
    assert attack("opacus_loop", "poisson", 160, sample_rate=0.15).verdict == "flagged"


def test_a_complex_layer_with_opacus_is_flagged() -> None:
    pytest.importorskip("opacus")
    assert attack("opacus_complex", "complex_layer", 800).verdict == "flagged"


@pytest.mark.parametrize("seed", range(2))
def test_a_real_layer_with_opacus_passes(seed: int) -> None:
    pytest.importorskip("opacus")
    assert attack("opacus_complex", "real_layer", 100, seed).verdict == "passes"
