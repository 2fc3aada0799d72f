"""Draws every figure of curves from the CSV that `zdp-bench table PAPER/figN` writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from zdp_bench import records
from zdp_bench.errors import UserError
from zdp_bench.registry import register
from zdp_bench.report import names, papers
from zdp_bench.report.curves import panels_of
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
    style = {label: curve_style(place) for place, label in enumerate(private)}
    every_x = sorted(set(points["x"].astype(float)))
    metric = str(points["metric"].iloc[0])
    references = _References(results, metric)
    columns = min(of.columns or len(titles), len(titles))
    rows = -(-len(titles) // columns)
    figure = Figure(figsize=(WIDTH, HEIGHT * rows + 0.6))
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes, title in zip(grid.flat, titles, strict=False):
        in_panel = points[[title.endswith(panel) for panel in points["panel"]]]
        for value in references.of(in_panel):
            axes.axhline(value, label="non-private", **REFERENCE)
        for label, curve in in_panel.groupby("curve", sort=False):
            drawn = style.get(str(label), {"color": NON_PRIVATE, "linestyle": "-"})
            none = label in style and curve["epsilon_tight"].astype(float).min() == float("inf")
            _draw_curve(
                axes,
                curve,
                every_x if of.x != "epoch" else sorted(curve["x"].astype(float)),
                {**drawn, "label": f"{label}, tight ε = ∞" if none else str(label)},
            )
        axes.set_title(title)
        if of.log:
            axes.set_xscale("log")
            log_ticks(axes.xaxis, every_x)
    for axes in grid[:, 0]:
        axes.set_ylabel(names.axis(metric))
    for axes in grid.flat[len(titles) :]:
        axes.set_visible(False)
    for axes in grid.flat[: len(titles)][-columns:]:  # nothing is drawn below these
        axes.set_xlabel(of.label)
        axes.tick_params(labelbottom=True)
    legend_below(figure, say_runs(points["values"].str.split().map(len)))
    return figure


def _draw_curve(
    axes: Axes, curve: pd.DataFrame, every_x: list[float], style: dict[str, Any]
) -> None:
    """Draw a curve at every x of the figure; where it has no point there is a gap.

    At epochs, of which a figure has many, each curve has its own.
    """
    by_x = dict(zip(curve["x"].astype(float), curve["values"].str.split(), strict=True))
    seeds = [[float(word) for word in by_x.get(x, [])] for x in every_x]
    draw_mean(axes, every_x, seeds, **style | ({"marker": ""} if len(by_x) > 15 else {}))


class _References:
    """What training without protection reaches, for the curves that have no such curve beside them.

    The same network, data and epochs; the mean over seeds.
    """

    def __init__(self, results: Path, metric: str) -> None:
        self._metric = metric
        self._every = records.read_all(results)
        self._runs = {run["run"][:16]: run for run in self._every}

    def of(self, panel: pd.DataFrame) -> list[float]:
        """Return the value for each setting in a panel; none if the panel shows it as a curve."""
        if (panel["epsilon_claimed"].astype(float) == float("inf")).any():
            return []
        known = [self._runs[run] for word in panel["runs"] for run in word.split()[:1]
                 if run in self._runs]  # fmt: skip
        found = {repr(non_private.setting(run)): run for run in known}
        values = [non_private.values(run, self._every, self._metric) for run in found.values()]
        return [mean(of) * names.scale(self._metric) for of in values if of]


def _builder(name: str) -> Callable[[Path, Path], Figure]:
    def draw(results: Path, data_root: Path) -> Figure:
        return panels(name, results)

    number = papers.reference(name)[0]
    figure = number.table.removeprefix("fig")
    draw.__doc__ = f"{number.paper}, Figure {figure}: {papers.axes(name).title}"
    return draw


for _name in filter(papers.is_figure, papers.available()):
    register("figure", _name)(_builder(_name))
