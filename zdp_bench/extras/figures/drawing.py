"""Draw panels of curves in one style, and save figures reproducibly, byte for byte.

The colours are those of Okabe and Ito (2008), which colour-blind readers can distinguish, with wine
instead of yellow. With their line styles, the first four are also distinct in greyscale.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable
from io import BytesIO
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib as mpl
import pandas as pd
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from zdp_bench.disk import write_changed
from zdp_bench.errors import UserError

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#882255")
PRINTED = "#000000"  # colour of the numbers that a paper prints, in all curves
LINES = ("-", "--", "-.", ":", "-", "--", "-.", ":")
MARKERS = "osD^v<>P"
WIDTH = 6.3  # inches, the text width of an A4 page
MAX_MARKED = 12  # longer curves have no markers, and no tick at each point
MAX_NAMED = 3  # points that are not drawn
LINE = 100  # characters of the note below the panels

# The metadata of each format that would make two files of the same figure differ.
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
    "pdf.fonttype": 42,  # TrueType, which journals accept
    "svg.hashsalt": "zdp-bench",  # fixed, so that the same figure gives the same file
    "svg.fonttype": "none",  # text stays text, rather than paths
    "text.parse_math": False,  # names may have dollar signs, and may be a stranger's
}


def show_number(number: float) -> str:
    """Return a number with four digits."""
    return f"{number:.4g}".replace("inf", "∞")


def draw_panels(
    points: pd.DataFrame,
    x_label: str,
    *,
    columns: int = 2,
    log: bool = False,
    averaged: str = "seeds",
    show_x: Callable[[float], str] = show_number,
) -> Figure:
    """Draw one panel for each value of `panel`, with one line for each value of `curve`.

    A point is the mean of its values, with a band from the smallest to the largest value. If one of
    them is not finite, the point is not drawn, and the note below the panels names it. A value at
    infinite x is drawn as a dotted horizontal line. If a panel has few x (`MAX_MARKED`), and a
    curve lacks one of them, the line has a gap.

    Args:
        points: a table with the columns `panel`, `curve`, `x`, `values` (a list), `y` (the label of
            the y axis) and optionally `printed` (a paper's numbers, drawn in black with the markers
            of their curve).
        x_label: the label of the x axis.
        columns: the largest number of panels in a row.
        log: if True, the x axis is logarithmic.
        averaged: what the values of a point differ in, for the note below the panels.
        show_x: returns the text of an x.

    Raises:
        UserError: a panel has several metrics, or a curve has two points at one x.
    """
    repeated = points[points.duplicated(["panel", "curve", "x"])]
    if len(repeated):
        curve, x = repeated[["curve", "x"]].iloc[0]
        raise UserError(f"{curve}: has two points at {x_label} {show_x(x)}.")
    titles = list(dict.fromkeys(points["panel"]))
    curves = list(dict.fromkeys(points["curve"]))
    columns = min(columns, len(titles))
    rows = math.ceil(len(titles) / columns)
    figure = Figure(figsize=(WIDTH, 2.6 * rows + 0.8))
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(titles) :]:
        axes.set_visible(False)
    is_defined = points["values"].map(lambda values: all(map(math.isfinite, values)))
    numbers = points["values"].where(is_defined, None).map(lambda values: values or [math.nan])
    points = points.assign(mean=numbers.map(mean), min=numbers.map(min), max=numbers.map(max))
    for axes, title in zip(grid.flat, titles, strict=False):
        panel = points[points["panel"] == title]
        every_x = sorted({x for x in panel["x"] if x < math.inf})
        for label, curve in panel.groupby("curve", sort=False):
            style = curve_style(curves.index(label))
            _draw_curve(axes, curve, every_x, as_label(str(label)), style)
        axes.set_title(title)
        y_labels = panel["y"].unique()
        if len(y_labels) > 1:
            raise UserError(f"{title}: one panel cannot show {' and '.join(y_labels)}.")
        axes.set(xlabel=x_label, ylabel=y_labels[0])
        if log:
            set_log_scale(axes, "x")
        if log and len(every_x) <= MAX_MARKED:
            axes.set_xticks(every_x, [show_x(x) for x in every_x])
            axes.minorticks_off()
    counts = points.loc[is_defined, "values"].map(len)
    note = describe_points(counts[counts > 0], averaged)
    if (points["x"] == math.inf).any():
        note += f"; dotted: {x_label} = ∞"
    undefined = points[~is_defined]
    if len(undefined):
        note += f"\n{name_undrawn(undefined, 'a value of a run is undefined or ∞', show_x)}"
    _add_legend(figure, note)
    return figure


def name_undrawn(points: pd.DataFrame, reason: str, show_x: Callable[[float], str]) -> str:
    """Return a sentence that names points that are not drawn, and the reason."""
    named = []
    for panel, curve, x in zip(points["panel"], points["curve"], points["x"], strict=True):
        named.append(f"{', '.join(filter(None, (panel, curve)))} at {show_x(x)}")
    listed = "; ".join(named[:MAX_NAMED])
    if len(named) > MAX_NAMED:
        listed += f"; and {len(named) - MAX_NAMED} more"
    return textwrap.fill(f"not drawn, because {reason}: {listed}", LINE)


def _draw_curve(
    axes: Axes,
    curve: pd.DataFrame,
    every_x: list[float],
    label: str,
    style: dict[str, Any],
) -> None:
    """Draw one curve of a panel.

    Args:
        axes: the panel.
        curve: the points of the curve.
        every_x: all finite x of the panel, where the curve may lack some.
        label: the name of the curve.
        style: the style of the curve; see `curve_style`.
    """
    is_finite = curve["x"] < math.inf
    finite = curve[is_finite].set_index("x").sort_index()
    has_line = finite["mean"].notna().any()
    for height in curve.loc[~is_finite, "mean"].dropna():
        axes.axhline(
            height,
            color=style["color"],
            linewidth=0.9,
            linestyle=":",
            label=None if has_line else label,
        )
    if finite.empty:
        return
    if len(every_x) <= MAX_MARKED:
        finite = finite.reindex(every_x)
    if finite["mean"].count() > MAX_MARKED:
        style["marker"] = ""
    if has_line:
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
            "markerfacecolor": "none",
            "color": PRINTED,
            "marker": style["marker"] or "*",
            "linestyle": "",
            "zorder": 3,
        }
        axes.plot(finite.index, finite["printed"], label="printed", **printed_style)


def as_label(text: str) -> str:
    """Return a text as a label of a legend, which would leave out one that begins with '_'."""
    return f" {text}" if text.startswith("_") else text


def set_log_scale(axes: Axes, name: str) -> None:
    """Make the axis "x" or "y" logarithmic, with plain numbers at its ticks.

    By default, they are formulas such as $10^{-1}$, which `STYLE` does not draw.
    """
    axes.set(**{f"{name}scale": "log"})
    axis = getattr(axes, f"{name}axis")
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.4)))


def curve_style(index: int) -> dict[str, Any]:
    """Return the style of the curve with an index. Up to 32 curves have different ones.

    Later curves are drawn above earlier ones, thinner and with larger, hollow markers, so that
    earlier ones stay visible.
    """
    shape = index + index // len(COLOURS)  # after all colours, each gets another line and marker
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": LINES[shape % len(LINES)],
        "linewidth": max(0.9, 2.6 - 0.5 * index),
        "marker": MARKERS[shape % len(MARKERS)],
        "markersize": 3 + 0.9 * index,
        "markerfacecolor": "none" if index else COLOURS[0],
        "zorder": 2 + 0.01 * index,
    }


def describe_points(counts: Iterable[int], averaged: str = "seeds") -> str:
    """Return a sentence on what a point is.

    Args:
        counts: the number of runs of each point.
        averaged: what the runs of a point differ in, such as "seeds".
    """
    counts = list(counts)
    smallest, largest = min(counts), max(counts)
    if largest == 1:
        return "each point: one run (n = 1)"
    number = f"n = {largest}" if smallest == largest else f"n = {smallest} to {largest}"
    band = "with a band from the least to the largest"
    return f"each point: the mean over {averaged} ({number}), {band}"


def _add_legend(figure: Figure, title: str) -> None:
    """Add one legend below all panels, with each label once and a title."""
    handle_of: dict[Any, Any] = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        handle_of |= dict(zip(labels, handles, strict=True))
    longest = max(map(len, handle_of))
    max_columns = 80 // (8 + longest)  # about 80 characters fit in a line
    columns = max(1, min(4, len(handle_of), max_columns))
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
    """Write a figure as PNG, SVG and PDF to the results folder's `figures`; return the paths."""
    stem = name.replace("/", "_")
    paths = [results / "figures" / f"{stem}{suffix}" for suffix in METADATA]
    for path in paths:
        save(figure, path)
    return paths


def save(figure: Figure, path: Path) -> None:
    """Write a figure atomically; the same figure gives the same bytes.

    Raises:
        UserError: the path does not end with a supported format.
    """
    if path.suffix not in METADATA:
        raise UserError(f"{path}: must end with one of {', '.join(METADATA)}.")
    buffer = BytesIO()
    with mpl.rc_context(STYLE):
        figure.savefig(
            buffer,
            format=path.suffix[1:],
            metadata=METADATA[path.suffix],
        )
    write_changed(path, buffer.getvalue())
