"""`make`: `make_private` with defaults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import zdp_bench
from tests.library.small import defaults, network
from zdp_bench import Private
from zdp_bench.library import trails

Make = Callable[..., Private]


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainings of other tests, from the same weights on the same data, are none of this one's."""
    monkeypatch.setattr(trails, "_TRAILS", {})


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """`make_private` with defaults; each call closes the one before."""
    held: list[Private] = []

    def private(model: nn.Module | None = None, **changed: Any) -> Private:
        for earlier in held:
            earlier.close()
        model = network() if model is None else model
        given = defaults(model) | {"ledger": tmp_path / "ledger.jsonl"} | changed
        if "target_epsilon" not in given:
            given.setdefault("noise_multiplier", 1.2)
        held.append(zdp_bench.make_private(model, **given))
        return held[-1]

    yield private
    for earlier in held:
        earlier.close()
