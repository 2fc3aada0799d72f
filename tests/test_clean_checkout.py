"""What a new user tries leaves a clone as it was: `git status` says nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_package import ROOT

TINY = ["trainer.epochs=1", "trainer.sample_rate=0.2", "model.hidden=[4]", "threads=1"]


@pytest.mark.timeout(600)
def test_the_commands_of_the_readme_leave_a_clone_clean(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("no git repository")
    clone = tmp_path / "clone"
    subprocess.run(["git", "clone", "-q", "--no-hardlinks", str(ROOT), str(clone)], check=True)
    environment = {**os.environ, "PYTHONPATH": str(clone), "ZDP_DATA": str(tmp_path / "no-data")}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    for words in (
        ["run", "recipe=quickstart", *TINY],
        ["run", "-m", "recipe=quickstart", "seed=1", "optimizer.lr=0.3", *TINY],
        ["results", "recipe=quickstart"],
        ["budget", "phase_digits"],
        ["coverage"],
        ["table", "zeta_dp_2021/1"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "zdp_bench", *words],
            cwd=clone,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    status = ["git", "status", "--porcelain"]
    left = subprocess.run(status, cwd=clone, capture_output=True, text=True, check=True)
    assert left.stdout == ""
