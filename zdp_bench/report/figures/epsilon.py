"""Draws ε as five papers print it against the tight ε, from `results/tables/epsilon.csv`."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from zdp_bench.errors import UserError
from zdp_bench.registry import register
from zdp_bench.report import papers
from zdp_bench.report.figures import WIDTH

MARKERS = "osD^v"


@register("figure", "epsilon")
def printed_against_tight(results: Path, data_root: Path) -> Figure:
    """Every finite printed ε of the five papers against the tight ε of its mechanism, log-log.

    Raises:
        UserError: the ε table has not been made.
    """
    path = results / "tables" / "epsilon.csv"
    if not path.exists():
        raise UserError(f"{path}: not there. Make it with `zdp-bench epsilon --results {results}`.")
    claims = pd.read_csv(path)
    claims["printed"] = pd.to_numeric(claims["printed"], errors="coerce")
    claims["tight"] = pd.to_numeric(claims["tight"], errors="coerce")
    finite = claims[
        (claims["printed"] > 0) & (claims["tight"] > 0) & (claims["tight"] != float("inf"))
    ]

    figure = Figure(figsize=(WIDTH, 0.75 * WIDTH))
    axes = figure.subplots()
    for marker, (paper, points) in zip(MARKERS, finite.groupby("paper"), strict=False):
        axes.plot(
            points["printed"],
            points["tight"],
            marker,
            label=papers.titles().get(str(paper), str(paper)),
            markersize=5,
            alpha=0.75,
            linestyle="none",
        )
    low, high = (
        finite[["printed", "tight"]].min().min() / 1.5,
        finite[["printed", "tight"]].max().max() * 1.5,
    )
    axes.plot(
        [low, high],
        [low, high],
        color="0.4",
        linewidth=1,
        linestyle="-",
        label="as printed",
    )
    axes.set(
        xscale="log",
        yscale="log",
        xlim=(low, high),
        ylim=(low, high),
        xlabel="ε as the paper prints it",
        ylabel="ε tight, of the mechanism as described",
    )
    unbounded = int((claims["tight"] == float("inf")).sum())
    not_drawn = (
        f"\nnot drawn: {unbounded} claims whose tight ε is ∞" if unbounded else ""
    )  # here, where no point can lie
    axes.set_title(f"Above the line, a run has spent more than its paper says{not_drawn}")
    axes.legend(loc="lower right")
    return figure
