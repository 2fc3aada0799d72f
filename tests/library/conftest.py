"""`make`: `make_private` with defaults."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.library.small import begin, network
from zdp_bench import Private
from zdp_bench.library import starts

Make = Callable[..., Private]


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainings of other tests, from the same weights on the same data, are none of this one's."""
    monkeypatch.setattr(starts, "_KNOWN", {})
    monkeypatch.setattr(starts, "_KNOWN_PARAMETERS", {})


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """`make_private` with defaults; each call closes the one before."""
    held: list[Private] = []

    def private(model: nn.Module | None = None, **changed: Any) -> Private:
        for earlier in held:
            earlier.close()
        given = {"ledger": tmp_path / "ledger.jsonl"} | changed
        held.append(begin(network() if model is None else model, **given))
        return held[-1]

    yield private
    for earlier in held:
        earlier.close()
