"""Draws runs of one's own: a metric against any column of a record or key of the configuration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from textwrap import fill
from typing import Any

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from zdp_bench import records
from zdp_bench.errors import UserError, unknown
from zdp_bench.foreign_files import read_json
from zdp_bench.records import Record
from zdp_bench.report import figures, names, results

NOT_SETTINGS = ("seed", "recipe")
PLUGINS = {"algorithm.name": names.algorithm, "model.name": names.model, "dataset.name": names.data}
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
LOG_X, LOG_Y = 8, 30  # a positive axis over this factor or more is logarithmic
JOINED = 20  # points of a curve; a line through more shows nothing
SERIES = len(figures.COLOURS)  # a reader tells no more apart
EDGE = 1.03  # of an axis that is 1 long: where ∞ stands
LINE = 88  # characters of a title or label that fit the figure's width

Words = tuple[str, ...]


@dataclass(frozen=True)
class Drawing:
    """A figure, and what its reader must know beside it."""

    figure: Figure
    notes: tuple[str, ...]


@dataclass
class Series:
    """What has one colour: {x: {setting: the metric of each seed}}; a line joins it or not."""

    joined: bool
    points: dict[float, dict[Words, list[float]]] = field(default_factory=dict)

    @property
    def finite(self) -> dict[float, list[list[float]]]:
        """Return the seeds of every setting at each x, in order, but for an infinite x."""
        return {x: [*of.values()] for x, of in sorted(self.points.items()) if math.isfinite(x)}

    @property
    def is_curve(self) -> bool:
        """True if a line may join it: it has one setting at each x, and few x."""
        single = all(len(of) == 1 for of in self.finite.values())
        return self.joined and single and len(self.finite) <= JOINED


def draw(folder: Path, filters: list[str], x: str, metric: str, by: Sequence[str] = ()) -> Drawing:
    """Draw the metric of the records that pass every filter, a curve for each setting.

    Seeds of one setting are a point, their mean with a band. Settings are told apart by all that
    differs but what goes with x: it has one value at each x. Trials of a search are one series of
    points, which no line joins; so are the runs of one algorithm (network, data set), or all runs,
    where more settings differ than a reader tells apart. Runs at infinite x, such as an ε
    without protection, are a line across.

    Args:
        filters: column=value, as `zdp-bench results` takes them.
        x: a column of records.csv or a key of the configuration.
        metric: one of a run; runs without it are not drawn.
        by: columns or keys whose values make a series, instead.

    Raises:
        UserError: no record passes; x, metric or `by` is not known; x is no number; `by` has more
            than `SERIES` values; or what there is does not fit a figure.
    """
    passing = _choose(folder, filters)
    measured = sorted({name for run in passing for name in run["metrics"]})
    if metric not in measured:
        raise unknown("--y", metric, measured)
    chosen = [run for run in passing if math.isfinite(run["metrics"].get(metric, math.nan))]
    if not chosen:
        raise UserError(f"--y {metric}: is a finite number in none of these runs.")
    frame, keys = results.read_frame(chosen)
    numbers = _numbers(frame, x)
    words = {key: frame[key].map(_word) for key in keys if key not in (x, *NOT_SETTINGS)}
    words = {key: column for key, column in words.items() if column.nunique() > 1}
    trials = _searches(folder)
    searches = [trials.get(run["run"], "") for run in chosen]
    if by:
        labels, joined, notes = _label_by(frame, words, numbers, by)
    else:
        labels, joined, notes = _label(chosen, frame, words, numbers, searches)
    settings: list[Words] = [*zip(*words.values(), strict=True)] or [()] * len(chosen)
    series: dict[str, Series] = {}
    for place, run in enumerate(chosen):
        one = series.setdefault(labels[place], Series(joined and not searches[place]))
        at = one.points.setdefault(float(numbers[place]), {})
        at.setdefault(settings[place], []).append(run["metrics"][metric] * names.scale(metric))
    if len(chosen) < len(passing):
        left_out = len(passing) - len(chosen)
        notes = [*notes, f"Not drawn: {left_out} runs without a finite {metric}."]
    with mpl.rc_context(figures.STYLE):
        figure = _draw(dict(sorted(series.items())), TITLES.get(x, x.replace("_", " ")), metric)
        figure.axes[0].set_title(fill(_title(chosen), LINE))
        figures.lay_out(figure, "Draw fewer runs: --runs COLUMN=VALUE")
    return Drawing(figure, tuple(notes))


def _choose(folder: Path, filters: list[str]) -> list[Record]:
    every = records.read_all(folder)
    passing = set(results.select(folder, filters, "run", None).frame["run"]) if every else ()
    chosen = [run for run in every if run["run"] in passing]
    if not chosen:
        shown = f" {' '.join(filters)}" if filters else ""
        raise UserError(f"{folder}: no record passes{shown}; `zdp-bench results` lists them.")
    return chosen


def _numbers(frame: pd.DataFrame, x: str) -> pd.Series:
    """Return the column x as numbers.

    Raises:
        UserError: there is no such column, or it is no number in a run.
    """
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
        return numbers.map(lambda number: float(f"{number:.3g}"))
    return numbers


def _word(value: Any) -> str:
    """Return a setting's value as text: 1 and 1.0 are one value; null, false and 0 are off."""
    if not value or isinstance(value, bool) or not isinstance(value, int | float):
        return str(value or None)
    return repr(float(value)).removesuffix(".0")


