"""What a run would cost, predicted without its data."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import Tensor

from tests.training.test_run import configured
from zdp_bench.experiments.validate import validate
from zdp_bench.gradients import Batch


def test_a_step_that_would_take_too_long_is_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = validate(configured(tmp_path)).cost
    monkeypatch.setattr("zdp_bench.experiments.cost.SECONDS", 0.0)
    monkeypatch.setattr("zdp_bench.algorithms.zeta_dp_sgd.ZetaDPSGD.accumulate", None)  # not called
    short = validate(configured(tmp_path)).cost
    assert whole
    assert short
    assert short.seconds > 0
    assert short.bytes == whole.bytes
    assert short.measured_on == f"{whole.measured_on}, from a forward pass alone"


def test_what_a_batch_costs_whatever_its_size_is_told_from_what_each_record_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spectral-DP transforms one sum, whatever the batch size: a step must not scale with it."""
    clock = 0.0

    def accumulate(self: object, total: dict[str, Tensor], batch: Batch) -> None:
        nonlocal clock
        clock += 0.25 + 0.01 * len(batch[0])

    clocks = SimpleNamespace(perf_counter=lambda: clock, process_time=lambda: clock)
    monkeypatch.setattr("zdp_bench.experiments.cost.time", clocks)
    monkeypatch.setattr("zdp_bench.experiments.cost.NOISE_SECONDS", 0.0)
    monkeypatch.setattr("zdp_bench.algorithms.zeta_dp_sgd.ZetaDPSGD.accumulate", accumulate)
    found = validate(
        configured(tmp_path, "trainer.sample_rate=0.05", "trainer.micro_batch=30")
    ).cost
    assert found
    expected = round(0.05 * 1426)  # records of a batch, in three micro-batches
    assert found.seconds == pytest.approx(40 * (3 * 0.25 + 0.01 * expected))


def test_a_cold_first_pass_and_a_busy_machine_are_not_in_the_estimate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step of a size takes 600 s; of two seconds, others have the CPU for one."""
    wall = worked = 0.0
    sizes = set()

    def accumulate(self: object, total: dict[str, Tensor], batch: Batch) -> None:
        nonlocal wall, worked
        size = len(batch[0])
        took = 0.01 * size if size in sizes else 600.0
        sizes.add(size)
        worked, wall = worked + took, wall + 2 * took

    clocks = SimpleNamespace(perf_counter=lambda: wall, process_time=lambda: worked)
    monkeypatch.setattr("zdp_bench.experiments.cost.time", clocks)
    monkeypatch.setattr("zdp_bench.experiments.cost.NOISE_SECONDS", 0.0)
    monkeypatch.setattr("zdp_bench.algorithms.zeta_dp_sgd.ZetaDPSGD.accumulate", accumulate)
    found = validate(configured(tmp_path, "trainer.sample_rate=0.05")).cost
    assert found
    assert found.seconds == pytest.approx(40 * 0.01 * round(0.05 * 1426))
