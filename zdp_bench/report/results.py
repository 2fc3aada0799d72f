"""`zdp-bench results`: the records as a table, filtered, sorted, grouped.

A column is one of `records.COLUMNS`, a metric, or a key of a run's configuration: `optimizer.lr`.
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

DIFFERS = "differs"  # a column: the values of what differs between the runs of one recipe
TIME = "started_utc"
DEFAULT = ("recipe", DIFFERS, "seed", "metric", "value", "epsilon_tight", TIME, "run")
LABELS = ("name", "tags")  # shown where a run has them
IMPORTANT = (*LABELS, "recipe", DIFFERS, "value", "epsilon_tight", "seed", "run", TIME)
# What the ε of a column protects, by another column.
UNITS = {"epsilon_patient": "privacy_unit"}
DIGESTS = ("run", "experiment", "data_digest", "ledger_digest", "commit")
# recorded keys that change no result
NO_RESULT = ("claims.", "trainer.micro_batch", "privacy.total_budget")


def read_frame(runs: Sequence[Record]) -> tuple[pd.DataFrame, list[str]]:
    """Return one row a record, and which columns are keys of the configuration."""
    frame = records.frame(list(runs))
    known = set(frame.columns)
    keys: set[str] = set()
    metrics: dict[str, None] = {}  # each once, in order
    cells = []
    for run in runs:
        settings = flatten(run.config)
        keys |= {key for key in settings if not key.startswith(NO_RESULT)}
        metrics |= dict.fromkeys(run.metrics)
        cells.append({**settings, **run.metrics})
    keys -= known
    more = [*sorted(keys), *(name for name in metrics if name not in known)]
    rows = [[row.get(column) for column in more] for row in cells]
    return frame.join(pd.DataFrame(rows, columns=more, dtype=object)), sorted(keys)


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a nested configuration by dotted key; a list becomes its JSON text."""
    flat = records.flatten(config)
    for key, value in flat.items():
        if isinstance(value, list):
            flat[key] = json.dumps(value)
    return flat


def keep(frame: pd.DataFrame, filters: Sequence[str]) -> pd.DataFrame:
    """Return the rows that pass every filter, `column=value` or `column=value,value`."""
    for condition in filters:
        column, equals, value = condition.partition("=")
        if not equals:
            raise UserError(
                f"'{condition}' is not a filter: write column=value, such as recipe=phasemnist."
            )
        cells = frame[find(column, frame)]
        words = re.split(r",(?![^\[]*\])", value)  # a comma within [4,2] stays
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
    """Return the name of a column."""
    if column not in frame.columns:
        raise unknown(what, column, frame.columns)
    return column


def tell_differences(frame: pd.DataFrame, keys: Sequence[str]) -> list[str]:
    """Return each run's values of what differs within its recipe: 'dp_sgd, lr 0.1'."""
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
    """Return a value as a word; null, NaN, false and 0 are the same."""
    is_set = value and value == value
    return str(value) if is_set else ""


def _differing(words: dict[str, list[str]]) -> list[str]:
    """Return the keys whose values differ; null, false, 0 and missing are the same, as words.

    Where the name of a plug-in differs, its options count only if they differ under one name.
    """
    differing = [key for key, cells in words.items() if len({*cells}) > 1]

    def is_settled(key: str) -> bool:
        name = f"{key.partition('.')[0]}.name"
        if key == name or name not in differing:
            return False
        pairs = {*zip(words[name], words[key], strict=True)}
        return len(pairs) == len({*words[name]})

    return [key for key in differing if not is_settled(key)]


SELF_EXPLAINING = ("name", "variant", "provenance")  # keys whose values say what they are of


def _join_values(values: dict[str, Any]) -> str:
    """Return values with the last part of their keys: 'dp_sgd, lr 0.1'."""
    parts: dict[str, None] = {}  # each once
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
    """Return the records that pass every filter, the newest first, or one line a group of them.

    Args:
        columns: comma-separated; with `by`, what is averaged (default: `value`).
        by: columns whose values make a group, comma-separated.
        most: the lines to show; CSV and JSON have all columns' numbers of these.
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
    title, notes = _count(len(frame), "record"), _unfinished(results, filters)
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
    """Return the columns that are shown unless others are named."""
    labels = [name for name in LABELS if frame[name].notna().any()]
    return [DEFAULT[0], *labels, *DEFAULT[1:]]


def _group(frame: pd.DataFrame, by: list[str], measures: list[str]) -> pd.DataFrame:
    """Return n, and mean and deviation of each measure, for each set of equal values of `by`."""
    if "value" in measures and "metric" not in by:  # values of different metrics have no mean
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
    """Reject a mean of ε that protect different units, or hold at different δ."""
    for column in (UNITS.get(name, "epsilon_of"), "delta"):
        for _, runs in groups:
            values = [str(value) for value in runs[column].unique()]
            if len(values) > 1:
                raise UserError(
                    f"{name}: the runs of a group have {column} {' and '.join(values)}, so their "
                    f"ε have no mean. Add {column} to --by, or filter: {column}={values[0]}."
                )


def _unfinished(results: Path, filters: Sequence[str]) -> list[str]:
    """Return a sentence that names the runs without a record, of the recipes asked for."""
    recipes: list[str] = []  # empty: all
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
    """True if a cell, or one of a run's tags, is one of the words that the user typed."""
    cells = cell.split(", ") if column == "tags" and isinstance(cell, str) else [cell]
    return any(_equals(value, word) for value, word in product(cells, words))


def _equals(cell: Any, word: str) -> bool:
    """True if a cell is what the user typed: `1e-5` is 0.00001, `null` nothing, `*` any text."""
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
    """Return a column that can be sorted: as it is if it is of numbers, else as text."""
    numbers = pd.to_numeric(column, errors="coerce")
    if (numbers.isna() & column.notna()).any():
        return column.astype(str).where(column.notna())
    return numbers


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def cell(column: str, value: Any) -> str:
    """Return a value as it is shown; a digest is cut to eight digits."""
    if value is None or value != value:
        return ""
    if column in DIGESTS:
        return str(value)[:8]
    if column == TIME:
        return str(value)[:16].replace("T", " ")
    if column.startswith("epsilon") and isinstance(value, int | float):
        return show_epsilon(value, at_least=column.endswith("at_least"))
    return f"{value:.4g}".replace("inf", "∞") if isinstance(value, float) else str(value)
