"""What a run would cost: measured on its records, and predicted without them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_experiment import configured
from zdp_bench import cost
from zdp_bench.validate import validate


def test_a_few_steps_are_timed_and_nothing_is_written(tmp_path: Path) -> None:
    one, thousand = (cost.measured(configured(tmp_path, f"trainer.epochs={epochs}")) for epochs in (1, 1000))
    assert 0 < one.seconds < thousand.seconds
    assert one.bytes > 0
    assert one.measured_on.startswith(("cpu", "cuda"))
    assert not list(tmp_path.iterdir())


def test_a_step_that_would_take_too_long_is_not_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = validate(configured(tmp_path)).cost
    monkeypatch.setattr("zdp_bench.cost.SECONDS", 0.0)
    monkeypatch.setattr("zdp_bench.algorithms.zeta_dp_sgd.ZetaDPSGD.accumulate", None)  # not called
    short = validate(configured(tmp_path)).cost
    assert whole
    assert short
    assert short.seconds > 0
    assert short.bytes == whole.bytes
    assert short.measured_on == f"{whole.measured_on}, from a forward pass alone"
