"""Figures: each is a function `(results) -> Figure`, registered by name.

    @register("figure", "reconstructions")
    def reconstructions(results: Path) -> Figure: ...

Figures of curves are drawn by `curves.py` and need no function. Figures read records and tables
under `results`; they never train. If something is missing, they raise one UserError with the
command that makes it.

Fonts, colours and sizes are set here. The colours are Okabe and Ito's (2008), which colour-blind
readers tell apart, with wine for yellow; with their line styles, the first four also work in grey
print.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib as mpl
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from zdp_bench.disk import write_changed
from zdp_bench.errors import UserError
from zdp_bench.registry import lookup, names

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#882255")
LINES = ("-", "--", "-.", ":", "-", "--", "-.", ":")
MARKERS = "osD^v<>P"
# The line of training without protection.
REFERENCE: dict[str, Any] = {"color": "0.35", "linewidth": 0.9, "linestyle": (0, (1, 1.5))}
WIDTH = 6.3  # inches: the text width of an A4 page
MANY = 10  # values on an axis: more are not each a tick

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
    "figure.constrained_layout.use": True,
    "image.cmap": "gray",
    "savefig.dpi": 200,
    "pdf.fonttype": 42,  # fonts that journals take
    "svg.hashsalt": "zdp-bench",  # the same figure is the same file, byte for byte
    "svg.fonttype": "none",  # text stays text
}


def draw(name: str, results: Path) -> Figure:
    """Draw a figure by name, in our style.

    Raises:
        UserError: no such figure, or records or data that it needs are not there.
    """
    builder = lookup("figure", name)
    with mpl.rc_context(STYLE):
        figure: Figure = builder(results)
        lay_out(figure, f"Draw {name} from a results folder with fewer of its runs")
    return figure


def lay_out(figure: Figure, advice: str) -> None:
    """Place what a figure shows, while the style holds.

    Raises:
        UserError: it shows more than fits; says `advice`.
    """
    try:
        with warnings.catch_warnings(action="error", category=UserWarning):
            FigureCanvasAgg(figure).draw()
    except UserWarning:
        raise UserError(f"This figure would show more than fits it. {advice}.") from None


def captions() -> dict[str, str]:
    """Return what each figure shows, by the name of its file."""
    return {stem(name): _says(lookup("figure", name)) for name in names("figure")}


def stem(name: str) -> str:
    """'dp_dfa_2020/fig4' -> 'dp_dfa_2020_fig4'."""
    return name.replace("/", "_")


def _says(builder: Callable[..., Figure]) -> str:
    return " ".join((builder.__doc__ or "").strip().split("\n\n")[0].split())


def curve_style(place: int) -> dict[str, Any]:
    """Return how the curve of a place is drawn, of several that may be equal.

    A later one lies above and is thinner, and its marks are rings around those below.
    """
    return {
        "color": COLOURS[place % len(COLOURS)],
        "linestyle": LINES[place % len(LINES)],
        "linewidth": max(0.9, 2.6 - 0.5 * place),
        "marker": MARKERS[place % len(MARKERS)],
        "markersize": 3 + 0.9 * place,
        "markerfacecolor": "none" if place else COLOURS[0],
        "zorder": 2 + 0.01 * place,
    }


def draw_mean(
    axes: Axes, x: Sequence[float], seeds: Sequence[Sequence[float]], **style: Any
) -> None:
    """Draw the mean over seeds, and a band from the least to the largest; no seeds are a gap."""
    mean = [sum(values) / len(values) if values else math.nan for values in seeds]
    axes.plot(x, mean, **style)
    if max(map(len, seeds), default=0) > 1:
        low = [min(values, default=math.nan) for values in seeds]
        high = [max(values, default=math.nan) for values in seeds]
        axes.fill_between(x, low, high, color=style["color"], alpha=0.2, linewidth=0)


def say_runs(counts: Iterable[int], band: bool = True) -> str:
    """'each point: the mean of 1 to 3 seeds, with a band from the least to the largest'."""
    least, most = min(found := list(counts)), max(found)
    if most == 1:
        return "each point: one seed (n = 1)"
    number = f"n = {most}" if least == most else f"n = {least} to {most}"
    banded = ", with a band from the least to the largest" if band else ""
    return f"each point: the mean over seeds ({number}){banded}"


def log_ticks(axis: Axis, values: Iterable[float]) -> None:
    """Write the values that occur at an axis, those that do not run into their neighbours."""
    shown: list[float] = []
    every = sorted(set(values))
    for value in every:
        if not shown or value > shown[-1] * (every[-1] / every[0]) ** 0.07:
            shown.append(value)
    axis.set_major_locator(FixedLocator(shown))
    axis.set_major_formatter(FixedFormatter([f"{value:.4g}" for value in shown]))
    axis.set_minor_locator(NullLocator())


def spread(axes: Axes, values: Iterable[float], factor: float = 30) -> None:
    """Make the x axis logarithmic if its values are positive and the largest is far from the least.

    Of up to `MANY` values each is a tick, else round numbers.
    """
    every = sorted(set(values))
    if every and every[0] > 0 and every[-1] >= factor * every[0]:
        axes.set_xscale("log")
        round_ones = (m * 10.0**k for k in range(-12, 13) for m in (1, 2, 5))
        inside = [x for x in round_ones if every[0] <= x <= every[-1]]
        log_ticks(axes.xaxis, inside if len(every) > MANY else every)


def legend_below(figure: Figure, says: str = "") -> None:
    """Give a figure one legend, below it, with every label of its axes once, and a sentence.

    It has as many columns as fit the figure's width, at most four.
    """
    handles = {
        label: handle
        for axes in figure.axes
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    for columns in range(min(4, len(handles)), 0, -1):
        legend = figure.legend(
            handles.values(),
            handles.keys(),
            loc="outside lower center",
            ncols=columns,
            title=says,
            title_fontsize=7.5,
        )
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            return
        legend.remove()


def write(figure: Figure, name: str, results: Path) -> list[Path]:
    """Write `results/figures/PAPER_figN.png`, `.svg` and `.pdf`."""
    paths = [results / "figures" / f"{stem(name)}{suffix}" for suffix in METADATA]
    for path in paths:
        save(figure, path)
    return paths


def save(figure: Figure, path: Path) -> None:
    """Write a figure, whole or not at all, the same bytes each time.

    Raises:
        UserError: the file's ending is none of `METADATA`.
    """
    if path.suffix not in METADATA:
        raise UserError(f"{path}: a figure ends in {', '.join(METADATA)}.")
    drawn = BytesIO()
    with mpl.rc_context(STYLE):
        figure.savefig(drawn, format=path.suffix[1:], metadata=METADATA[path.suffix])
    write_changed(path, drawn.getvalue())
