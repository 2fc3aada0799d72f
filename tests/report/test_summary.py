"""The box at a run's end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from tests.test_records import record
from zdp_bench.report import summary


def shown(**privacy: Any) -> str:
    of = record()
    of["privacy"] |= privacy
    console = Console(width=200)
    with console.capture() as out:
        console.print(summary.as_rich(of, Path("record.json"), found=False))
    return out.get()


def test_tight_epsilon_is_an_interval_where_its_law_is_not_exact() -> None:
    assert "30.4 to 33.2  (PLD" in shown(epsilon_tight=33.217, epsilon_tight_at_least=30.37)
    assert "│ 1.5  (PLD" in shown(epsilon_tight=1.5, epsilon_tight_at_least=1.5)
    assert "│ 1.5  (PLD" in shown(epsilon_tight=1.5)
