"""What a ledger's file holds, read without the package; and what a fork of a process says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tests.drivers import start


def steps_in(ledger: Path) -> list[int]:
    """The steps that are written down, in order."""
    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    return [line["step"] for line in lines if "step" in line and "state" not in line]


def in_a_fork(act: Callable[[], str]) -> str:
    """What `act` returns in a copy of this process."""
    return start(lambda: print(act(), end="")).wait().stdout
