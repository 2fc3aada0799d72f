"""`zdp-bench results`: the records as a table that can be filtered, sorted and printed in four forms."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from rich.table import Table

from zdp_bench import records
from zdp_bench.errors import UserError, unknown

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
    """The records that pass every `column=value` filter, with the chosen columns; or one line a group, `by` columns.

    Raises:
        UserError: a column does not exist, or a filter is not of the form column=value.
    """
    frame = records.frame(records.read_all(results))

    def known(column: str) -> str:
        if column not in frame.columns:
            raise unknown("column", column, frame.columns)
        return column

    for condition in filters:
        column, equals, value = condition.partition("=")
        if not equals:
            raise UserError(
                f"'{condition}' is no filter: write column=value, such as recipe=phasemnist."
            )
        frame = frame[frame[known(column)].astype(str) == value]
    if by:
        frame = group(frame, by)
        columns = columns or ",".join(frame.columns)
    if sort:
        frame = frame.sort_values(known(sort), kind="stable")
    return frame[[known(column) for column in (columns.split(",") if columns else TELLING)]]


def group(frame: pd.DataFrame, by: str) -> pd.DataFrame:
    """One line for each set of equal values in the columns `by` (comma-separated): n, mean and standard deviation of `value`.

    Raises:
        UserError: a column does not exist.
    """
    columns = by.split(",")
    for column in columns:
        if column not in frame.columns:
            raise unknown("column", column, frame.columns)
    columns += [] if "metric" in columns else ["metric"]  # values of different metrics have no mean
    grouped = frame.groupby(columns, dropna=False, sort=True)["value"]
    return grouped.agg(n="count", mean="mean", deviation="std").reset_index()


def as_rich(frame: pd.DataFrame) -> Table:
    """The frame on a terminal; digests shortened."""
    grouped = {"n", "mean", "deviation"} <= set(frame.columns)
    title = _counted(int(frame["n"].sum()) if grouped else len(frame), "record")
    title = f"{_counted(len(frame), 'group')} of {title}" if grouped else title
    table = Table(title=title, title_justify="left")
    for column in frame.columns:
        table.add_column(column)
    for row in frame.itertuples(index=False):
        table.add_row(
            *(_cell(column, value) for column, value in zip(frame.columns, row, strict=True))
        )
    return table


def as_text(frame: pd.DataFrame, form: str) -> str:
    """The frame as Markdown, CSV or JSON."""
    if form == "csv":
        return frame.to_csv(index=False, lineterminator="\n").rstrip()
    if form == "json":
        return str(frame.to_json(orient="records", indent=1, force_ascii=False))
    lines = ["| " + " | ".join(frame.columns) + " |", "|" + " --- |" * len(frame.columns)]
    for row in frame.itertuples(index=False):
        lines.append(
            "| "
            + " | ".join(
                _cell(column, value) for column, value in zip(frame.columns, row, strict=True)
            )
            + " |"
        )
    return "\n".join(lines)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _cell(column: str, value: object) -> str:
    if value is None or value != value:  # NaN
        return ""
    if column in ("run", "experiment", "data_digest", "ledger_digest", "commit"):
        return str(value)[:12]
    return f"{value:.4g}" if isinstance(value, float) else str(value)
