"""What the federation's tests share: Flower, or they skip; a configuration; a run of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from zdp_bench.config import compose, parse
from zdp_bench.config.schema import Run
from zdp_bench.experiment import run
from zdp_bench.federated.simulation import simulated
from zdp_bench.records import Record
from zdp_bench.terminal import Silent

TINY = [
    "recipe=quickstart",
    "model.hidden=[4]",
    "trainer.sample_rate=0.25",
    "trainer.epochs=2",
    "accountant=gdp_clt",
    "threads=1",
]

Make = Callable[..., Run]


@pytest.fixture
def configured(tmp_path: Path) -> Make:
    """Overrides on top of a tiny quickstart -> a checked configuration whose results lie in the test's folder."""

    def make(*overrides: str, results: str = "results") -> Run:
        return parse(compose([*TINY, f"paths.results={tmp_path / results}", *overrides]))

    return make


def carried_out(config: Run) -> Record:
    return run(config, Silent(), carrying=simulated if config.federated.nodes else None).record
