"""`zdp-bench results`: a table of the records, which can be filtered, sorted and grouped.

A column is one of `records.COLUMNS`, a metric, or a key of the configuration, such as
`optimizer.lr`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd

from zdp_bench import records
from zdp_bench.errors import UserError, suggestion, unknown
from zdp_bench.privacy.statement import show_epsilon
from zdp_bench.records import Record
from zdp_bench.report.sheet import Sheet

DIFFERS = "differs"  # a column: the settings in which the runs of one recipe differ
TIME = "started_utc"
DEFAULT = ("recipe", DIFFERS, "seed", "metric", "value", "epsilon_tight", TIME, "run")
LABELS = ("name", "tags")  # columns that are shown if a run has them
IMPORTANT = (*LABELS, "recipe", DIFFERS, "value", "epsilon_tight", "seed", "run", TIME)
# For a column of ε, the column that states the unit it protects. Default: `epsilon_of`.
UNITS = {"epsilon_patient": "privacy_unit"}
DIGESTS = ("run", "experiment", "data_digest", "ledger_digest", "commit")
# Beginnings of recorded keys that do not affect results
NO_RESULT = ("claims.", "trainer.micro_batch", "privacy.total_budget")


def read_frame(runs: Sequence[Record]) -> tuple[pd.DataFrame, list[str]]:
    """Return a frame with one row per record, and which columns are keys of the configuration."""
    frame = records.frame(list(runs))
    known = set(frame.columns)
    keys: set[str] = set()
    metrics: dict[str, None] = {}  # names without repetition, in order
    cells = []
    for run in runs:
        settings = flatten(run.config)
        keys |= {key for key in settings if not key.startswith(NO_RESULT)}
        metrics |= dict.fromkeys(run.metrics)
        cells.append({**settings, **run.metrics})
    keys -= known
    added = [*sorted(keys), *(name for name in metrics if name not in known)]
    rows = [[row.get(column) for column in added] for row in cells]
    return frame.join(pd.DataFrame(rows, columns=added, dtype=object)), sorted(keys)


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a nested configuration as a flat one with dotted keys; lists become JSON text."""
    flat = records.flatten(config)
    for key, value in flat.items():
        if isinstance(value, list):
            flat[key] = json.dumps(value)
    return flat


def keep(frame: pd.DataFrame, filters: Sequence[str]) -> pd.DataFrame:
    """Return the rows that pass every filter.

    Args:
        filters: `column=value` or `column=value,value`.

    Raises:
        UserError: A filter has no "=", names no column, or no row passes it.
    """
    for condition in filters:
        column, equals, value = condition.partition("=")
        if not equals:
            raise UserError(
                f"'{condition}' is not a filter: write column=value, such as recipe=phasemnist."
            )
        cells = frame[find(column, frame)]
        words = re.split(r",(?![^\[]*\])", value)  # not at the comma of [4,2]
        passing = frame[[_passes(column, cell, words) for cell in cells]]
        if passing.empty:
            values = {cell(column, value) or "null" for value in cells}
            raise UserError(
                f"{condition}: none of {_count(len(frame), 'record')} has it."
                f"{suggestion(value, values)}"
            )
        frame = passing
    return frame


def find(column: str, frame: pd.DataFrame, what: str = "column") -> str:
    """Return `column` if the frame has it; otherwise raise an error that suggests another."""
    if column not in frame.columns:
        raise unknown(what, column, frame.columns)
    return column


def tell_differences(frame: pd.DataFrame, keys: Sequence[str]) -> list[str]:
    """Return each run's values of the settings that differ within its recipe: 'dp_sgd, lr 0.1'."""
    columns = {key: frame[key].tolist() for key in ("variant", "provenance", *keys)}
    rows_of_recipe: dict[str, list[int]] = {}
    for row, recipe in enumerate(frame["recipe"]):
        rows_of_recipe.setdefault(recipe, []).append(row)
    differences = [""] * len(frame)
    for rows in rows_of_recipe.values():
        words = {key: [_as_word(cells[row]) for row in rows] for key, cells in columns.items()}
        differing = _differing(words)
        for row in rows:
            values = {key: columns[key][row] for key in differing if key != "seed"}
            differences[row] = _join_values(values)
    return differences


