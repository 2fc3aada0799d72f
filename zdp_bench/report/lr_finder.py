"""A learning-rate range test as a table: some of its rates, the one to take, and what it costs."""

from __future__ import annotations

from typing import Any

from zdp_bench.report.number_format import epsilon
from zdp_bench.report.sheet import Sheet

SHOWN = 12  # rows


def sheet(found: dict[str, Any]) -> Sheet:
    """Return the table of a `lr_finder.RangeTest`, given as plain values."""
    rates, losses, suggested = found["rates"], found["losses"], found["suggested"]
    advice = f"optimizer.lr={suggested:.2g}" if suggested else "none: the loss never fell"
    notes = [
        f"take {advice}",
        f"{found['steps']} steps, tight ε {epsilon(found['epsilon'])}; with the recipe's run after "
        f"them {epsilon(found['epsilon_with_run'])} (δ = {found['delta']:g})",
        f"count them: privacy.range_test_steps={found['to_count']}",
    ]
    if found["budget"]:
        notes.insert(0, f"stopped before a tight ε of {found['budget']:g}")
    rows = []
    every = max(1, len(rates) // SHOWN)
    for index in range(0, len(rates), every):
        end = rates[min(index + every, len(rates) - 1)]
        mark = "  <" if suggested and rates[index] <= suggested < end else ""
        rows.append([f"{rates[index]:.3g}", f"{losses[index]:.4f}{mark}"])
    return Sheet("range test", ("learning rate", "validation loss"), rows, notes)
