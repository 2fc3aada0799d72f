"""Draws every figure of curves from the CSV that `zdp-bench table PAPER/figN` writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd
from matplotlib import axes as mpl_axes
from matplotlib.figure import Figure

from zdp_bench.errors import UserError
from zdp_bench.registry import register
from zdp_bench.report import papers
from zdp_bench.report.curves import panels_of
from zdp_bench.report.figures import COLOURS, LINES, WIDTH, legend_below

HEIGHT = 2.6  # inches a row of panels
NON_PRIVATE = "0.45"  # grey: a line to measure the others by


def panels(name: str, results: Path) -> Figure:
    """Draw the curves of PAPER/figN, one colour and line style for each label in all panels.

    Raises:
        UserError: the table has not been made, or holds no point.
    """
    path = results / "tables" / f"{papers.file_stem(name)}.csv"
    if not path.exists():
        raise UserError(
            f"{path}: not there. Make it with `zdp-bench table {name} --results {results}`."
        )
    points = pd.read_csv(path, keep_default_na=False, dtype={"values": str, "panel": str})
    if points.empty:
        raise UserError(
            f"{path}: holds no point yet. `zdp-bench table {name}` names the runs it lacks."
        )
    of, titles = papers.axes(name), panels_of(points["panel"])
    # A curve that claims an ε but has none is still a private one.
    spent = points[["epsilon_claimed", "epsilon_tight"]].astype(float).min(axis=1)
    private = points.loc[spent < float("inf"), "curve"].unique()
    style = {
        label: (COLOURS[i % len(COLOURS)], LINES[i % len(LINES)]) for i, label in enumerate(private)
    }
    columns = min(of.columns or len(titles), len(titles))
    rows = -(-len(titles) // columns)
    figure = Figure(figsize=(WIDTH, HEIGHT * rows + 0.5))
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes, title in zip(grid.flat, titles, strict=False):
        in_panel = points[[title.endswith(panel) for panel in points["panel"]]]
        for label, curve in in_panel.groupby("curve", sort=False):
            colour, line = style.get(str(label), (NON_PRIVATE, "-"))
            none = label in style and curve["epsilon_tight"].astype(float).min() == float("inf")
            _draw_curve(axes, curve, f"{label}, tight ε = ∞" if none else str(label), colour, line)
        axes.set_title(title)
        if of.log:
            axes.set_xscale("log")
            every_x = sorted(set(points["x"].astype(float)))
            axes.set_xticks(every_x, [f"{x:g}" for x in every_x])
            axes.minorticks_off()
    for axes in grid[-1]:
        axes.set_xlabel(of.label)
    unit = ", %" if points["unit"].iloc[0] == "%" else ""
    for axes in grid[:, 0]:
        axes.set_ylabel(f"test {points['metric'].iloc[0].replace('_', ' ')}{unit}")
    for axes in grid.flat[len(titles) :]:
        axes.set_visible(False)
    legend_below(figure)
    return figure


def _draw_curve(
    axes: mpl_axes.Axes, curve: pd.DataFrame, label: str, colour: str, line: str
) -> None:
    """Mean over seeds, and a band from the least to the largest."""
    seeds = curve["values"].str.split().map(lambda words: [float(word) for word in words])
    x, marker = curve["x"].astype(float), "o" if len(curve) < 16 else ""
    mean = seeds.map(lambda v: sum(v) / len(v))
    axes.plot(x, mean, line, color=colour, label=label, marker=marker, markersize=3)
    if seeds.map(len).max() > 1:
        axes.fill_between(x, seeds.map(min), seeds.map(max), color=colour, alpha=0.2, linewidth=0)


def _builder(name: str) -> Callable[[Path, Path], Figure]:
    def draw(results: Path, data_root: Path) -> Figure:
        return panels(name, results)

    draw.__doc__ = papers.axes(name).title
    return draw


for _name in filter(papers.is_figure, papers.available()):
    register("figure", _name)(_builder(_name))
