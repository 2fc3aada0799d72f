"""A small finished run and its export, made once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.library.conftest import make  # noqa: F401 - a fixture of this folder too
from tests.training.test_run import carry_out
from zdp_bench.extras.sharing.export import export
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


@pytest.fixture
def folder(exported: Path, tmp_path: Path) -> Path:
    """A copy of the export for a test to spoil."""
    return Path(shutil.copytree(exported, tmp_path / "model"))
