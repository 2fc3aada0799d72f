"""Draws every figure of curves of the papers, our tables, and printed against tight ε."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from zdp_bench import records
from zdp_bench.errors import UserError
from zdp_bench.records import Record
from zdp_bench.registry import register
from zdp_bench.report import names, papers
from zdp_bench.report.figures import (
    MARKERS,
    REFERENCE,
    WIDTH,
    curve_style,
    draw_mean,
    legend_below,
    log_ticks,
    say_runs,
)

GREY = "0.45"  # of a line to measure the others by
NON_PRIVATE = "sgd"
MANY = 15  # points of a curve: more have no marks


def read_table(path: Path, command: str) -> pd.DataFrame:
    """Return a CSV of `results/tables`; cells that are no numbers stay as they are written.

    Raises:
        UserError: it has not been made; says the command.
    """
    if not path.exists():
        raise UserError(f"{path}: not found. Create it with `{command}`.")
    return pd.read_csv(path, keep_default_na=False, dtype={"values": str, "panel": str})


def make_grid(
    count: int, columns: int, row: float, legend: float, share: bool = False
) -> tuple[Figure, np.ndarray]:
    """Return a figure of `count` panels and its grid; heights of a row and legend in inches."""
    rows = -(-count // columns)
    figure = Figure(figsize=(WIDTH, row * rows + legend))
    grid = figure.subplots(rows, columns, sharex=share, sharey=share, squeeze=False)
    for axes in grid.flat[count:]:
        axes.set_visible(False)
    return figure, grid


def unprotected(run: Record, every: Sequence[Record], metric: str) -> list[float]:
    """Return the metric of every run without protection of a run's network, data and epochs."""
    return [
        other["metrics"][metric]
        for other in every
        if records.get(other, "config.algorithm.name") == NON_PRIVATE
        and _setting(other) == _setting(run)
        and metric in other["metrics"]
    ]


def _setting(run: Record) -> list[Any]:
    return [records.get(run, at) for at in ("config.model", "data.digest", "config.trainer.epochs")]


# ------------------------------------------------------------------------- the papers' own figures


def panels(name: str, results: Path) -> Figure:
    """Draw the curves of PAPER/figN, one colour and line style for each label in all panels.

    Raises:
        UserError: the table has not been made, or holds no curve as published.
    """
    path = results / "tables" / f"{papers.file_stem(name)}.csv"
    points = read_table(path, f"zdp-bench table {name} --write --results {results}")
    points = points[points["x"] != ""].copy()
    if not (points["status"] == "as published").any():
        raise UserError(
            f"{path}: none of the paper's curves was run as published, so nothing is drawn as its "
            f"figure. `zdp-bench table {name}` shows what was run and what it lacks."
        )
    spent = points[["epsilon_claimed", "epsilon_tight"]].astype(float)
    points[spent.columns], points["x"] = spent, points["x"].astype(float)
    points.loc[points.duplicated(["row", "x"]), "paper"] = ""  # a variant shows no number again
    of, titles = papers.axes(name), panels_of(points["panel"])
    # A curve that claims an ε but has none is still a private one.
    private = points.loc[spent.min(axis=1) < math.inf, "curve"].unique()
    style = {label: curve_style(place) for place, label in enumerate(private)}
    every_x = sorted(set(points["x"]))
    metric = str(points["metric"].iloc[0])
    every = records.read_all(results)
    columns = min(of.columns or len(titles), len(titles))
    figure, grid = make_grid(len(titles), columns, 2.6, 0.6, share=True)
    for axes, title in zip(grid.flat, titles, strict=False):
        in_panel = points[[title.endswith(panel) for panel in points["panel"]]]
        for value in _references(in_panel, every, metric):
            axes.axhline(value, label="non-private", **REFERENCE)
        for label, curve in in_panel.groupby("curve", sort=False):
            drawn = style.get(str(label), {"color": GREY, "linestyle": "-"})
            none = label in style and curve["epsilon_tight"].min() == math.inf
            _draw_curve(
                axes,
                curve,
                every_x if of.x != "epoch" else sorted(curve["x"]),
                {**drawn, "label": f"{label}, tight ε = ∞" if none else str(label)},
            )
        axes.set_title(title)
        if of.log:
            axes.set_xscale("log")
            log_ticks(axes.xaxis, every_x)
    for axes in grid[:, 0]:
        axes.set_ylabel(names.axis(metric))
    for axes in grid.flat[: len(titles)][-columns:]:  # nothing is drawn below these
        axes.set_xlabel(of.label)
        axes.tick_params(labelbottom=True)
    legend_below(figure, say_runs(points["values"].str.split().map(len)))
    return figure


def panels_of(names: Iterable[str]) -> list[str]:
    """Return the distinct names that no other name ends with; the rest are parts of panels."""
    distinct = list(dict.fromkeys(names))
    return [
        name
        for name in distinct
        if not any(other != name and other.endswith(name) for other in distinct)
    ]


def _draw_curve(
    axes: Axes, curve: pd.DataFrame, every_x: list[float], style: dict[str, Any]
) -> None:
    """Draw a curve at every x of the figure, and stars where the paper's text gives a number.

    Where it has no point there is a gap. At epochs, of which a figure has many, each curve has its
    own.
    """
    by_x = dict(zip(curve["x"], curve["values"].str.split(), strict=True))
    seeds = [[float(word) for word in by_x.get(x, [])] for x in every_x]
    draw_mean(axes, every_x, seeds, **style | ({"marker": ""} if len(by_x) > MANY else {}))
    printed = pd.to_numeric(curve["paper"], errors="coerce")  # '>45' is no point
    if printed.notna().any():
        axes.plot(curve["x"], printed, "*", color=style["color"], markersize=7, label="printed")


