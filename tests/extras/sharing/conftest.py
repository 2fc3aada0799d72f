"""A small finished run, a loop of one's own, and the exports of both, made once."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.library.conftest import make  # noqa: F401 - a fixture of this folder too
from tests.library.small import begin, network, train
from tests.training.test_run import carry_out
from zdp_bench import records
from zdp_bench.extras.sharing.export import export, texts_of
from zdp_bench.extras.sharing.folder import write_sums
from zdp_bench.extras.sharing.verification import Check, verify
from zdp_bench.training.run import Outcome


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A finished run of a complex model; its results folder is four levels up."""
    return carry_out(tmp_path_factory.mktemp("results"), "trainer.epochs=1")


@pytest.fixture(scope="session")
def exported(finished: Outcome, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run's export, which no test may change."""
    folder = tmp_path_factory.mktemp("exported") / "model"
    export(finished.path.parents[3], "quickstart", folder)
    return folder


@pytest.fixture(scope="session")
def of_loop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The export of a loop of one's own, which no test may change."""
    place = tmp_path_factory.mktemp("loop")
    with begin(network(), place / "ledger.jsonl") as private:
        train(private)
        metrics = {"accuracy": torch.tensor(0.75)}
        private.export(place / "model", data="points", metrics=metrics)  # type: ignore[arg-type]
    return place / "model"


@pytest.fixture
def folder(exported: Path, tmp_path: Path) -> Path:
    """A copy of the run's export for a test to spoil."""
    return Path(shutil.copytree(exported, tmp_path / "model"))


@pytest.fixture
def loop(of_loop: Path, tmp_path: Path) -> Path:
    """A copy of the loop's export for a test to spoil."""
    return Path(shutil.copytree(of_loop, tmp_path / "loop"))


@pytest.fixture(params=["folder", "loop"])
def either(request: pytest.FixtureRequest) -> Path:
    """A copy of one export and then of the other."""
    made: Path = request.getfixturevalue(request.param)
    return made


def source_of(folder: Path) -> Path:
    """Return the path of an export's record or report."""
    return next(path for name in ("record", "report") if (path := folder / f"{name}.json").exists())


def wrong(folder: Path) -> dict[str, str]:
    return {check.what: check.found for check in verify(folder) if check.state == "failed"}


def head_of(folder: Path) -> dict[str, Any]:
    return yaml.safe_load((folder / "README.md").read_text().split("---\n")[1])


def edit(path: Path, change: Callable[[str], str]) -> None:
    """Change a file, and the digests with it, as a forger would."""
    path.write_text(change(path.read_text()))
    write_sums(path.parent)


def edit_source(folder: Path, change: Callable[[dict], object]) -> None:
    """Change the record, or report, and the digests with it."""
    body = json.loads(source_of(folder).read_text())
    change(body)
    edit(source_of(folder), lambda _: json.dumps(body, indent=1, sort_keys=True) + "\n")


def forge(folder: Path, change: Callable[[dict], object]) -> list[Check]:
    """Change the record, or report, write what follows from it anew, and return what is said."""
    path = source_of(folder)
    body = records.from_json(path.read_text())
    change(body)
    records.write(path, body)
    written = records.from_json(path.read_text())  # its order of keys
    for name, text in texts_of(written).items():
        (folder / name).write_text(text)
    write_sums(folder)
    return verify(folder)
