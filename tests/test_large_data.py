"""Data sets of tens of gigabytes train in the memory that one of a gigabyte takes.

`pytest --slow --gigabytes 40 -rP tests/test_large_data.py` prints the figures of
docs/performance.md.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.drivers import driven

LEAST = 64  # MB that allocators and Poisson's batches move the peak by


def measured(kind: str, gigabytes: float, folder: Path) -> dict[str, Any]:
    """Train on so much data; what the driver prints."""
    (found,) = driven("large_data_driver.py", kind, str(gigabytes), str(folder))
    print(found)  # `pytest -rP` shows it
    return found


@pytest.mark.slow
@pytest.mark.timeout(2 * 3600)
@pytest.mark.parametrize("kind", ["fastmri", "msd"])
def test_memory_does_not_grow_with_the_data(
    kind: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    size = pytestconfig.getoption("gigabytes")
    small, large = (measured(kind, of, tmp_path / f"{of}") for of in (0.5, size))
    assert large["examples"] > size * small["examples"]
    assert large["most"] < 1.2 * small["most"] + LEAST
