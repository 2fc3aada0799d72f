"""Draws runs of one's own: a metric against any column of a record or key of the configuration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from zdp_bench import records
from zdp_bench.errors import UserError, unknown
from zdp_bench.records import Record
from zdp_bench.report import figures, names, results

NOT_SETTINGS = ("seed", "recipe")
TITLES = {
    "epsilon_tight": "tight ε",
    "epsilon_claimed": "claimed ε",
    "epsilon_patient": "tight ε per unit",
    "expected_batch_size": "batch size",
    "parameters_real": "real parameters",
    "train_seconds": "time to train, s",
    "z": "noise multiplier z",
    "optimizer.lr": "learning rate",
    "algorithm.max_grad_norm": "clipping bound C",
    "algorithm.noise_multiplier": "noise multiplier σ",
}
MANY = 10  # values on an axis: more are not each a tick
LOG = 8  # a positive axis over this factor or more is logarithmic


@dataclass(frozen=True)
class Drawing:
    """A figure, and what its reader must know beside it."""

    figure: Figure
    notes: tuple[str, ...]


def draw(folder: Path, filters: list[str], x: str, metric: str) -> Drawing:
    """Draw the metric of the records that pass every filter, a curve for each setting.

    Seeds of one setting are a point, their mean with a band. Settings are told apart by all that
    differs but what goes with x: it has one value at each x. Runs at infinite x, such as an ε
    without protection, are a line across.

    Args:
        filters: column=value, as `zdp-bench results` takes them.
        x: a column of records.csv or a key of the configuration.
        metric: one that every run measured.

    Raises:
        UserError: no record passes, or x or metric is not known or no number.
    """
    chosen = _choose(folder, filters)
    measured = sorted(set.intersection(*(set(run["metrics"]) for run in chosen)))
    if metric not in measured:
        raise unknown("--y", metric, measured)
    frame, keys = results.read_frame(chosen)
    if x not in frame.columns:
        raise unknown("--x", x, frame.columns)
    numbers = pd.to_numeric(frame[x], errors="coerce")
    if numbers.isna().any():
        lacking = frame[x][numbers.isna()].iloc[0]
        raise UserError(
            f"--x {x}: is {lacking} in a run, and no number. Choose another, or leave such runs "
            f"out: --runs {x}=VALUE."
        )
    if x.startswith("epsilon_"):  # noise that is calibrated to an ε hits it to three digits
        numbers = numbers.map(lambda number: float(f"{number:.3g}"))
    together, apart = _sort_settings(frame, [k for k in keys if k != x], numbers)
    values = [run["metrics"][metric] * names.scale(metric) for run in chosen]
    curves: dict[str, dict[float, list[float]]] = {}
    for place, number in enumerate(numbers):
        label = _label(chosen[place], frame.iloc[place], apart)
        curves.setdefault(label, {}).setdefault(float(number), []).append(values[place])
    title = _title(chosen)
    with mpl.rc_context(figures.STYLE):
        figure = _draw(curves, TITLES.get(x, x.replace("_", " ")), names.axis(metric), title)
        FigureCanvasAgg(figure).draw()
    notes = [f"With {x} also changes: {', '.join(together)}."] if together else []
    return Drawing(figure, tuple(notes))


def _choose(folder: Path, filters: list[str]) -> list[Record]:
    every = records.read_all(folder)
    passing = set(results.select(folder, filters, "run", None).frame["run"]) if every else ()
    chosen = [run for run in every if run["run"] in passing]
    if not chosen:
        shown = f" {' '.join(filters)}" if filters else ""
        raise UserError(f"{folder}: no record passes{shown}; `zdp-bench results` lists them.")
    return chosen


def _sort_settings(
    frame: pd.DataFrame, keys: Sequence[str], x: pd.Series
) -> tuple[list[str], list[str]]:
    """Return the keys that go with x, and those that tell curves apart.

    Plug-ins always tell apart. Any other key goes with x if it has one value at each x, in each
    curve. One that the plug-ins settle, as an option of one algorithm, tells nothing more.
    """
    words = {key: frame[key].map(_word) for key in keys}
    differ = [key for key in keys if words[key].nunique() > 1 and key not in NOT_SETTINGS]
    plugins = [key for key in differ if key.endswith(".name")]
    named = [words[key] for key in plugins]
    rest = [k for k in differ if k not in plugins and not (named and _is_settled(words[k], named))]
    together = [key for key in rest if _is_settled(words[key], [x, *named])]
    return together, [*plugins, *(key for key in rest if key not in together)]


def _word(value: Any) -> str:
    """Return a setting's value as text: 1 and 1.0 are one value; null, false and 0 are off."""
    if not value or isinstance(value, bool) or not isinstance(value, int | float):
        return str(value or None)
    return repr(float(value)).removesuffix(".0")


def _is_settled(column: pd.Series, by: Sequence[pd.Series]) -> bool:
    """True if a column has one value wherever the others have one."""
    return bool(column.groupby([other.to_numpy() for other in by]).nunique().max() == 1)


def _label(run: Record, line: pd.Series, apart: Sequence[str]) -> str:
    """'DP-SGD, lr 0.1': what tells a setting from the others; its name if nothing does."""
    shown = {
        "algorithm.name": names.algorithm,
        "model.name": names.model,
        "dataset.name": names.data,
    }
    words = []
    for key in apart:
        value: Any = line[key]
        if key in shown:
            words.append(shown[key](str(value)))
        elif value is not None and value == value:
            named = TITLES.get(key, key.rpartition(".")[2].replace("_", " "))
            words.append(f"{named} {_word(value)}")
    return ", ".join(words) or names.run(run)


def _title(chosen: Sequence[Record]) -> str:
    shown = list(dict.fromkeys(names.run(run) for run in chosen))
    more = f" and {len(shown) - 2} more" if len(shown) > 2 else ""
    return f"{'; '.join(shown[:2])}{more}"


def _draw(
    curves: dict[str, dict[float, list[float]]], x_label: str, y_label: str, title: str
) -> Figure:
    figure = Figure(figsize=(figures.WIDTH, 0.6 * figures.WIDTH))
    axes = figure.subplots()
    every_x = sorted({x for curve in curves.values() for x in curve if math.isfinite(x)})
    counts: list[int] = []
    for label, curve in curves.items():
        counts += map(len, curve.values())
        for x in sorted(x for x in curve if math.isinf(x)):
            named = f"{label}, ∞" if len(curves) > 1 else "∞"
            axes.axhline(mean(curve[x]), label=named, **figures.REFERENCE)
    finite = {label: c for label, c in curves.items() if any(map(math.isfinite, c))}
    # Of a search hardly two curves share a value, and a line would join what was drawn at random.
    joined = 2 * sum(map(len, finite.values())) >= len(every_x) * len(finite)
    for place, (label, curve) in enumerate(sorted(finite.items())):
        seeds = [curve.get(x, []) for x in every_x]
        style = figures.curve_style(place)
        if not joined:
            style["linestyle"] = ""
        figures.draw_mean(axes, every_x, seeds, label=label, **style)
    if every_x and every_x[0] > 0 and every_x[-1] >= LOG * every_x[0]:
        axes.set_xscale("log")
        round_ones = [m * 10.0**k for k in range(-12, 13) for m in (1, 2, 5)]
        inside = [x for x in round_ones if every_x[0] <= x <= every_x[-1]]
        figures.log_ticks(axes.xaxis, inside if len(every_x) > MANY else every_x)
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.set_title(title)
    figures.legend_below(figure, figures.say_runs(counts))
    return figure
