"""Compositions are Hydra's own here, each anew."""

from __future__ import annotations

import hydra
import pytest

from tests.conftest import compose_anew


@pytest.fixture(autouse=True)
def _hydras_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hydra, "compose", compose_anew)
