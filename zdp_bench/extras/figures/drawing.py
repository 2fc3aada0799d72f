"""Draws panels of curves in one style, and saves a figure as the same bytes each time.

The colours are Okabe and Ito's (2008), which colour-blind readers tell apart, with wine for yellow;
with their line styles, the first four also work in grey print.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib as mpl
import pandas as pd
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from zdp_bench.disk import write_changed
from zdp_bench.errors import UserError

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#882255")
PRINTED = "#000000"  # of the numbers that a paper prints, whichever curve they are of
LINES = ("-", "--", "-.", ":", "-", "--", "-.", ":")
MARKERS = "osD^v<>P"
WIDTH = 6.3  # inches: the text width of an A4 page
MANY = 12  # points of a curve: more have no marks, and not each has its tick

# Of each format, what would make two files of one figure differ.
METADATA: dict[str, dict[str, None]] = {
    ".png": {"Software": None},
    ".svg": {"Date": None, "Creator": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}

STYLE: dict[Any, Any] = {
    "axes.prop_cycle": cycler(color=COLOURS) + cycler(linestyle=LINES),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 9,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "font.size": 9,
    "legend.frameon": False,
    "legend.title_fontsize": 7.5,
    "figure.constrained_layout.use": True,
    "image.cmap": "gray",
    "savefig.dpi": 200,
    "pdf.fonttype": 42,  # fonts that journals take
    "svg.hashsalt": "zdp-bench",  # the same figure is the same file, byte for byte
    "svg.fonttype": "none",  # text stays text
}


def draw_panels(
    points: pd.DataFrame,
    x_label: str,
    *,
    columns: int = 2,
    log: bool = False,
) -> Figure:
    """Draw a panel for each `panel` of the points, and in it a line for each `curve`.

    A point is the mean of its values, with a band from the least to the largest. Where a curve
    lacks an x of its panel there is a gap; its value at infinite x is a dotted line across.

    Args:
        points: columns panel, curve, x, values (a list) and y (the label of the axis), and perhaps
            `printed`, a paper's numbers: black, with the mark of their curve.
        log: x is logarithmic.
    """
    titles = list(dict.fromkeys(points["panel"]))
    curves = list(dict.fromkeys(points["curve"]))
    columns = min(columns, len(titles))
    rows = math.ceil(len(titles) / columns)
    figure = Figure(figsize=(WIDTH, 2.6 * rows + 0.8))
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(titles) :]:
        axes.set_visible(False)
    numbers = points["values"].map(lambda values: values or [math.nan])
    points = points.assign(mean=numbers.map(mean), min=numbers.map(min), max=numbers.map(max))
    for axes, title in zip(grid.flat, titles, strict=False):
        panel = points[points["panel"] == title]
        every_x = sorted({x for x in panel["x"] if x < math.inf})
        for label, curve in panel.groupby("curve", sort=False):
            style = curve_style(curves.index(label))
            _draw_curve(axes, curve, every_x, str(label), style)
        axes.set_title(title)
        axes.set(xlabel=x_label, ylabel=panel["y"].iloc[0])
        if log:
            axes.set_xscale("log")
        if log and len(every_x) <= MANY:
            axes.set_xticks(every_x, [f"{x:.4g}" for x in every_x])
            axes.minorticks_off()
    counts = points["values"].map(len)
    note = say_runs(counts[counts > 0])
    if (points["x"] == math.inf).any():
        note += f"; dotted: {x_label} = ∞"
    _add_legend(figure, note)
    return figure


def _draw_curve(
    axes: Axes,
    curve: pd.DataFrame,
    every_x: list[float],
    label: str,
    style: dict[str, Any],
) -> None:
    is_finite = curve["x"] < math.inf
    finite = curve[is_finite].set_index("x").sort_index()
    for height in curve.loc[~is_finite, "mean"]:
        axes.axhline(
            height,
            color=style["color"],
            linewidth=0.9,
            linestyle=":",
            label=label if finite.empty else None,
        )
    if finite.empty:
        return
    if len(every_x) > MANY:
        style["marker"] = ""
    else:
        finite = finite.reindex(every_x)
    if finite["mean"].notna().any():
        axes.plot(finite.index, finite["mean"], label=label, **style)
    if (finite["max"] > finite["min"]).any():
        axes.fill_between(
            finite.index,
            finite["min"],
            finite["max"],
            color=style["color"],
            alpha=0.2,
            linewidth=0,
        )
    if "printed" in finite and finite["printed"].notna().any():
        printed_style = style | {
            "color": PRINTED,
            "marker": style["marker"] or "*",
            "linestyle": "",
            "zorder": 3,
        }
        axes.plot(finite.index, finite["printed"], label="printed", **printed_style)


def curve_style(place: int) -> dict[str, Any]:
    """Return how the curve of a place is drawn: later ones above, thinner, their marks as rings."""
    return {
        "color": COLOURS[place % len(COLOURS)],
        "linestyle": LINES[place % len(LINES)],
        "linewidth": max(0.9, 2.6 - 0.5 * place),
        "marker": MARKERS[place % len(MARKERS)],
        "markersize": 3 + 0.9 * place,
        "markerfacecolor": "none" if place else COLOURS[0],
        "zorder": 2 + 0.01 * place,
    }


def say_runs(counts: Iterable[int]) -> str:
    """'each point: the mean of 1 to 3 seeds, with a band from the least to the largest'."""
    counts = list(counts)
    least, most = min(counts), max(counts)
    if most == 1:
        return "each point: one seed (n = 1)"
    number = f"n = {most}" if least == most else f"n = {least} to {most}"
    return f"each point: the mean over seeds ({number}), with a band from the least to the largest"


def _add_legend(figure: Figure, title: str) -> None:
    """Give a figure one legend, below it, with every label of its axes once, and a sentence."""
    handle_of: dict[Any, Any] = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        handle_of |= dict(zip(labels, handles, strict=True))
    longest = max(map(len, handle_of))
    fitting = 80 // (8 + longest)
    columns = max(1, min(4, len(handle_of), fitting))
    rows = math.ceil(len(handle_of) / columns)
    figure.set_figheight(figure.get_figheight() + 0.2 * rows)
    figure.legend(
        list(handle_of.values()),
        list(handle_of),
        loc="outside lower center",
        ncols=columns,
        title=title,
    )


def write(
    figure: Figure,
    name: str,
    results: Path,
) -> list[Path]:
    """Write `results/figures/PAPER_figN.png`, `.svg` and `.pdf`; return their paths."""
    stem = name.replace("/", "_")
    paths = [results / "figures" / f"{stem}{suffix}" for suffix in METADATA]
    for path in paths:
        save(figure, path)
    return paths


def save(figure: Figure, path: Path) -> None:
    """Write a figure, whole or not at all, the same bytes each time.

    Raises:
        UserError: the path ends in no format that figures are saved in.
    """
    if path.suffix not in METADATA:
        raise UserError(f"{path}: a figure ends in {', '.join(METADATA)}.")
    buffer = BytesIO()
    with mpl.rc_context(STYLE):
        figure.savefig(
            buffer,
            format=path.suffix[1:],
            metadata=METADATA[path.suffix],
        )
    write_changed(path, buffer.getvalue())