def _as_word(value: Any) -> str:
    """Return a value as text; null, NaN, false and 0 are all empty."""
    is_set = value and value == value  # NaN differs from itself
    return str(value) if is_set else ""


def _differing(words: dict[str, list[str]]) -> list[str]:
    """Return the keys whose values differ.

    If a plug-in's name differs, its options are left out unless they differ under the same name.

    Args:
        words: values of each key as texts, which `_as_word` returns.
    """
    differing = [key for key, cells in words.items() if len({*cells}) > 1]

    def follows_from_name(key: str) -> bool:
        name = f"{key.partition('.')[0]}.name"
        if key == name or name not in differing:
            return False
        pairs = {*zip(words[name], words[key], strict=True)}
        return len(pairs) == len({*words[name]})

    return [key for key in differing if not follows_from_name(key)]


SELF_EXPLAINING = ("name", "variant", "provenance")  # keys whose values need no label


def _join_values(values: dict[str, Any]) -> str:
    """Return values, labelled with the last part of their keys: 'dp_sgd, lr 0.1'."""
    parts: dict[str, None] = {}  # without repetition, in order
    for key, value in values.items():
        shown = cell(key, value)
        last = key.rpartition(".")[2]
        if shown:
            parts[shown if last in SELF_EXPLAINING else f"{last} {shown}"] = None
    return ", ".join(parts)


def sheet(
    results: Path,
    filters: Sequence[str] = (),
    columns: str | None = None,
    sort: str | None = None,
    *,
    by: str | None = None,
    descending: bool = False,
    most: int | None = None,
) -> Sheet:
    """Return a sheet of the records that pass every filter, the newest first, or of groups of them.

    Args:
        results: the results folder.
        filters: see `keep`.
        columns: columns to show, separated by commas. With `by`, columns to average; default:
            `value`.
        sort: column to sort by.
        by: columns, separated by commas. Records with equal values in them form a group, which has
            one line.
        descending: whether to sort from the largest value.
        most: maximum number of lines.

    Raises:
        UserError: A column is unknown, no record passes a filter, or the ε of a group have no mean.
    """
    frame, keys = read_frame(records.read_all(results))
    if len(frame):
        frame = keep(frame, filters)
    frame[DIFFERS] = tell_differences(frame, keys)
    if columns:
        names = columns.split(",")
    else:
        names = ["value"] if by else _default_columns(frame)
    shown = [find(name, frame) for name in names]
    title = _count(len(frame), "record")
    notes = _unfinished(results, filters)
    if by:
        frame = _group(frame, [find(name, frame) for name in by.split(",")], shown)
        title = f"{_count(len(frame), 'group')} of {title}"
        shown = list(frame.columns)
    elif not sort:
        sort, descending = TIME, True
    if sort:
        column = find(sort, frame)
        frame = frame.sort_values(column, kind="stable", key=_sortable, ascending=not descending)
    if most is not None and len(frame) > most:
        notes.append(f"The first {most}; filter or group them (--by), or add --format csv for all.")
        frame = frame.head(most)
    values = frame[shown].astype(object)
    lines: list[dict[Any, Any]] = values.where(values.notna(), None).to_dict("records")
    cells = [[cell(name, line[name]) for name in shown] for line in lines]
    return Sheet(title, shown, cells, notes, numbers=lines, important=IMPORTANT)


def _default_columns(frame: pd.DataFrame) -> list[str]:
    """Return the columns to show if the user names none."""
    labels = [name for name in LABELS if frame[name].notna().any()]
    return [DEFAULT[0], *labels, *DEFAULT[1:]]


