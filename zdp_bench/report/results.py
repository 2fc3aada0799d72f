"""`zdp-bench results`: the records as a table, filtered, sorted, grouped.

A column is one of `records.COLUMNS` or any key of a run's configuration, such as `optimizer.lr`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import pandas as pd

from zdp_bench import records
from zdp_bench.errors import NEAREST, UserError, suggestion, unknown
from zdp_bench.records import Record
from zdp_bench.report import names
from zdp_bench.report.number_format import epsilon
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
# Of these, CSV and JSON have every one; a table only says their names if they differ.
ASIDE = ("variant", "delta", "steps", "provenance")
STAY = ("value", "run")  # shown also if they are the same in all records
VITAL = (*STAY, "epsilon_tight")  # and have room on a narrow terminal
MOST = 4  # configuration keys that are shown unasked, of one recipe
DIFFERS = "differs"  # of several recipes, one column for all of them
CALIBRATED = ("privacy.target_epsilon", "privacy.claimed_epsilon")
NOISE = "algorithm.noise_multiplier"
OVER = "averages_over"
# recorded keys that change no result
NO_RESULT = ("claims.", "trainer.micro_batch", "privacy.total_budget")


@dataclass(frozen=True)
class Selection:
    """Records, or groups of them, with the columns asked for.

    Attributes:
        same: columns of equal values, which a table names once, below it.
        aside: columns that differ, and which a table only names below it.
        notes: sentences below the table.
    """

    frame: pd.DataFrame
    same: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    aside: tuple[str, ...] = ()


def select(
    results: Path, filters: list[str], columns: str | None, sort: str | None, by: str | None = None
) -> Selection:
    """Return the records that pass every `column=value` filter, or one line a group of them.

    Args:
        columns: comma-separated; by default the most telling, and the configuration keys in which
            runs of one recipe differ.
        by: columns whose values make a group, comma-separated.

    Raises:
        UserError: a column does not exist, or a filter is not of the form column=value.
    """
    frame, keys = read_frame(records.read_all(results))
    for condition in filters:
        column, equals, value = condition.partition("=")
        if not equals:
            raise UserError(
                f"'{condition}' is no filter: write column=value, such as recipe=phasemnist."
            )
        column = _find(column, frame)
        passing = frame[[_equals(cell, value) for cell in frame[column]]]
        if passing.empty:
            raise _none_has(column, value, frame[column])
        frame = passing
    same: tuple[str, ...] = ()
    aside: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    if by:
        frame, notes = _group(frame, [_find(one, frame) for one in by.split(",")], keys)
        shown = list(frame.columns)
    else:
        frame, shown, left = _telling(frame, keys)
        if _differs(frame["epsilon_of"]):
            shown.insert(shown.index("epsilon_tight") + 1, "epsilon_of")
        if not columns and len(frame) > 1:
            same = tuple(c for c in shown if c not in STAY and not _differs(frame[c]))
            aside = tuple(c for c in ASIDE if c not in same)
        if more := [*aside, *left]:
            notes = (f"Also different: {', '.join(more)}; --columns shows them.",)
    if columns:
        shown, notes = [_find(one, frame) for one in columns.split(",")], notes if by else ()
    if sort:
        frame = frame.sort_values(_find(sort, frame), kind="stable", key=_sortable)
    return Selection(frame[shown], same, notes, aside)


def read_frame(found: Sequence[Record]) -> tuple[pd.DataFrame, list[str]]:
    """Return one row a record, and which columns are configuration keys."""
    frame = records.frame(list(found))
    flat = [flatten(record["config"]) for record in found]
    named = {key for one in flat for key in one if not key.startswith(NO_RESULT)}
    keys = sorted(named - set(frame.columns))
    settings = pd.DataFrame(
        [[one.get(key) for key in keys] for one in flat], columns=keys, dtype=object
    )
    return pd.concat([frame, settings], axis=1), keys


def flatten(config: dict[str, Any]) -> dict[str, Any]:
    """Return a nested configuration by dotted key; a list becomes its JSON text."""
    return {
        key: json.dumps(value) if isinstance(value, list) else value
        for key, value in records.flatten(config).items()
    }


def differing(frame: pd.DataFrame, keys: Sequence[str]) -> list[str]:
    """Return the columns of `keys` whose values differ, but for what the name of a plug-in settles.

    A key that is null, false or not there is off, as it is for a run's digest.
    """
    found = [key for key in keys if _differs(frame[key])]
    named = {key.removesuffix("name"): key for key in found if key.endswith(".name")}
    return [
        key
        for key in found
        if (name := named.get(f"{key.partition('.')[0]}.")) in (None, key)
        or any(_differs(of_one) for _, of_one in frame[key].groupby(frame[name].map(str)))
    ]


def _differs(column: pd.Series) -> bool:
    values = {None if cell is False or cell != cell else cell for cell in column}
    return len({None if value is None else str(value) for value in values}) > 1


def _telling(frame: pd.DataFrame, keys: list[str]) -> tuple[pd.DataFrame, list[str], list[str]]:
    """Return the records, the columns that are shown unasked, and the keys that also differ.

    Runs of one recipe show the keys in which they differ; those of several have the column
    `differs`, in which each run says its values of what differs within its recipe.
    """
    at = TELLING.index("metric")
    if frame["recipe"].nunique() <= 1:
        found = _causes(frame, differing(frame, keys))
        return frame, [*TELLING[:at], *found[:MOST], *TELLING[at:]], found[MOST:]
    frame = frame.assign(**{DIFFERS: tell_differences(frame, keys)})
    return frame, [*TELLING[:at], DIFFERS, *TELLING[at:]], []


def tell_differences(frame: pd.DataFrame, keys: Sequence[str]) -> list[str]:
    """Return each run's values of what differs within its recipe, 'dp_sgd, lr 0.1'."""
    told: dict[Any, str] = {}
    for _, runs in frame.groupby("recipe"):
        own = _causes(runs, differing(runs, ["variant", "provenance", *keys]))
        lines = runs[own].to_dict("records")
        told |= {at: _tell(line, own) for at, line in zip(runs.index, lines, strict=True)}
    return [told[at] for at in frame.index]


