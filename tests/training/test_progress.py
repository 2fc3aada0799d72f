"""A run's progress on terminals of several widths."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from zdp_bench.training.progress import Live


@pytest.mark.parametrize("width", [40, 60, 80, 110, 160])
def test_steps_epsilon_and_time_left_stand_whole_at_every_width(width: int) -> None:
    file = io.StringIO()
    with Live(Console(file=file, force_terminal=True, width=width, color_system=None)) as live:
        live.started("msd_hippocampus_private", 12, 1200, 0)
        live.stepped(600)
        live.evaluated(1, 600, {"accuracy": 0.8444, "roc_auc": 0.9884, "loss": 1.698}, 0.6456)
        assert live._bar is not None
        live._bar.refresh()
    drawn = next(
        line for line in reversed(file.getvalue().replace("\r", "\n").split("\n")) if "ε" in line
    )
    assert " 600/1200 " in drawn
    assert "ε 0.646" in drawn
    assert "-:--:--" in drawn or "0:00:0" in drawn
    assert "ms" in drawn
    assert ("loss 1.698" in drawn) == (width >= 110)
