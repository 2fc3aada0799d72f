"""How a learning-rate range test is shown: some of its rates, the one to take, and the bill."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from zdp_bench.report.number_format import epsilon

SHOWN = 12  # rows


def as_rich(found: dict[str, Any]) -> Table:
    """One table of a `range_test.RangeTest`, as plain values."""
    rates, losses, suggested = found["rates"], found["losses"], found["suggested"]
    advice = f"optimizer.lr={suggested:.2g}" if suggested else "none: the loss never fell"
    ended = f"stopped before a tight ε of {found['budget']:g}\n" if found["budget"] else ""
    bill = (
        f"{ended}take {advice}\n{found['steps']} steps, tight ε {epsilon(found['epsilon'])}; with the recipe's run after them "
        f"{epsilon(found['epsilon_with_run'])} (δ = {found['delta']:g})\ncount them: privacy.range_test_steps={found['to_count']}"
    )
    table = Table(
        "learning rate",
        "validation loss",
        title="range test",
        caption=bill,
        title_justify="left",
        caption_justify="left",
    )
    every = max(1, len(rates) // SHOWN)
    for index in range(0, len(rates), every):
        mark = (
            "  <"
            if suggested and rates[index] <= suggested < rates[min(index + every, len(rates) - 1)]
            else ""
        )
        table.add_row(f"{rates[index]:.3g}", f"{losses[index]:.4f}{mark}")
    return table
