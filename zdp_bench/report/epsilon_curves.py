"""Draws the metric against the tight ε spent, epoch by epoch, for each table of the page."""

from __future__ import annotations

import io
import math
import re
from html import escape

import matplotlib as mpl
from matplotlib.figure import Figure

from zdp_bench.records import Record
from zdp_bench.report.figures import COLOURS, LINES, STYLE, WIDTH


def draw(runs: list[Record]) -> Figure | None:
    """Draw each run's headline metric after each epoch over the tight ε spent until then.

    None if no run is private. Seeds of one experiment share a colour. A run without protection
    is a grey line at its last value.
    """
    if not any(_points(run) for run in runs):
        return None
    names = sorted({run["headline"]["name"] for run in runs})
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 0.5 * WIDTH * len(names)))
        for axes, name in zip(figure.subplots(len(names), squeeze=False)[:, 0], names, strict=True):
            here = [run for run in runs if run["headline"]["name"] == name]
            private = list(dict.fromkeys(run["experiment"] for run in here if _points(run)))
            labelled = set()
            for run in here:
                experiment = run["experiment"]
                label = _label(run) if experiment not in labelled else None
                labelled.add(experiment)
                if points := _points(run):
                    number = private.index(experiment) % len(COLOURS)
                    axes.plot(
                        *zip(*points, strict=True),
                        label=label,
                        linewidth=1,
                        marker=".",
                        markersize=3,
                        color=COLOURS[number],
                        linestyle=LINES[number],
                    )
                else:
                    axes.axhline(run["headline"]["value"], color="0.5", linewidth=0.8, label=label)
            axes.set(xscale="log", xlabel="tight ε spent", ylabel=f"test {name.replace('_', ' ')}")
            axes.legend(fontsize=7)
    return figure


def _points(run: Record) -> list[tuple[float, float]]:
    """Return (tight ε, metric) of each epoch that has both, finite."""
    name = run["headline"]["name"]
    points = [(epoch["epsilon_tight"], epoch[name]) for epoch in run["epochs"] if name in epoch]
    return [(e, value) for e, value in points if 0 < e < math.inf and math.isfinite(value)]


def _label(run: Record) -> str:
    unprotected = "" if _points(run) else " (ε = ∞)"
    return f"{run['recipe']}, {run['data']['name']}{unprotected}"


def inline_svg(figure: Figure, label: str) -> str:
    """Return a figure as an `<svg>` element that scales with its page and needs nothing else.

    `label` is for readers who do not see it.
    """
    out = io.StringIO()
    with mpl.rc_context(STYLE):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    svg = out.getvalue()
    head, rest = svg[svg.index("<svg") :].split(">", 1)
    rest = re.sub(r"<metadata>.*?</metadata>", "", rest, flags=re.DOTALL)
    head = re.sub(r'\s(width|height)="[^"]*"', "", head)
    return f'{head} role="img" aria-label="{escape(label, quote=True)}">{rest}'
