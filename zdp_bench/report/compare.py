"""`zdp-bench compare`: two runs, or the runs of two experiments, side by side."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from zdp_bench.errors import UserError
from zdp_bench.privacy.statement import show_epsilon
from zdp_bench.records import Record, is_named
from zdp_bench.report.cells import deduplicate
from zdp_bench.report.comparisons import compare_pairs
from zdp_bench.report.number_format import mean_and_deviation
from zdp_bench.report.results import NO_RESULT, flatten, keep, read_frame, tell_differences
from zdp_bench.report.sheet import Sheet

MAX_LISTED = 6  # runs that an error names
# The space before a filter `column=`, rather than one in a value such as 'name=first run'
_FILTER_START = re.compile(r" +(?=[\w.]+=)")

Side = Sequence[Record]  # one run, or all seeds of one experiment


def find_runs(word: str, all_records: Sequence[Record]) -> list[Record]:
    """Return the runs that a word names: one run, or all seeds of one experiment.

    A run that several recipes share is returned once.

    Args:
        word: a recipe, RECIPE/RUN, the first digits of a run's digest, a run's name, or filters
            separated by spaces (see `results.keep`).
        all_records: the records to search.

    Raises:
        UserError: the word names no run, or runs that differ in more than their seed.
    """
    if "=" in word:
        frame, _ = read_frame(all_records)
        rows = keep(frame, _FILTER_START.split(word)).index
        runs = [all_records[row] for row in rows]
    else:
        runs = [run for run in all_records if is_named(word, run.recipe, run.run)]
        if not runs:
            runs = [run for run in all_records if run.labels.name == word]
    runs = deduplicate(runs)
    if not runs:
        raise UserError(
            f"{word}: does not match any run. Give a recipe, or the first digits of a run; "
            "`zdp-bench results` lists them."
        )
    # Two runs of one experiment, data set and seed had other code or other starting weights.
    has_repeated_seed = len({run.seed for run in runs}) < len(runs)
    if has_repeated_seed or len({(run.experiment, run.data.digest) for run in runs}) > 1:
        raise _ambiguous(word, runs)
    return runs


def _ambiguous(word: str, runs: Side) -> UserError:
    """Return the error for a word that names runs that differ in more than their seed."""
    differences = tell_differences(*read_frame(runs))
    pairs = zip(runs, differences, strict=True)
    names = [f"{_name([run])} ({difference})" for run, difference in pairs]
    listed = ", ".join(names[:MAX_LISTED])
    if len(names) > MAX_LISTED:
        listed += ", ..."
    recipe = runs[0].recipe
    return UserError(
        f"{word}: names {len(runs)} runs that differ in more than their seed. Name one, or "
        f"filter them ('{recipe}' is 'recipe={recipe} key=value'): {listed}."
    )


def sheet(first: Side, second: Side, results: Path) -> Sheet:
    """Return the facts, metrics and different settings of two sides, one row each.

    Notes below the table state whether the sides differ by more than chance.

    Args:
        first, second: the sides, as `find_runs` returns them.
        results: results folder.
    """
    rows = []
    for name, fact in FACTS.items():
        rows.append([name, _list_values(first, fact), _list_values(second, fact)])
    metrics: dict[str, None] = {}  # names without repetition, in order
    for run in (*first, *second):
        metrics |= dict.fromkeys(run.metrics)
    for metric in metrics:
        rows.append([f"test {metric}", _spread(first, metric), _spread(second, metric)])
    rows += _configuration(first, second)
    rows = [row for row in rows if any(row[1:])]
    numbers = []
    for name, value, other_value in rows:
        numbers.append({"what": name, "first": value, "second": other_value})
    return Sheet(
        "Comparison",
        ("", _name(first), _name(second)),
        rows,
        _notes(first, second, results),
        numbers=numbers,
    )


FACTS: dict[str, Callable[[Record], str]] = {
    "name": lambda run: run.labels.name or "",
    "tags": lambda run: ", ".join(run.labels.tags or ()),
    "notes": lambda run: run.labels.notes or "",
    "seed": lambda run: str(run.seed),
    "data": lambda run: run.data.shown,
    "tight ε": lambda run: show_epsilon(run.privacy.epsilon_tight),
    "claimed ε": lambda run: show_epsilon(run.privacy.epsilon_claimed),
    "ε per unit": lambda run: show_epsilon(run.privacy.epsilon_patient),
    "δ": lambda run: f"{run.privacy.delta:g}",
    "z": lambda run: f"{run.privacy.z:.4g}",
    "steps": lambda run: f"{run.privacy.steps:,}",
}


def _name(side: Side) -> str:
    """Return the heading of a side: 'RECIPE/RUN', or 'RECIPE' for several runs."""
    run = side[0]
    return run.recipe if len(side) > 1 else f"{run.recipe}/{run.run[:8]}"


def _list_values(side: Side, fact: Callable[[Record], str]) -> str:
    """Return the distinct values of a fact among the runs of a side, separated by commas."""
    return ", ".join(dict.fromkeys(map(fact, side)))


def _spread(side: Side, metric: str) -> str:
    """Return the metric of a side: '0.9127', or '0.9051 ± 0.0066 (n = 3)' for several runs.

    Empty if a run does not have the metric.
    """
    values = [run.metrics[metric] for run in side if metric in run.metrics]
    if len(values) < len(side):
        return ""
    return mean_and_deviation(values, "").removesuffix(" (n = 1)")


def _configuration(first: Side, second: Side) -> list[list[str]]:
    """Return a row for each setting in which the sides differ.

    A key that one side lacks counts as null, false or 0: an older record lacks newer options, which
    are off.
    """
    settings, other_settings = flatten(first[0].config), flatten(second[0].config)
    rows = []
    for key in settings | other_settings:
        if key in ("seed", "recipe") or key.startswith(NO_RESULT):
            continue
        value, other_value = settings.get(key), other_settings.get(key)
        is_missing = key not in settings or key not in other_settings
        is_off = is_missing and not value and not other_value
        if value != other_value and not is_off:
            rows.append([key, _show_value(value), _show_value(other_value)])
    return rows


def _show_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)


def _notes(first: Side, second: Side, results: Path) -> list[str]:
    """Return the result of a test on the headline metric, or why the sides cannot be tested."""
    metric = first[0].headline.name
    if len({run.data.digest for run in (*first, *second)}) > 1:
        return ["The two use different data, so no test compares their metrics."]
    if any(metric not in run.metrics for run in (*first, *second)):
        return [f"Only one of the two has {metric}, so no test compares them."]
    values = [run.metrics[metric] for run in (*first, *second)]
    if not all(map(math.isfinite, values)):
        return [f"No test: a value of {metric} is not finite."]
    sentences = compare_pairs(metric, {"first": first, "second": second}, results)
    tests = [sentence for sentence in sentences if " against " in sentence]
    if tests:
        return tests
    requirement = "two seeds on each side"
    if metric == "roc_auc":
        requirement = "a seed that both sides have, with scores.csv"
    return [f"No test: {metric} needs {requirement}."]
