"""A figure of curves, a panel beside the other: mean and the band over seeds, from what `zdp-bench table` wrote."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from zdp_bench.errors import UserError
from zdp_bench.report.curves import AXES
from zdp_bench.report.figures import COLOURS, LINES, WIDTH
from zdp_bench.report.tables import file_stem

HEIGHT = 2.6  # inches a row of panels
NON_PRIVATE = "0.45"  # grey: a line to measure the others by


def panels(name: str, results: Path, columns: int | None = None) -> Figure:
    """The curves of PAPER/figN, one colour and line style for each label in all panels.

    Args:
        columns: panels in a row; all by default.

    Raises:
        UserError: the table has not been made, or holds no point.
    """
    path = results / "tables" / f"{file_stem(name)}.csv"
    if not path.exists():
        raise UserError(
            f"{path}: not there. Make it with `zdp-bench table {name} --results {results}`."
        )
    points = pd.read_csv(path, keep_default_na=False, dtype={"values": str, "panel": str})
    if points.empty:
        raise UserError(
            f"{path}: holds no point yet. `zdp-bench table {name}` names the runs it lacks."
        )
    named = list(dict.fromkeys(points["panel"]))
    titles = [
        title
        for title in named
        if not any(other != title and other.endswith(title) for other in named)
    ]
    spent = (
        points[["epsilon_claimed", "epsilon_tight"]].astype(float).min(axis=1)
    )  # claimed and not there is no 'non-private'
    private = list(dict.fromkeys(points.loc[spent < float("inf"), "curve"]))
    style = {
        label: (COLOURS[i % len(COLOURS)], LINES[i % len(LINES)]) for i, label in enumerate(private)
    }
    columns = min(columns or len(titles), len(titles))
    rows = -(-len(titles) // columns)
    figure = Figure(figsize=(WIDTH, HEIGHT * rows + 0.5))
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes, title in zip(grid.flat, titles, strict=False):
        in_panel = points[[title.endswith(panel) for panel in points["panel"]]]
        for label, curve in in_panel.groupby("curve", sort=False):
            colour, line = style.get(str(label), (NON_PRIVATE, "-"))
            none = label in style and curve["epsilon_tight"].astype(float).min() == float("inf")
            _curve(axes, curve, f"{label}, tight ε = ∞" if none else str(label), colour, line)
        axes.set_title(title)
        if AXES[name].log:
            axes.set_xscale("log")
            every_x = sorted(set(points["x"].astype(float)))
            axes.set_xticks(every_x, [f"{x:g}" for x in every_x])
            axes.minorticks_off()
    for axes in grid[-1]:
        axes.set_xlabel(AXES[name].label)
    for axes in grid[:, 0]:
        axes.set_ylabel(
            f"test {points['metric'].iloc[0].replace('_', ' ')}"
            + (", %" if points["unit"].iloc[0] == "%" else "")
        )
    for axes in grid.flat[len(titles) :]:
        axes.set_visible(False)
    handles = {
        label: handle
        for axes in grid.flat
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=min(4, len(handles))
    )
    return figure


def _curve(axes: Axes, curve: pd.DataFrame, label: str, colour: str, line: str) -> None:
    """Mean over seeds, and a band from the least to the largest."""
    seeds = curve["values"].str.split().map(lambda words: [float(word) for word in words])
    x, marker = curve["x"].astype(float), "o" if len(curve) < 16 else ""
    axes.plot(
        x,
        seeds.map(lambda v: sum(v) / len(v)),
        line,
        color=colour,
        label=label,
        marker=marker,
        markersize=3,
    )
    if seeds.map(len).max() > 1:
        axes.fill_between(x, seeds.map(min), seeds.map(max), color=colour, alpha=0.2, linewidth=0)
