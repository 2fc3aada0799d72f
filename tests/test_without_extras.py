"""Each folder of `zdp_bench/extras` can be deleted, and the core works."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_architecture import EXTRAS
from tests.test_cli import TINY
from tests.test_package import ROOT
from zdp_bench.registry import of_extras

NEEDED = ("zdp_bench", "conf", "datasets", "papers", "recipes", "tests")
IMPORT_ALL = """
import importlib, pkgutil, zdp_bench
for module in pkgutil.walk_packages(zdp_bench.__path__, "zdp_bench."):
    if ".extras." not in module.name and "__main__" not in module.name:
        importlib.import_module(module.name)
"""
CORE_TESTS = [
    "tests/test_architecture.py",
    "tests/config/test_compose.py",
    "tests/training/test_step.py",
    "tests/report/test_results.py",
]
COMMANDS = [
    ["-c", IMPORT_ALL],
    ["-m", "zdp_bench", "--help"],
    ["-m", "zdp_bench", "list"],
    ["-m", "zdp_bench", "run", "recipe=quickstart", *TINY],
    ["-m", "zdp_bench", "table", "zeta_dp_2021/1"],
    ["-m", "pytest", "-q", *CORE_TESTS],
]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("extra", EXTRAS)
def test_the_core_works_without_it(extra: str, tmp_path: Path) -> None:
    for name in NEEDED:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.rmtree(tmp_path / "zdp_bench/extras" / extra)
    shutil.rmtree(tmp_path / "tests/extras" / extra)
    for words in COMMANDS:
        done = python(tmp_path, *words)
        assert done.returncode == 0, (words, done.stdout[-2000:], done.stderr[-2000:])
    for verb, where in of_extras("command").items():
        if f".{extra}." in where:
            done = python(tmp_path, "-m", "zdp_bench", verb)
            assert done.returncode == 2
            assert f"'{verb}' is of an extra that is not here" in done.stderr


def python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