# ----------------------------------------------------------------------- what tells series apart

Labels = tuple[list[str], bool, list[str]]  # of each run; whether a line joins them; notes


def _label_by(
    frame: pd.DataFrame, words: dict[str, pd.Series], x: pd.Series, by: Sequence[str]
) -> Labels:
    """Label runs by the values of some columns; a line joins those that differ in nothing else."""
    for key in by:
        if key not in frame.columns:
            raise unknown("--by", key, frame.columns)
    labels = _write(frame, [*by])
    if (many := len(set(labels))) > SERIES:
        raise UserError(
            f"--by {','.join(by)}: has {many} values, and a reader tells {SERIES} apart. Name "
            "another column, or draw fewer runs: --runs COLUMN=VALUE."
        )
    rest = [key for key in _sort_settings(words, x)[1] if key not in by]
    notes = [f"Points of one colour also differ in {_list(rest)}."] if rest else []
    return labels, not rest, notes


def _label(
    chosen: Sequence[Record],
    frame: pd.DataFrame,
    words: dict[str, pd.Series],
    x: pd.Series,
    searches: Sequence[str],
) -> Labels:
    """Label runs by their search, and those of none by all that tells their settings apart."""
    labels = [*searches]
    own = [place for place, label in enumerate(labels) if not label]
    if not own:
        return labels, False, []
    few = {key: column.iloc[own] for key, column in words.items()}
    together, apart = _sort_settings(few, x.iloc[own])
    told = _write(frame.iloc[own], apart) if apart else [names.run(chosen[own[0]])] * len(own)
    others = set(labels) - {""}
    joined = len({*told} | others) <= SERIES
    notes = [f"With {x.name} also changes: {_list(together)}."] if joined and together else []
    if not joined:
        named = [key for key in PLUGINS if key in apart]
        while named and len({*(told := _write(frame.iloc[own], named))} | others) > SERIES:
            named.pop()
        told = told if named else [f"{len(own)} runs"] * len(own)
        rest = [key for key in apart if key not in named]
        notes = [f"Points of one colour also differ in {_list(rest)}; --by KEY tells them apart."]
    for place, label in zip(own, told, strict=True):
        labels[place] = label
    return labels, joined, notes


def _list(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - 8} more" if len(keys) > 8 else ""
    return f"{', '.join(keys[:8])}{more}"


def _searches(folder: Path) -> dict[str, str]:
    """Return {run: 'quickstart, search over lr'} for the trials of searches."""
    found: dict[str, str] = {}
    for path in sorted((folder / "searches").glob("*/search.json")):
        search = read_json(path)
        over = ", ".join(key.rpartition(".")[2] for key in search["searched"])
        found |= dict.fromkeys(
            (trial["run"] for trial in search["trials"]), f"{search['recipe']}, search over {over}"
        )
    return found


def _sort_settings(words: dict[str, pd.Series], x: pd.Series) -> tuple[list[str], list[str]]:
    """Return the keys that go with x, and those that tell curves apart.

    Plug-ins always tell apart. Any other key goes with x if it has one value at each x, in each
    curve. One that the plug-ins settle, as an option of one algorithm, tells nothing more.
    """
    differ = [key for key, column in words.items() if column.nunique() > 1]
    plugins = [key for key in differ if key.endswith(".name")]
    named = [words[key] for key in plugins]
    rest = [k for k in differ if k not in plugins and not (named and _is_settled(words[k], named))]
    together = [key for key in rest if _is_settled(words[key], [x, *named])]
    return together, [*plugins, *(key for key in rest if key not in together)]


