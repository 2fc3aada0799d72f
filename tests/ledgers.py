"""What a ledger's file holds, read without the package; and what a fork of a process says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tests.drivers import start


def steps_in(ledger: Path) -> list[int]:
    """The steps that are written down, or reserved and not given back, in order."""
    steps: list[int] = []
    for line in map(json.loads, ledger.read_text().splitlines()):
        if "taken" in line:
            del steps[len(steps) - (steps[-1] + 1 - line["taken"]) :]
        elif "step" in line and "state" not in line:
            steps += range(line["step"], line.get("to", line["step"] + 1))
    return steps


def end_of(ledger: Path) -> tuple[list[int], str]:
    """The steps and the chain's end, which do not tell what stood in one line."""
    return steps_in(ledger), json.loads(ledger.read_text().splitlines()[-1])["sha256"]


def in_a_fork(act: Callable[[], str]) -> str:
    """What `act` returns in a copy of this process."""
    return start(lambda: print(act(), end="")).wait().stdout
