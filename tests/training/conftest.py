"""A finished run, carried out once for all tests."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.training import test_run
from zdp_bench.training.run import Outcome


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """The results folder of `TINY`, only to be read, and what became of the run."""
    results = tmp_path_factory.mktemp("tiny")
    return results, test_run.carry_out(results)


@pytest.fixture
def finished(tiny: tuple[Path, Outcome], tmp_path: Path) -> Outcome:
    """The finished run of `TINY` in this test's own results folder."""
    results, outcome = tiny
    shutil.copytree(results, tmp_path, dirs_exist_ok=True)
    return replace(outcome, path=tmp_path / outcome.path.relative_to(results))