def _group(frame: pd.DataFrame, by: list[str], measures: list[str]) -> pd.DataFrame:
    """Return one row per group: its size n, and mean and standard deviation of each measure."""
    if "value" in measures and "metric" not in by:  # a mean over different metrics has no meaning
        by = [*by, "metric"]
    measures = [name for name in measures if name not in by]
    frame = frame.assign(**{name: pd.to_numeric(frame[name], errors="coerce") for name in measures})
    groups = frame.groupby(by, dropna=False)
    for name in measures:
        if name.startswith("epsilon"):
            _require_comparable(name, groups)
    columns: dict[str, Any] = {"n": groups["run"].count()}
    for name in measures:
        columns[name] = groups[name].mean()
        columns[f"{name}_sd"] = groups[name].std()
    return pd.DataFrame(columns).reset_index()


def _require_comparable(name: str, groups: Any) -> None:
    """Reject a mean of ε that protect different units or hold at different δ."""
    for column in (UNITS.get(name, "epsilon_of"), "delta"):
        for _, runs in groups:
            values = [str(value) for value in runs[column].unique()]
            if len(values) > 1:
                raise UserError(
                    f"{name}: the runs of a group have {column} {' and '.join(values)}, so their "
                    f"ε have no mean. Add {column} to --by, or filter: {column}={values[0]}."
                )


def _unfinished(results: Path, filters: Sequence[str]) -> list[str]:
    """Return a sentence that names the unfinished runs of the filtered recipes, if any."""
    recipes: list[str] = []  # if empty, all recipes
    for condition in filters:
        column, _, value = condition.partition("=")
        if column == "recipe":
            recipes += value.split(",")
    unfinished = []
    for spending in sorted(results.glob("runs/*/*/spending.json")):
        home = spending.parent
        recipe = home.parent.name
        if recipes and recipe not in recipes:
            continue
        if not (home / "record.json").exists() and not records.is_deleted(home):
            unfinished.append(f"{recipe}/{home.name[:8]}")
    if not unfinished:
        return []
    return [f"Not finished: {', '.join(unfinished)}; the same command continues it."]


def _passes(column: str, cell: Any, words: Sequence[str]) -> bool:
    """Return True if a cell, or one of a run's tags, matches one of the user's words."""
    cells = cell.split(", ") if column == "tags" and isinstance(cell, str) else [cell]
    return any(_equals(value, word) for value, word in product(cells, words))


def _equals(cell: Any, word: str) -> bool:
    """Return True if a cell matches a word: `1e-5` is 0.00001, `null` is empty, `*` is any text."""
    if "*" in word and isinstance(cell, str):
        pattern = ".*".join(map(re.escape, word.split("*")))
        return re.fullmatch(pattern, cell, flags=re.IGNORECASE | re.DOTALL) is not None
    if cell is None or cell != cell:
        return word.lower() in ("", "none", "null", "nan")
    try:
        return bool(float(cell) == float(word))
    except (TypeError, ValueError):
        return str(cell).replace(" ", "").lower() == word.replace(" ", "").lower()


def _sortable(column: pd.Series) -> pd.Series:
    """Return a column as numbers if all its values are numbers, otherwise as text, for sorting."""
    numbers = pd.to_numeric(column, errors="coerce")
    if (numbers.isna() & column.notna()).any():
        return column.astype(str).where(column.notna())
    return numbers


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def cell(column: str, value: Any) -> str:
    """Return the text of a value in a column; digests are shortened to eight digits."""
    if value is None or value != value:
        return ""
    if column in DIGESTS:
        return str(value)[:8]
    if column == TIME:
        return str(value)[:16].replace("T", " ")
    if column.startswith("epsilon") and isinstance(value, int | float):
        return show_epsilon(value, at_least=column.endswith("at_least"))
    return f"{value:.4g}".replace("inf", "∞") if isinstance(value, float) else str(value)