def _is_settled(column: pd.Series, by: Sequence[pd.Series]) -> bool:
    """True if a column has one value wherever the others have one."""
    return bool(column.groupby([other.to_numpy() for other in by]).nunique().max() == 1)


def _write(frame: pd.DataFrame, keys: Sequence[str]) -> list[str]:
    """Return each run's values of some keys, 'DP-SGD, lr 0.1', in four digits if they suffice."""
    lines = frame[[*keys]].to_dict("records")
    apart = {tuple(map(_word, line.values())) for line in lines}
    labels = [_say(line, short=True) for line in lines]
    if len(set(labels)) < len(apart):
        labels = [_say(line, short=False) for line in lines]
    return [fill(label, LINE) for label in labels]


def _say(line: dict[Any, Any], short: bool) -> str:
    said = []
    for key, value in line.items():
        if key in PLUGINS:
            said.append(PLUGINS[key](str(value)))
        elif not short:
            said.append(f"{key} {_word(value)}")
        elif value is not None and value == value:
            written = f"{value:.4g}" if isinstance(value, float) else _word(value)
            said.append(f"{TITLES.get(key, key.rpartition('.')[2].replace('_', ' '))} {written}")
    return ", ".join(said) or "none of these"


def _title(chosen: Sequence[Record]) -> str:
    shown = list(dict.fromkeys(names.run(run) for run in chosen))
    more = f" and {len(shown) - 2} more" if len(shown) > 2 else ""
    return f"{'; '.join(shown[:2])}{more}"


# -------------------------------------------------------------------------------- how it is drawn


def _draw(series: dict[str, Series], x_label: str, metric: str) -> Figure:
    figure = Figure(figsize=(figures.WIDTH, 0.6 * figures.WIDTH))
    axes = figure.subplots()
    every_x = sorted({x for one in series.values() for x in one.finite})
    settings = (of for one in series.values() for of in one.points.values())
    points = [values for of in settings for values in of.values()]
    every_y = sorted(value for values in points for value in values)
    across = sum(math.inf in one.points for one in series.values())
    for place, (label, one) in enumerate(series.items()):
        style = figures.curve_style(place)
        if one.is_curve and one.finite:
            seeds = [one.finite.get(x, [[]])[0] for x in every_x]
            figures.draw_mean(axes, every_x, seeds, label=label, **style)
        elif one.finite:
            means = [(x, mean(values)) for x, of in one.finite.items() for values in of]
            style |= {"linestyle": "", "markersize": 4, "alpha": 0.7}
            axes.plot(*zip(*means, strict=True), label=label, **style)
        if math.inf in one.points:
            colour = style["color"] if across > 1 else figures.REFERENCE["color"]
            _draw_unbounded(axes, one, label if len(series) > 1 else "", style | {"color": colour})
    figures.spread(axes, every_x, LOG_X)
    if not every_x:
        axes.set_xticks([])
    if every_y[0] > 0 and every_y[-1] >= LOG_Y * every_y[0] and not names.unit(metric):
        axes.set_yscale("log")
    axes.set(xlabel=x_label, ylabel=names.axis(metric))
    figures.legend_below(
        figure,
        figures.say_runs(map(len, points), band=any(one.is_curve for one in series.values())),
    )
    return figure


def _draw_unbounded(axes: Axes, one: Series, label: str, style: dict[str, Any]) -> None:
    """Draw the runs at infinite x: of one setting a line across, of several points at the right."""
    values = [mean(seeds) for seeds in one.points[math.inf].values()]
    named = f"{label}, ∞" if label else "∞"
    if len(values) == 1:
        line = {"linestyle": figures.REFERENCE["linestyle"], "linewidth": 0.9}
        axes.axhline(values[0], label=named, color=style["color"], **line)
        return
    points = style | {"linestyle": "", "markersize": 4, "alpha": 0.7, "clip_on": False}
    label = "_" if one.finite else named
    edge = [EDGE] * len(values)
    axes.plot(edge, values, label=label, transform=axes.get_yaxis_transform(), **points)
    axes.text(EDGE, -0.02, "∞", transform=axes.transAxes, ha="center", va="top")
