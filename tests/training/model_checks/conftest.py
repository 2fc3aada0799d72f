"""However busy the machine is, the check has time for as many examples as the run processes."""

from __future__ import annotations

import pytest

from zdp_bench.training import model_checks


@pytest.fixture(autouse=True)
def _seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_checks, "SECONDS", 1e9)