def _causes(frame: pd.DataFrame, keys: list[str]) -> list[str]:
    """Return keys, names first; the noise is left out if it follows from an ε in every run."""
    calibrated = [key for key in CALIBRATED if key in frame]
    by_hand = frame[frame[calibrated].isna().all(axis=1)] if calibrated else frame
    follows = calibrated and not (NOISE in frame and _differs(by_hand[NOISE]))
    return sorted(
        (key for key in keys if key != NOISE or not follows), key=lambda key: key[-5:] != ".name"
    )


def _tell(run: dict[Any, Any], keys: list[str]) -> str:
    """Return a run's values of some keys, 'dp_sgd, lr 0.1'."""
    on = [(key, run[key]) for key in keys if not (run[key] is None or run[key] != run[key])]
    if any(key in CALIBRATED for key, _ in on):
        on = [(key, value) for key, value in on if key != NOISE]
    plain = (".name", "variant", "provenance")  # whose values say what they are of
    return ", ".join(
        _cell(key, value) if key.endswith(plain) else f"{names.key(key)} {_cell(key, value)}"
        for key, value in on
    )


def _group(
    frame: pd.DataFrame, columns: list[str], keys: list[str]
) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """Return n, mean and deviation of `value` for each set of equal values of `columns`.

    What else differs within a group, but for the seed, stands in the column `averages_over`, which
    is there if it does in any group.
    """
    if "metric" not in columns:  # values of different metrics have no mean
        columns = [*columns, "metric"]
    grouped = frame.groupby(columns, dropna=False, sort=True)
    made = grouped["value"].agg(n="count", mean="mean", deviation="std").reset_index()
    watched = [key for key in ("recipe", "data_digest", *keys) if key not in columns]
    over = [", ".join(differing(runs, watched)) for _, runs in grouped]
    if not any(over):
        return made, ()
    several = sum(map(bool, over))
    note = (
        f"{several} of {len(over)} groups average over runs that differ in more than their seed: "
        f"{OVER} says in what; add it to --by to tell them apart."
    )
    return made.assign(**{OVER: over}), (note,)


def _none_has(column: str, value: str, cells: pd.Series) -> UserError:
    """Return the error for a filter that no record passes, with the nearest values there are."""
    there = sorted({_cell(column, cell) or "null" for cell in cells})
    near = get_close_matches(value, there, NEAREST, cutoff=0)
    return UserError(
        f"{column}={value}: none of {_count(len(cells), 'record')} has it."
        f"{suggestion(value, there)} There is {', '.join(near)}{', ...' * (len(there) > NEAREST)}."
    )


def _equals(cell: Any, word: str) -> bool:
    """True if a cell is what the user typed: `1e-5` is 0.00001, `null` nothing."""
    if cell is None or cell != cell:
        return word.lower() in ("", "none", "null", "nan")
    try:
        return bool(float(cell) == float(word))
    except (TypeError, ValueError):
        return str(cell).replace(" ", "").lower() == word.replace(" ", "").lower()


def _sortable(column: pd.Series) -> pd.Series:
    """Return a column that can be sorted: as it is if it is of numbers, else as text."""
    numbers = pd.to_numeric(column, errors="coerce")
    return column.astype(str) if (numbers.isna() & column.notna()).any() else numbers


def _find(column: str, frame: pd.DataFrame) -> str:
    """Return the column of a name, or of the last part or the sign of one: `lr`, `σ`."""
    near = [c for c in frame.columns if column in (c.rpartition(".")[2], names.key(c))]
    if column in frame.columns or len(near) != 1:
        near = [column]
    if near[0] not in frame.columns:
        raise unknown("column", column, frame.columns)
    return str(near[0])


def sheet(selection: Selection, most: int | None = None) -> Sheet:
    """Return a selection ready to show, `most` lines of it; digests are shortened in its cells."""
    frame = selection.frame if most is None else selection.frame.head(most)
    lines = [
        {str(key): None if value != value else value for key, value in line.items()}
        for line in frame.to_dict("records")
    ]
    title = _count(len(selection.frame), "record")
    if {"n", "mean", "deviation"} <= set(frame.columns):
        total = _count(int(selection.frame["n"].sum()), "record")
        title = f"{_count(len(selection.frame), 'group')} of {total}"
    left_out = (*selection.same, *selection.aside)
    shown = [column for column in frame.columns if column not in left_out]
    cells = [[_cell(column, line[column]) for column in shown] for line in lines]
    once = [f"{c} {_cell(c, lines[0][c])}" for c in selection.same if _cell(c, lines[0][c])]
    notes = [f"The same in all: {', '.join(once)}."] if once else []
    if len(lines) < len(selection.frame):
        notes.append(
            f"The first {len(lines)}; filter or group them (--by), or print all (--format csv)."
        )
    notes = [*notes, *selection.notes]
    return Sheet(title, names.short(shown), cells, notes, numbers=lines, one_line=True, vital=VITAL)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _cell(column: str, value: object) -> str:
    if value is None:
        return ""
    if column in ("run", "experiment", "data_digest", "ledger_digest", "commit"):
        return str(value)[:8]
    if column.startswith("epsilon") and isinstance(value, int | float):
        return epsilon(value, at_least=column.endswith("at_least"))
    return f"{value:.4g}".replace("inf", "∞") if isinstance(value, float) else str(value)
