"""Figures: each is a function `(results, data_root) -> Figure`, registered as PAPER/figN.

    @register("figure", "zeta_dp_2021/fig1")
    def example_ecgs(results: Path, data_root: Path) -> Figure: ...

Figures of curves are drawn by `panels.py` and need no function. Figures read records and tables
under `results` and examples under the data root; they never train. If something is missing, they
raise one UserError with the command that makes it.

Fonts, colours and sizes are set here. The colours are Okabe and Ito's (2008), which colour-blind
readers tell apart; with their line styles, the first four also work in grey print.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from cycler import cycler
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from zdp_bench.registry import lookup, names

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
LINES = ("-", "--", "-.", ":", "-", "--", "-.", ":")
WIDTH = 6.3  # inches: the text width of an A4 page

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
    "svg.hashsalt": "zdp-bench",  # the same figure is the same file, byte for byte
    "svg.fonttype": "none",  # text stays text
}


def draw(name: str, results: Path, data_root: Path) -> Figure:
    """Draw a figure by name, in our style.

    Raises:
        UserError: no such figure, or records or data that it needs are not there.
    """
    builder = lookup("figure", name)
    with mpl.rc_context(STYLE):
        figure: Figure = builder(results, data_root)
        FigureCanvasAgg(figure).draw()  # lays it out while the style holds
    return figure


def captions() -> dict[str, str]:
    """Return what each figure shows, by the name of its file."""
    return {stem(name): _says(lookup("figure", name)) for name in names("figure")}


def stem(name: str) -> str:
    """'zeta_dp_2021/fig1' -> 'zeta_dp_2021_fig1'."""
    return name.replace("/", "_")


def _says(builder: Callable[..., Figure]) -> str:
    return " ".join((builder.__doc__ or "").strip().split("\n\n")[0].split())


def legend_below(figure: Figure) -> None:
    """Give a figure one legend, below it, with every label of its axes once."""
    handles = {
        label: handle
        for axes in figure.axes
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=min(4, len(handles))
    )


def write(figure: Figure, name: str, results: Path) -> list[Path]:
    """Write `results/figures/PAPER_figN.png` and `.svg`, each whole or not at all."""
    folder = results / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    stem = name.replace("/", "_")
    paths = []
    with mpl.rc_context(STYLE):
        for suffix, metadata in (
            (".png", {"Software": None}),
            (".svg", {"Date": None, "Creator": None}),
        ):
            path = folder / f"{stem}{suffix}"
            partial = path.with_name(f".{path.name}")
            figure.savefig(partial, format=suffix[1:], metadata=metadata)
            partial.replace(path)
            paths.append(path)
    return paths
