"""What shows something, or answers a mistake, imports no library that takes seconds in vain."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CODE = """
import sys
from zdp_bench import cli

def light(words, *heavy):
    try:
        cli.main(words.split())
    except SystemExit:
        assert not {*heavy} & {*sys.modules}, words

light("run recipe=quickstart optimzer.lr=1", "torch", "pandas", "scipy")
import zdp_bench.report.results, zdp_bench.training.spending  # of `results` and `budget`
light("list", "torch", "sklearn", "skimage")
light("run --show-config recipe=quickstart", "sklearn", "skimage", "numba")
"""


def test_nothing_heavy_is_imported_in_vain(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "optimizer" in done.stderr
    assert "quickstart" in done.stdout
