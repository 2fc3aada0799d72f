"""Draws your own runs: a metric against any column of a record or key of the configuration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from zdp_bench import records
from zdp_bench.errors import UserError, unknown
from zdp_bench.report import figures, names, results

LOG_X, LOG_Y = 8, 30  # a positive axis over this factor or more is logarithmic
SERIES = len(figures.COLOURS)  # a reader distinguishes no more


@dataclass(frozen=True)
class Drawing:
    """A figure, and what its reader must know beside it."""

    figure: Figure
    notes: tuple[str, ...]


def draw(folder: Path, filters: list[str], x: str, metric: str, by: Sequence[str]) -> Drawing:
    """Draw the metric of the records that pass every filter, a curve for each value of `by`.

    A point is the mean of all runs at one x, with a band from the least to the largest. Where these
    differ in more than their seed, the series is its single runs, without a line. Runs at infinite
    x, such as an ε without protection, are a line across.

    Args:
        filters: column=value, as `zdp-bench results` takes them.
        x: a column of records.csv or a key of the configuration.
        metric: one of a run; runs without it are not drawn.
        by: columns or keys.

    Raises:
        UserError: no record passes; x, metric or `by` is not known; x is not a number; or `by` has
            more than `SERIES` values.
    """
    found = records.read_all(folder)
    measured = {name for run in found for name in run["metrics"]}
    frame, keys = results.read_frame(found)
    if frame.empty:
        raise UserError(f"{folder}: contains no records to draw.")
    frame = results.keep(frame, filters)
    if metric not in measured:
        raise unknown("--y", metric, measured)
    x, by = results.find(x, frame, "--x"), [results.find(one, frame, "--by") for one in by]
    y = pd.to_numeric(frame[metric], errors="coerce").replace([math.inf, -math.inf], math.nan)
    frame = frame.assign(x=_numbers(frame, x), y=y * names.scale(metric))
    drawn = frame.dropna(subset="y").copy()
    if drawn.empty:
        raise UserError(f"--y {metric}: is a finite number in none of these runs.")
    drawn["series"] = [
        ", ".join(results.cell(key, row[key]) or "none" for key in by)
        for _, row in drawn.iterrows()
    ]
    if (many := drawn["series"].nunique()) > SERIES:
        raise UserError(
            f"--by {','.join(by)}: has {many} values, and a figure shows {SERIES}. Choose another "
            "column, or draw fewer runs: --runs COLUMN=VALUE."
        )
    settings = [key for key in keys if key not in ("seed", "recipe", x, *by)]
    mixed: dict[str, dict[str, None]] = {label: {} for label in drawn["series"]}
    for (label, _), same in drawn.groupby(["series", "x"]):
        mixed[str(label)] |= dict.fromkeys(results.differing(same, settings))
    notes = []
    if others := {key: None for keys in mixed.values() for key in keys}:
        notes = [f"Points of one colour also differ in {', '.join(others)}; --by separates them."]
    if left_out := len(frame) - len(drawn):
        notes.append(f"Not drawn: {left_out} runs without a finite {metric}.")
    with mpl.rc_context(figures.STYLE):
        figure = _draw(drawn, {label for label, keys in mixed.items() if keys}, metric)
        figure.axes[0].set_xlabel(x.replace("_", " "))
        figures.lay_out(figure, "Draw fewer runs: --runs COLUMN=VALUE")
    return Drawing(figure, tuple(notes))


def _numbers(frame: pd.DataFrame, x: str) -> pd.Series:
    """Return the column x as numbers.

    Raises:
        UserError: it is not a number in a run.
    """
    numbers = pd.to_numeric(frame[x], errors="coerce")
    if numbers.isna().any():
        lacking = frame[x][numbers.isna()].iloc[0]
        raise UserError(
            f"--x {x}: is {lacking} in a run, not a number. Choose another, or exclude such runs: "
            f"--runs {x}=VALUE."
        )
    if x.startswith("epsilon_"):  # noise that is calibrated to an ε hits it to three digits
        return numbers.map(lambda number: float(f"{number:.3g}"))
    return numbers


def _draw(drawn: pd.DataFrame, mixed: set[str], metric: str) -> Figure:
    """Draw the columns x, y and series; of the series in `mixed`, single runs."""
    figure = Figure(figsize=(figures.WIDTH, 0.6 * figures.WIDTH))
    axes = figure.subplots()
    finite = drawn[drawn["x"] < math.inf]
    every_x = sorted(finite["x"].unique())
    for place, (label, runs) in enumerate(drawn.groupby("series")):
        style = figures.curve_style(place)
        within = finite[finite["series"] == label]
        if label in mixed and len(within):
            axes.plot(within["x"], within["y"], label=label, **style | {"linestyle": ""})
        elif len(within):
            of = {x: [*values] for x, values in within.groupby("x")["y"]}
            figures.draw_mean(axes, every_x, [of.get(x, []) for x in every_x], label=label, **style)
        if len(across := runs[runs["x"] == math.inf]["y"]):
            line = {"linestyle": figures.REFERENCE["linestyle"], "linewidth": 0.9}
            axes.axhline(across.mean(), label=f"{label}, ∞", color=style["color"], **line)
    figures.spread(axes, every_x, LOG_X)
    if not every_x:
        axes.set_xticks([])
    least, most = drawn["y"].min(), drawn["y"].max()
    if least > 0 and most >= LOG_Y * least and not names.unit(metric):
        axes.set_yscale("log")
    axes.set_ylabel(names.axis(metric))
    counts = drawn[~drawn["series"].isin(mixed)].groupby(["series", "x"]).size()
    figures.legend_below(figure, figures.say_runs([*counts, *[1] * bool(mixed)]))
    return figure
