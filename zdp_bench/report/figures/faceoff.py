"""Draws the face-off: test metric against tight ε, a panel for each data set and network."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import mean

from matplotlib.figure import Figure

from zdp_bench.errors import UserError
from zdp_bench.registry import register
from zdp_bench.report.faceoff import NON_PRIVATE, RECIPE, read
from zdp_bench.report.figures import COLOURS, LINES, WIDTH, legend_below

HEIGHT = 2.8  # inches a row of panels


@register("figure", "faceoff")
def faceoff(results: Path, data_root: Path) -> Figure:
    """All algorithms at equal tight ε: mean over seeds, with a band from least to largest."""
    found = read(results)
    if not found:
        raise UserError(
            f"{results}: no face-off was run. Run one with `zdp-bench run -m recipe={RECIPE}`."
        )
    columns = min(2, len(found))
    rows = -(-len(found) // columns)
    figure = Figure(figsize=(WIDTH, HEIGHT * rows + 0.5))
    grid = figure.subplots(rows, columns, squeeze=False)
    names = sorted({algorithm for one in found for algorithm in one.algorithms})
    style = {
        name: (COLOURS[i % len(COLOURS)], LINES[i % len(LINES)]) for i, name in enumerate(names)
    }
    for axes, one in zip(grid.flat, found, strict=False):
        finite = [epsilon for epsilon in one.epsilons if epsilon < math.inf]
        if open_values := one.values(NON_PRIVATE, math.inf):
            axes.axhline(mean(open_values), color="black", linewidth=0.8, label="non-private")
        for algorithm in [name for name in one.algorithms if name != NON_PRIVATE]:
            points = [(e, v) for e in finite if (v := one.values(algorithm, e))]
            x, (colour, line) = [e for e, _ in points], style[algorithm]
            above = (
                2 if line == "-" else 3
            )  # of two equal curves (zeta_dp_sgd is dp_sgd on a real network) both are seen
            y = [mean(v) for _, v in points]
            axes.plot(
                x, y, line, color=colour, label=algorithm, marker="o", markersize=3, zorder=above
            )
            if any(len(v) > 1 for _, v in points):
                low, high = [min(v) for _, v in points], [max(v) for _, v in points]
                axes.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
        axes.set_title(one.title)
        axes.set_xscale("log")
        axes.set_xticks(finite, [f"{e:g}" for e in finite])
        axes.minorticks_off()
        axes.set_xlabel("tight ε")
        axes.set_ylabel(f"test {one.metric.replace('_', ' ')}")
    for axes in grid.flat[len(found) :]:
        axes.set_visible(False)
    legend_below(figure)
    return figure
