"""A search as a table, and ε against utility as a figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from zdp_bench.records import Record
from zdp_bench.report import figures
from zdp_bench.report.figures import COLOURS, STYLE, WIDTH
from zdp_bench.report.number_format import epsilon, name_one
from zdp_bench.report.sheet import Sheet

SHOWN = 10  # trials in a table; CSV and JSON have all
HEIGHT = 3.0  # inches


def sheet(found: Record) -> Sheet:
    """Return the trials of a search's record, the best first, and what ε covers what."""
    by = found["chosen_by"]
    sign = -1 if found["direction"] == "minimize" else 1
    ordered = sorted(
        found["trials"],
        key=lambda line: (line["score"] is None, -sign * (line["score"] or 0.0), line["trial"]),
    )
    keys = list(found["searched"])
    columns = ["trial", *keys, f"{by['of']} {by['metric']}"]
    with_test = by["of"] != "test"
    columns += [f"test {by['metric']}"] if with_test else []
    rows = [
        [
            str(line["trial"]),
            *(_short(line["values"][key]) for key in keys),
            line["state"] if line["score"] is None else f"{line['score']:.4f}",
            *([_short(line["test"])] if with_test else []),
            epsilon(line["epsilon_tight"]),
            line["run"][:16],
        ]
        for line in ordered
    ]
    numbers = [
        {
            "trial": line["trial"],
            **line["values"],
            f"{by['of']}_{by['metric']}": line["score"],
            f"test_{by['metric']}": line["test"],
            "epsilon_tight": line["epsilon_tight"],
            "run": line["run"],
        }
        for line in ordered
    ]
    left = [f"{len(rows) - SHOWN} more trials: --format csv."] if len(rows) > SHOWN else []
    title = f"Search of {found['recipe']}: {len(rows)} trials by {found['sampler']}"
    columns = [*columns, "ε of it", "run"]
    return Sheet(title, columns, rows[:SHOWN], [*left, *_notes(found)], numbers=numbers)


def _notes(found: Record) -> list[str]:
    """Return what was spent, in sentences, and what each number covers."""
    privacy, by = found["privacy"], found["chosen_by"]
    delta, law = f"δ {privacy['delta']:g}", found["number"]
    every = epsilon(privacy["epsilon_all"]) or "not known: the samplings of its trials differ"
    unit = privacy["epsilon_all_unit"]
    owner = f", of {name_one(privacy['unit'])} {epsilon(unit)}" if unit is not None else ""
    notes = [
        f"ε of the whole search: {every}{owner} ({delta}; tight, of all trials composed). It "
        "covers all records, and every choice made by looking at them. The ε of one trial covers "
        "less."
    ]
    if privacy["epsilon_best"] is not None:
        notes.append(
            f"ε of the best trial alone: {epsilon(privacy['epsilon_best'])} ({delta}; Rényi-DP, "
            f"Papernot & Steinke 2022, number of trials {law} with mean {found['asked']}). It "
            "holds if nothing else of the search leaves this machine: not the other records, nor "
            "this table, nor how many trials there were."
        )
    elif law != "fixed" and not found["finished"]:
        notes.append("The ε of the best trial alone is stated once all trials are done.")
    elif not found["trials"]:
        notes.append("The number of trials was drawn to be 0, so there is no best.")
    if by["of"] == "test":
        notes.append(
            "Chosen by the test set, so the best trial's test metric is too good to be true of "
            "other records."
        )
    elif found["trials"]:
        notes.append("Chosen by validation records, which count as public: no ε covers them.")
    return notes


def _short(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def write(found: Record, folder: Path) -> list[Path]:
    """Write the table and, if a trial was measured, the figure into the search's folder."""
    paths = sheet(found).write(folder / "trials")
    if any(line["score"] is not None for line in found["trials"]):
        with mpl.rc_context(STYLE):
            figure = draw(found)
            FigureCanvasAgg(figure).draw()
        paths += figures.write(figure, "search", folder)
    return paths


def draw(found: Record) -> Figure:
    """Draw each trial at its own ε, and the best so far at the ε of all trials so far."""
    by, lines = found["chosen_by"], found["trials"]
    figure = Figure(figsize=(WIDTH, HEIGHT))
    axes = figure.subplots()
    own = [(line["epsilon_tight"], line["score"]) for line in lines if line["score"] is not None]
    axes.plot(
        *zip(*own, strict=True), "o", color="0.55", markersize=4, label="a trial, at its own ε"
    )
    best = max if found["direction"] == "maximize" else min
    path = []
    for count, spent in found["privacy"]["epsilon_so_far"]:
        scores = [line["score"] for line in lines[:count] if line["score"] is not None]
        if scores and spent is not None:
            path.append((spent, best(scores)))
    if path:
        label = "the best so far, at the ε of all so far"
        axes.plot(*zip(*path, strict=True), "-o", color=COLOURS[0], markersize=3, label=label)
    if (alone := found["privacy"]["epsilon_best"]) is not None:
        top = best(score for _, score in own)
        label = "the best alone (Papernot & Steinke 2022)"
        axes.plot([alone], [top], "D", color=COLOURS[1], markersize=5, label=label)
    axes.set_xlabel(f"ε (δ {found['privacy']['delta']:g})")
    axes.set_ylabel(f"{by['of']} {by['metric'].replace('_', ' ')}")
    figures.legend_below(figure)
    return figure