def _references(panel: pd.DataFrame, every: Sequence[Record], metric: str) -> list[float]:
    """Return what training without protection reaches, for each setting in a panel.

    The mean over seeds; none if the panel shows it as a curve.
    """
    if (panel["epsilon_claimed"] == math.inf).any():
        return []
    runs = {run["run"][:16]: run for run in every}
    shown = [runs[word.split()[0]] for word in panel["runs"] if word.split()[0] in runs]
    settings = {repr(_setting(run)): run for run in shown}
    values = [unprotected(run, every, metric) for run in settings.values()]
    return [mean(of) * names.scale(metric) for of in values if of]


def _builder(name: str) -> Callable[[Path], Figure]:
    def draw(results: Path) -> Figure:
        return panels(name, results)

    number = papers.reference(name)[0]
    figure = number.table.removeprefix("fig")
    draw.__doc__ = f"{number.paper}, Figure {figure}: {papers.axes(name).title}"
    return draw


for _name in filter(papers.is_figure, papers.available()):
    register("figure", _name)(_builder(_name))


# ------------------------------------------------------------------------------------- our figures


def draw_grid(name: str, results: Path) -> Figure:
    """Draw a table of our own against ε: what is kept in one panel, or a panel for each row.

    Raises:
        UserError: the table has not been made.
    """
    path = results / "tables" / f"{name}.csv"
    points = read_table(path, f"zdp-bench table {name} --write --results {results}")
    kept = bool(papers.ours()[name].get("kept"))
    groups = [("", points)] if kept else list(points.groupby("row", sort=False))
    figure, grid = make_grid(len(groups), min(2, len(groups)), 3.2 if kept else 2.8, 0.5)
    labels = list(points["row" if kept else "variant"].unique())
    for axes, (title, panel) in zip(grid.flat, groups, strict=False):
        metric = str(panel["metric"].iloc[0])
        targets = sorted({x for x in panel["target_epsilon"].astype(float) if x < math.inf})
        for label, curve in panel.groupby("row" if kept else "variant", sort=False):
            of = dict(
                zip(curve["target_epsilon"].astype(float), curve.to_dict("records"), strict=True)
            )
            style = curve_style(labels.index(label))
            if kept:
                # Nothing is known of what is kept before the non-private runs are there.
                shares = [of[x]["kept"] if x in of else "" for x in targets]
                seeds = [[100 * float(share)] if share else [] for share in shares]
            else:
                scale = names.scale(metric)
                seeds = [_values(of[x], scale) if x in of else [] for x in targets]
                if math.inf in of:
                    open_mean = mean(_values(of[math.inf], scale))
                    if not any(seeds):
                        axes.axhline(open_mean, label=names.algorithm(str(label)), **REFERENCE)
                        continue
                    axes.axhline(open_mean, color=style["color"], linewidth=0.7, linestyle=":")
            draw_mean(axes, targets, seeds, label=names.algorithm(str(label)), **style)
        axes.set_title(title)
        axes.set_xscale("log")
        log_ticks(axes.xaxis, targets)
        axes.set_xlabel("tight ε")
        axes.set_ylabel("share of the non-private score kept, %" if kept else names.axis(metric))
    dotted = "" if kept else "\ndotted lines: non-private"
    said = "each point: the mean over seeds" if kept else say_runs(points["n"].astype(int)) + dotted
    legend_below(figure, said)
    return figure


def _values(row: dict[Hashable, Any], scale: float) -> list[float]:
    """Return the seeds' values of a line of a grid's CSV."""
    return [scale * float(word) for word in str(row["values"]).split()]


def _grid_builder(name: str) -> Callable[[Path], Figure]:
    def draw(results: Path) -> Figure:
        return draw_grid(name, results)

    draw.__doc__ = f"{papers.ours()[name]['title']}, against ε."
    return draw


for _name in papers.ours():
    register("figure", _name)(_grid_builder(_name))


@register("figure", "epsilon")
def printed_against_tight(results: Path) -> Figure:
    """Every finite printed ε of the five papers against the tight ε of its mechanism, log-log."""
    from zdp_bench.report import epsilon  # with all accountants

    path = results / "tables" / "epsilon.csv"
    if not path.exists():
        epsilon.sheet(epsilon.rows()).write(path.with_suffix(""))
    claims = read_table(path, "zdp-bench epsilon")
    for column in ("printed", "tight"):
        claims[column] = pd.to_numeric(claims[column], errors="coerce")
    finite = claims[(claims["printed"] > 0) & claims["tight"].between(0, math.inf, "neither")]
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
    both = finite[["printed", "tight"]].to_numpy()
    ends = [both.min() / 1.5, both.max() * 1.5]
    axes.plot(ends, ends, color="0.4", linewidth=1, linestyle="-", label="as printed")
    axes.set(
        xscale="log",
        yscale="log",
        xlim=ends,
        ylim=ends,
        xlabel="ε as the paper prints it",
        ylabel="ε tight, of the mechanism as described",
    )
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    # Said here, where no point can lie.
    unbounded = int((claims["tight"] == math.inf).sum())
    not_drawn = f"\nnot drawn: {unbounded} claims whose tight ε is ∞" if unbounded else ""
    axes.set_title(f"Above the line, a run has spent more than its paper says{not_drawn}")
    axes.legend(loc="lower right")
    return figure
