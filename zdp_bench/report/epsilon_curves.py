"""Curves of the metric against the tight ε it was bought with, epoch by epoch: one drawing a table, from the records alone."""

from __future__ import annotations

import io
import math
import re

import matplotlib as mpl
from matplotlib.figure import Figure

from zdp_bench.records import Record
from zdp_bench.report.figures import COLOURS, LINES, STYLE, WIDTH


def draw(runs: list[Record]) -> Figure | None:
    """Each run's headline metric at the end of each epoch over the tight ε spent by then; None where no run is private.

    Seeds of one experiment share a colour. Runs without protection have no place on the axis: their last value is a grey line.
    """
    names = sorted({run["headline"]["name"] for run in runs})
    if not any(_points(run) for run in runs):
        return None
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 0.5 * WIDTH * len(names)))
        for axes, name in zip(figure.subplots(len(names), squeeze=False)[:, 0], names, strict=True):
            here = [run for run in runs if run["headline"]["name"] == name]
            of = {
                digest: number
                for number, digest in enumerate(
                    dict.fromkeys(r["experiment"] for r in here if _points(r))
                )
            }
            labelled = set()
            for run in here:
                label = _label(run) if run["experiment"] not in labelled else None
                labelled.add(run["experiment"])
                if points := _points(run):
                    style = {
                        "color": COLOURS[of[run["experiment"]] % 8],
                        "linestyle": LINES[of[run["experiment"]] % 8],
                    }
                    axes.plot(
                        *zip(*points, strict=True),
                        label=label,
                        linewidth=1,
                        marker=".",
                        markersize=3,
                        **style,
                    )
                else:
                    axes.axhline(run["headline"]["value"], color="0.5", linewidth=0.8, label=label)
            axes.set(xscale="log", xlabel="tight ε spent", ylabel=f"test {name.replace('_', ' ')}")
            axes.legend(fontsize=7)
    return figure


def _points(run: Record) -> list[tuple[float, float]]:
    name = run["headline"]["name"]
    points = [(epoch["epsilon_tight"], epoch[name]) for epoch in run["epochs"] if name in epoch]
    return [
        (epsilon, value)
        for epsilon, value in points
        if 0 < epsilon < math.inf and math.isfinite(value)
    ]


def _label(run: Record) -> str:
    unprotected = "" if _points(run) else " (ε = ∞)"
    return f"{run['recipe']}, {run['data']['name']}{unprotected}"


def inline_svg(figure: Figure, label: str) -> str:
    """The figure as an `<svg>` element for a page: no XML head, no fixed size, a name for readers who do not see it."""
    out = io.StringIO()
    with mpl.rc_context(STYLE):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return as_element(out.getvalue(), label)


def as_element(svg: str, label: str) -> str:
    """An SVG document as an element: it scales with the page, and nothing in it reaches out of it."""
    from html import escape

    body = svg[svg.index("<svg") :]
    head, rest = body.split(">", 1)
    rest = re.sub(r"<metadata>.*?</metadata>", "", rest, flags=re.DOTALL)
    head = re.sub(r'\s(width|height)="[^"]*"', "", head)
    return f'{head} role="img" aria-label="{escape(label, quote=True)}">{rest}'
