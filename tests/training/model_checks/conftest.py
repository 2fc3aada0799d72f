"""The check has the time here that a run gives it."""

from __future__ import annotations

import pytest

from zdp_bench.training.model_checks import mixing


@pytest.fixture(autouse=True)
def _seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixing, "SECONDS", 2.0)
