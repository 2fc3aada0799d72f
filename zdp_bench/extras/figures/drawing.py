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
    titles, curves = ([*dict.fromkeys(points[of])] for of in ("panel", "curve"))
    columns = min(columns, len(titles))
    rows = -(-len(titles) // columns)
    figure = Figure(figsize=(WIDTH, 2.6 * rows + 0.8))
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(titles) :]:
        axes.set_visible(False)
    for of in (mean, min, max):
        reduced = [of(values) if values else math.nan for values in points["values"]]
        points = points.assign(**{of.__name__: reduced})
    for axes, title in zip(grid.flat, titles, strict=False):
        panel = points[points["panel"] == title]
        every_x = sorted({x for x in panel["x"] if x < math.inf})
        for label, curve in panel.groupby("curve", sort=False):
            _draw_curve(axes, curve, every_x, str(label), curve_style(curves.index(label)))
        axes.set_title(title)
        axes.set(xlabel=x_label, ylabel=panel["y"].iloc[0])
        if log:
            axes.set_xscale("log")
        if log and len(every_x) <= MANY:
            axes.set_xticks(every_x, [f"{x:.4g}" for x in every_x])
            axes.minorticks_off()
    across = f"; dotted: {x_label} = ∞" if (points["x"] == math.inf).any() else ""
    _add_legend(figure, say_runs(n for n in points["values"].map(len) if n) + across)
    return figure


def _draw_curve(
    axes: Axes, curve: pd.DataFrame, every_x: list[float], label: str, style: dict[str, Any]
) -> None:
    inside = curve[curve["x"] < math.inf].set_index("x").sort_index()
    for height in curve.loc[curve["x"] == math.inf, "mean"]:
        only = label if inside.empty else None
        axes.axhline(height, color=style["color"], linewidth=0.9, linestyle=":", label=only)
    if inside.empty:
        return
    if len(every_x) > MANY:
        style["marker"] = ""
    else:
        inside = inside.reindex(every_x)
    if inside["mean"].notna().any():
        axes.plot(inside.index, inside["mean"], label=label, **style)
    if (inside["max"] > inside["min"]).any():
        band = {"color": style["color"], "alpha": 0.2, "linewidth": 0}
        axes.fill_between(inside.index, inside["min"], inside["max"], **band)
    if "printed" in inside and inside["printed"].notna().any():
        mark = dict(style, color=PRINTED, marker=style["marker"] or "*", linestyle="", zorder=3)
        axes.plot(inside.index, inside["printed"], label="printed", **mark)


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
    least, most = min(found := list(counts)), max(found)
    if most == 1:
        return "each point: one seed (n = 1)"
    number = f"n = {most}" if least == most else f"n = {least} to {most}"
    return f"each point: the mean over seeds ({number}), with a band from the least to the largest"


def _add_legend(figure: Figure, says: str) -> None:
    """Give a figure one legend, below it, with every label of its axes once, and a sentence."""
    handles = {
        label: handle
        for axes in figure.axes
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    columns = max(1, min(4, len(handles), 80 // (8 + max(map(len, handles)))))
    figure.set_figheight(figure.get_figheight() + 0.2 * -(-len(handles) // columns))
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=columns, title=says
    )


def write(figure: Figure, name: str, results: Path) -> list[Path]:
    """Write `results/figures/PAPER_figN.png`, `.svg` and `.pdf`."""
    paths = [results / "figures" / f"{name.replace('/', '_')}{suffix}" for suffix in METADATA]
    for path in paths:
        save(figure, path)
    return paths


def save(figure: Figure, path: Path) -> None:
    """Write a figure, whole or not at all, the same bytes each time."""
    if path.suffix not in METADATA:
        raise UserError(f"{path}: a figure ends in {', '.join(METADATA)}.")
    drawn = BytesIO()
    with mpl.rc_context(STYLE):
        figure.savefig(drawn, format=path.suffix[1:], metadata=METADATA[path.suffix])
    write_changed(path, drawn.getvalue())
