"""Draws the face-off: test metric against tight ε, a panel for each data set and network."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import mean

from matplotlib.figure import Figure

from zdp_bench import records
from zdp_bench.errors import UserError
from zdp_bench.registry import register
from zdp_bench.report import names
from zdp_bench.report.faceoff import NON_PRIVATE, RECIPE, read
from zdp_bench.report.figures import (
    REFERENCE,
    WIDTH,
    curve_style,
    draw_mean,
    legend_below,
    log_ticks,
    non_private,
    say_runs,
)

HEIGHT = 2.8  # inches a row of panels


@register("figure", "faceoff")
def faceoff(results: Path, data_root: Path) -> Figure:
    """Face-off: the test metric of all algorithms at equal tight ε, a panel for each setting."""
    found, every = read(results), records.read_all(results)
    if not found:
        raise UserError(
            f"{results}: no face-off was run. Run one with `zdp-bench run -m recipe={RECIPE}`."
        )
    columns = min(2, len(found))
    rows = -(-len(found) // columns)
    figure = Figure(figsize=(WIDTH, HEIGHT * rows + 0.5))
    grid = figure.subplots(rows, columns, squeeze=False)
    algorithms = sorted({name for one in found for name in one.algorithms if name != NON_PRIVATE})
    style = {name: curve_style(place) for place, name in enumerate(algorithms)}
    counts = []
    for axes, one in zip(grid.flat, found, strict=False):
        scale = names.scale(one.metric)
        finite = [epsilon for epsilon in one.epsilons if epsilon < math.inf]
        run = next(iter(one.runs.values()))[0]
        unprotected = one.values(NON_PRIVATE, math.inf)
        if values := unprotected or non_private.values(run, every, one.metric):
            axes.axhline(scale * mean(values), label="non-private", **REFERENCE)
        for name in [name for name in algorithms if name in one.algorithms]:
            seeds = [[scale * value for value in one.values(name, e)] for e in finite]
            counts += [len(values) for values in seeds if values]
            draw_mean(axes, finite, seeds, label=names.algorithm(name), **style[name])
        axes.set_title(f"{names.model(one.model)} on {names.data(one.dataset)} ({one.provenance})")
        axes.set_xscale("log")
        log_ticks(axes.xaxis, finite)
        axes.set_xlabel("tight ε")
        axes.set_ylabel(names.axis(one.metric))
    for axes in grid.flat[len(found) :]:
        axes.set_visible(False)
    legend_below(figure, say_runs(counts))
    return figure
