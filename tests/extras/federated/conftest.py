"""What the federation's tests share: Flower, or they skip; a configuration; a run of it."""

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from flwr.app import Context, Message

from zdp_bench.config import compose, parse
from zdp_bench.config.schema import Run
from zdp_bench.extras.federated import simulation
from zdp_bench.extras.federated.node import client_app
from zdp_bench.records import Document
from zdp_bench.training.progress import Watcher
from zdp_bench.training.run import execute

TINY = ["recipe=quickstart", "model.hidden=[4]", "trainer.sample_rate=0.25", "trainer.epochs=2"]
TINY += ["accountant=gdp_clt", "threads=1"]

Make = Callable[..., Run]
Sound = Callable[..., Document]


def tiny(results: Path, *overrides: str) -> Run:
    """Return a checked tiny quickstart with these overrides."""
    return parse(compose([*TINY, f"paths.results={results}", *overrides]))


@pytest.fixture
def configured(tmp_path: Path) -> Make:
    """Return `tiny` whose results go to the test's folder."""

    def make(*overrides: str, results: str = "results") -> Run:
        return tiny(tmp_path / results, *overrides)

    return make


def change_answers(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Message, Message], Message], who: int = 1
) -> None:
    """Pass what a node answers, whatever it wrote down before, through `change(asked, answer)`."""

    def app(config: Run, key: str) -> Callable[[Message, Context], Message]:
        sound = client_app(config, key)

        def answer(message: Message, context: Context) -> Message:
            reply = sound(message, context)
            own = context.node_config["partition-id"] == who and not reply.has_error()
            return change(message, reply) if own else reply

        return answer

    monkeypatch.setattr(simulation, "client_app", app)


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Sound:
    """Return the record of a run in which no node fails; each is made once."""
    folder, made = tmp_path_factory.mktemp("sound"), dict[tuple[str, ...], Document]()

    def make(*overrides: str) -> Document:
        if overrides not in made:
            made[overrides] = carried_out(tiny(folder, *overrides))
        return made[overrides]

    return make


def carried_out(config: Run) -> Document:
    return execute(
        config, Watcher(), runner=simulation.run_simulated if config.federated.nodes else None
    ).record.document
