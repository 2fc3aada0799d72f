"""Data sets of tens of gigabytes train in the memory that one of a gigabyte takes.

`pytest --slow --gigabytes 40 -rP tests/test_large_data.py` prints the figures of
docs/performance.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
LEAST = 64  # MB that allocators and Poisson's batches move the peak by


def measured(kind: str, gigabytes: float, folder: Path) -> dict[str, Any]:
    """Train on so much data; what the driver prints."""
    driver = [sys.executable, str(ROOT / "tests" / "large_data_driver.py")]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [*driver, kind, str(gigabytes), str(folder)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.timeout(2 * 3600)
@pytest.mark.parametrize("kind", ["fastmri", "msd", "chest_xray"])
def test_memory_does_not_grow_with_the_data(
    kind: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    size = pytestconfig.getoption("gigabytes")
    small, large = (measured(kind, of, tmp_path / f"{of}") for of in (0.5, size))
    assert large["examples"] > size * small["examples"]
    assert large["most"] < 1.2 * small["most"] + LEAST
