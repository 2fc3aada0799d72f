"""`zdp-bench results`: the records as a table, filtered, sorted, grouped."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from zdp_bench import records
from zdp_bench.errors import UserError, unknown
from zdp_bench.report.sheet import Sheet

TELLING = [
    "recipe",
    "variant",
    "seed",
    "metric",
    "value",
    "epsilon_claimed",
    "epsilon_tight",
    "delta",
    "steps",
    "provenance",
    "run",
]


def select(
    results: Path, filters: list[str], columns: str | None, sort: str | None, by: str | None = None
) -> pd.DataFrame:
    """Return the records that pass every `column=value` filter, or one line a group of them.

    Args:
        columns: comma-separated; the most telling by default.
        by: columns whose values make a group, comma-separated.

    Raises:
        UserError: a column does not exist, or a filter is not of the form column=value.
    """
    frame = records.frame(records.read_all(results))
    for condition in filters:
        column, equals, value = condition.partition("=")
        if not equals:
            raise UserError(
                f"'{condition}' is no filter: write column=value, such as recipe=phasemnist."
            )
        _require(column, frame)
        frame = frame[frame[column].astype(str) == value]
    shown = columns.split(",") if columns else TELLING
    if by:
        frame = _group(frame, by.split(","))
        shown = columns.split(",") if columns else list(frame.columns)
    if sort:
        _require(sort, frame)
        frame = frame.sort_values(sort, kind="stable")
    for column in shown:
        _require(column, frame)
    return frame[shown]


def _group(frame: pd.DataFrame, columns: list[str]) -> pd.DataFrame:
    """Return n, mean and deviation of `value` for each set of equal values of `columns`."""
    for column in columns:
        _require(column, frame)
    if "metric" not in columns:  # values of different metrics have no mean
        columns = [*columns, "metric"]
    grouped = frame.groupby(columns, dropna=False, sort=True)["value"]
    return grouped.agg(n="count", mean="mean", deviation="std").reset_index()


def _require(column: str, frame: pd.DataFrame) -> None:
    if column not in frame.columns:
        raise unknown("column", column, frame.columns)


def sheet(frame: pd.DataFrame) -> Sheet:
    """Return the frame ready to show; digests are shortened in its cells."""
    lines = [
        {str(key): None if value != value else value for key, value in line.items()}
        for line in frame.to_dict("records")
    ]
    title = _count(len(frame), "record")
    if {"n", "mean", "deviation"} <= set(frame.columns):
        title = f"{_count(len(frame), 'group')} of {_count(int(frame['n'].sum()), 'record')}"
    cells = [[_cell(column, value) for column, value in line.items()] for line in lines]
    return Sheet(title, list(frame.columns), cells, numbers=lines)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _cell(column: str, value: object) -> str:
    if value is None:
        return ""
    if column in ("run", "experiment", "data_digest", "ledger_digest", "commit"):
        return str(value)[:12]
    return f"{value:.4g}" if isinstance(value, float) else str(value)
