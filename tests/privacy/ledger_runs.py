"""Processes that open a ledger, take steps and end, for the tests of tally and ledger."""

from __future__ import annotations

from pathlib import Path

from zdp_bench.privacy.ledger import Ledger
from zdp_bench.privacy.mechanism import Block, Mechanism, Sampling
from zdp_bench.privacy.tally import Position

SAMPLING = Sampling("poisson", 0.1, 10.0, 100)
MECHANISM, OTHER_MECHANISM = (
    Mechanism((Block("w", (3,), "float32", 1.0, std, "real"),), SAMPLING) for std in (1.5, 1.0)
)


def write(
    path: Path, *steps: int, repeatable: bool = True, at_least: Position | None = None
) -> Ledger:
    """Append steps to the ledger at `path`, and return it closed."""
    ledger = Ledger(path, MECHANISM, repeatable, at_least)
    for step in steps:
        ledger.append(step)
    ledger.close()
    return ledger


def reopen(path: Path, repeatable: bool = True, at_least: Position | None = None) -> Ledger:
    """Open the ledger at `path` again, and return it closed."""
    return write(path, repeatable=repeatable, at_least=at_least)


def run_process(
    path: Path, execution: str, first: int, state: str, end: int, secure: bool = False
) -> tuple[Ledger, int]:
    """Take the steps `first` … `end` − 1 as one process.

    Returns:
        The closed ledger, and the number of steps that the process reports as counted again.
    """
    ledger = Ledger(path, MECHANISM, repeatable=not secure)
    ledger.choose_generation(execution, first, state)
    for step in range(first, end):
        ledger.append(step)
    ledger.close()
    return ledger, ledger.num_to_count_again
