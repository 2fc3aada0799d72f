"""`zdp-bench results`: a table of the records, which can be filtered, sorted and grouped.

A column is one of `records.COLUMNS`, a metric, or a key of the configuration, such as
`optimizer.lr`. A metric with the name of another column, such as `precision`, is the column
`metrics.precision`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from itertools import product
from math import isnan
from pathlib import Path
from typing import Any

import pandas as pd

from zdp_bench import records
from zdp_bench.errors import UserError, suggestion, unknown
from zdp_bench.privacy.statement import show_epsilon
from zdp_bench.records import Record
from zdp_bench.registry import lookup
from zdp_bench.report.sheet import Sheet

DIFFERS = "differs"  # column with the settings in which the runs of a recipe differ
COUNT = "n"  # column of groups with the number of runs behind their means
TIME = "started_utc"
DEFAULT = ("recipe", DIFFERS, "seed", "metric", "value", "epsilon_tight", TIME, "run")
LABELS = ("name", "tags")  # shown by default if a run has them
IMPORTANT = (*LABELS, "recipe", DIFFERS, "value", "epsilon_tight", "seed", "run", TIME)
# For a column of ε, the column that states the unit it protects. Default: `epsilon_of`.
UNITS = {"epsilon_patient": "privacy_unit"}
MIXED_DATA = "Some groups have runs of one experiment on different data: add data_digest to --by."
REPEATED_SEEDS = (
    "Some groups have several runs of one experiment and seed, with other code of a plug-in or "
    "other starting weights: filter them, or add run to --by."
)
FOLD = "dataset.fold"  # option of data sets that chooses the part to test on
DIGESTS = ("run", "experiment", "data_digest", "ledger_digest", "commit")
# Prefixes of recorded keys that do not affect results
NO_RESULT = ("claims.", "trainer.micro_batch", "privacy.total_budget")


def read_frame(runs: Sequence[Record]) -> tuple[pd.DataFrame, list[str]]:
    """Return the records as a data frame.

    Returns:
        A frame with one row per record, and the names of the columns that are keys of the
        configuration.
    """
    frame = records.frame(list(runs))
    settings_of_runs = [flatten(run.config) for run in runs]
    keys = {key for settings in settings_of_runs for key in settings}
    new_keys = sorted(key for key in keys - set(frame.columns) if not key.startswith(NO_RESULT))
    names = dict.fromkeys(name for run in runs for name in run.metrics)  # in order
    taken = keys.union(frame.columns, [DIFFERS, COUNT])
    metrics = {name: f"metrics.{name}" if name in taken else name for name in names}
    rows = []
    for run, settings in zip(runs, settings_of_runs, strict=True):
        cells = [settings.get(key) for key in new_keys]
        rows.append([*cells, *(run.metrics.get(name) for name in metrics)])
    columns = [*new_keys, *metrics.values()]
    return frame.join(pd.DataFrame(rows, columns=columns, dtype=object)), new_keys


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten a nested configuration to dotted keys. Lists become JSON text."""
    flat = records.flatten(config)
    for key, value in flat.items():
        if isinstance(value, list):
            flat[key] = json.dumps(value)
    return flat


def keep(frame: pd.DataFrame, filters: Sequence[str]) -> pd.DataFrame:
    """Return the rows that pass every filter.

    Args:
        frame: the records.
        filters: conditions `column=value` or `column=value,value`, see `_passes` and `_equals`.

    Raises:
        UserError: a filter has no "=", its column does not exist, or no row passes it.
    """
    for condition in filters:
        column, equals, value = condition.partition("=")
        if not equals:
            raise UserError(
                f"'{condition}' is not a filter: write column=value, such as recipe=phasemnist."
            )
        cells = frame[find(column, frame)]
        words = _split_values(value)
        passing = frame[[_passes(column, cell, words) for cell in cells]]
        if passing.empty:
            values = {show(column, value) or "null" for value in cells}
            raise UserError(
                f"{condition}: none of {_count(len(frame), 'record')} has it."
                f"{suggestion(value, values)}"
            )
        frame = passing
    return frame


def _split_values(value: str) -> list[str]:
    """Return the values of a filter, which commas separate outside of a list such as [4,2]."""
    return re.split(r",(?![^\[]*\])", value)


def find(column: str, frame: pd.DataFrame, what: str = "column") -> str:
    """Return a column's name if the frame has it; otherwise raise an error with a suggestion."""
    if column not in frame.columns:
        raise unknown(what, column, frame.columns)
    return column


def drop_repeated(frame: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Return the rows, each run once per combination of the columns `by`.

    Several recipes may share a run, which then has a record of each.
    """
    columns = dict.fromkeys([*by, "run"])
    return frame.drop_duplicates(list(columns))


def tell_differences(frame: pd.DataFrame, keys: Sequence[str]) -> list[str]:
    """Return, for each run, the settings in which it differs from others: 'dp_sgd, lr 0.1'.

    Only runs of the same recipe are compared.

    Args:
        frame: the records.
        keys: columns that are keys of the configuration.
    """
    columns = {key: frame[key].tolist() for key in (*FACTS, *keys)}
    rows_of_recipe: dict[str, list[int]] = {}
    for row, recipe in enumerate(frame["recipe"]):
        rows_of_recipe.setdefault(recipe, []).append(row)
    differences = [""] * len(frame)
    for rows in rows_of_recipe.values():
        words = {key: [_as_word(cells[row]) for row in rows] for key, cells in columns.items()}
        differing = _differing(words)
        for row in rows:
            values = {key: columns[key][row] for key in differing}
            differences[row] = _join_values(values)
    return differences


def list_differing(frame: pd.DataFrame, keys: Sequence[str]) -> list[str]:
    """Return the settings, other than the seed, in which runs differ.

    Args:
        frame: the records.
        keys: columns that are keys of the configuration.
    """
    return _differing({key: list(map(_as_word, frame[key])) for key in (*FACTS, *keys)})


def _as_word(value: Any) -> str:
    """Return a value as text, which is empty for null, NaN, false and 0."""
    is_set = value and value == value  # NaN differs from itself
    return str(value) if is_set else ""


def _differing(words: dict[str, list[str]]) -> list[str]:
    """Return the keys whose values differ, except for the seed.

    If the name of a plug-in differs, so do its options. They are left out unless they also differ
    between runs with the same name. So are data that differ because their settings do.

    Args:
        words: values of each run by key, as `_as_word` returns them.
    """
    differing = [key for key, cells in words.items() if len({*cells}) > 1 and key != "seed"]
    data_settings = [key for key in differing if key.startswith(DATA_SETTINGS)]

    def follows(key: str) -> bool:
        """Return True if the name of the plug-in, or the settings of the data, fix the value."""
        name = f"{key.partition('.')[0]}.name"
        causes = [name] if name in differing and key != name else []
        if key == "data_digest":
            causes = data_settings
        if not causes:
            return False
        values_of_causes = [*zip(*(words[cause] for cause in causes), strict=True)]
        pairs = {*zip(values_of_causes, words[key], strict=True)}
        return len(pairs) == len({*values_of_causes})

    return [key for key in differing if not follows(key)]


FACTS = ("variant", "provenance", "data_digest")  # in which runs may differ, beside their settings
DATA_SETTINGS = ("provenance", "dataset.", "representation")  # beginnings of such keys
SELF_EXPLAINING = ("name", "variant", "provenance")  # keys whose values need no label


def _join_values(values: dict[str, Any]) -> str:
    """Join values, each with the last part of its key as a label: 'dp_sgd, lr 0.1'."""
    parts: dict[str, None] = {}  # without repetition, in order
    for key, value in values.items():
        text = show(key, value)
        label = key.rpartition(".")[2]
        if text and label not in SELF_EXPLAINING:
            text = f"{label} {text}"
        if text:
            parts[text] = None
    return ", ".join(parts)


def sheet(
    results: Path,
    filters: Sequence[str] = (),
    columns: str | None = None,
    sort: str | None = None,
    *,
    by: str | None = None,
    descending: bool = False,
    limit: int | None = None,
) -> Sheet:
    """Return a table of the records that pass every filter, or of groups of them.

    Args:
        results: results folder.
        filters: conditions that records must meet, see `keep`. Default: none.
        columns: columns to show, separated by commas. Default: `DEFAULT`, and labels if there are
            any. With `by`, columns to average; default: `value`.
        sort: column to sort by. Default: the newest record comes first.
        by: columns, separated by commas, that define groups. Records with the same values in all of
            them form a group, which has one line.
        descending: whether to sort in descending order. Default: False.
        limit: maximum number of lines. Default: no limit.

    Raises:
        UserError: a column is unknown, no record passes a filter, or the ε of a group have no mean.
    """
    frame, keys = read_frame(records.read_all(results))
    notes = _unfinished(results, filters)
    if len(frame):
        try:
            frame = keep(frame, filters)
        except UserError as error:
            raise UserError(" ".join([str(error), *notes])) from None
    else:
        notes.insert(0, "There is no record of a finished run.")
    frame[DIFFERS] = tell_differences(frame, keys)
    if columns:
        names = list(dict.fromkeys(columns.split(",")))
    else:
        names = ["value"] if by else _default_columns(frame)
    shown = [find(name, frame) for name in names]
    title = _count(len(frame), "record")
    if by:
        groups = [find(name, frame) for name in dict.fromkeys(by.split(","))]
        if _mixes_data(frame, groups):
            notes.append(MIXED_DATA)
        elif repeats_seeds(frame, groups):
            notes.append(REPEATED_SEEDS)
        notes += _note_missing_folds(frame, groups, keys)
        frame = _group(frame, groups, shown)
        title = f"{_count(len(frame), 'group')} of {title}"
        shown = list(frame.columns)
    elif not sort:
        sort, descending = TIME, True
    if sort:
        column = find(sort, frame)
        frame = frame.sort_values(column, kind="stable", key=_sortable, ascending=not descending)
    if limit is not None and len(frame) > limit:
        advice = "filter or group them (--by), or add --format csv for all."
        notes.append(f"The first {limit}; {advice}")
        frame = frame.head(limit)
    values = frame[shown].astype(object)
    lines: list[dict[Any, Any]] = values.where(values.notna(), None).to_dict("records")
    rows = [[show(name, line[name]) for name in shown] for line in lines]
    return Sheet(title, shown, rows, notes, numbers=lines, important=IMPORTANT)


def _default_columns(frame: pd.DataFrame) -> list[str]:
    """Return the columns to show by default, with labels after the recipe."""
    labels = [name for name in LABELS if frame[name].notna().any()]
    recipe, *others = DEFAULT
    return [recipe, *labels, *others]


def _group(frame: pd.DataFrame, by: list[str], measures: list[str]) -> pd.DataFrame:
    """Return one row per group: mean and standard deviation of each measure, of n runs.

    If the measures are of different numbers of runs, each has its own n, such as `dice_n`. A group
    has no mean if a value of one of its runs is undefined: the mean of the others would hide that
    this run diverged. Runs without the measure, such as those of another task, are left out.

    Args:
        frame: the records.
        by: columns that define the groups.
        measures: columns to average; words count as missing.
    """
    if "value" in measures:  # a mean over different metrics has no meaning
        by = list(dict.fromkeys([*by, *list_conditions("value")]))
    measures = [name for name in measures if name not in by]
    frame = drop_repeated(frame, by)
    numbers = {name: pd.to_numeric(frame[name], errors="coerce") for name in measures}
    groups = frame.assign(**numbers).groupby(by, dropna=False)
    for name in measures:
        for _, runs in groups:
            require_comparable(name, runs, by, "mean")
    counts = {name: groups[name].count() for name in measures}
    first_count = next(iter(counts.values()), groups["run"].count())
    has_one_count = all(count.equals(first_count) for count in counts.values())
    columns: dict[str, Any] = {COUNT: first_count} if has_one_count else {}
    for name in measures:
        if not has_one_count:
            columns[f"{name}_{COUNT}"] = counts[name]
        undefined = is_undefined(frame[name])
        has_undefined = undefined.groupby([frame[key] for key in by], dropna=False).any()
        columns[name] = groups[name].mean().mask(has_undefined)
        columns[f"{name}_sd"] = groups[name].std().mask(has_undefined)
    return pd.DataFrame(columns).reset_index()


def is_undefined(cells: pd.Series) -> pd.Series:
    """Return for each cell whether it is NaN, such as the loss of a run that diverged."""
    return cells.map(lambda value: isinstance(value, float) and isnan(value)).astype(bool)


def _mixes_data(frame: pd.DataFrame, by: Sequence[str]) -> bool:
    """Return True if a group has runs of one experiment on different data."""
    digests = frame.groupby([*dict.fromkeys([*by, "experiment"])], dropna=False)["data_digest"]
    return bool((digests.nunique() > 1).any())


def repeats_seeds(frame: pd.DataFrame, by: Sequence[str]) -> bool:
    """Return True if a group has several runs of one experiment and seed."""
    columns = [*dict.fromkeys([*by, "experiment", "seed"])]
    runs = frame.groupby(columns, dropna=False)["run"]
    return bool((runs.nunique() > 1).any())


def _note_missing_folds(frame: pd.DataFrame, by: Sequence[str], keys: Sequence[str]) -> list[str]:
    """State which seeds lack folds if a mean is over folds: it may leave out the hardest one.

    Runs of several folds with the same settings are a cross-validation. A seed is complete if it
    has all folds of the data set or, if their number is unknown, all folds that any seed has.

    Args:
        frame: the records.
        by: columns that define the groups.
        keys: columns that are keys of the configuration.
    """
    if FOLD not in frame:
        return []
    frame = frame[frame[FOLD].notna()]
    if not (frame.groupby([*by], dropna=False)[FOLD].nunique() > 1).any():
        return []
    settings = ["recipe", "dataset", *(key for key in keys if key != FOLD)]
    columns = [frame[key].map(_as_word) for key in settings]
    settings_of_runs = zip(*columns, strict=True)
    folds: dict[tuple[str, ...], dict[int, set[Any]]] = {}  # of each seed, by settings
    for values, seed, fold in zip(settings_of_runs, frame["seed"], frame[FOLD], strict=True):
        folds.setdefault(values, {}).setdefault(seed, set()).add(fold)
    incomplete: dict[str, None] = {}  # without repetition, in order
    for (recipe, dataset, *_), folds_of_seeds in folds.items():
        all_folds = set().union(*folds_of_seeds.values())
        if len(all_folds) == 1:  # no cross-validation
            continue
        num_folds = max(len(all_folds), _count_folds(dataset))
        for seed, folds_of_seed in sorted(folds_of_seeds.items()):
            if len(folds_of_seed) < num_folds:
                incomplete[f"{recipe}, seed {seed}: {len(folds_of_seed)} of {num_folds}"] = None
    if not incomplete:
        return []
    return [f"Means lack folds, perhaps the hardest: {'; '.join(incomplete)}."]


def _count_folds(dataset: str) -> int:
    """Return the number of folds of a data set; 0 if it is unknown."""
    try:
        builder = lookup("dataset", dataset)
    except UserError:  # such as a plug-in that is not installed
        return 0
    num_folds: int | None = getattr(builder, "num_folds", None)
    return num_folds or 0


def is_epsilon(column: str) -> bool:
    """Return True if the numbers of a column are ε."""
    name = column.rpartition(".")[2]
    return name.startswith("epsilon_") or name.endswith("_epsilon")


def list_conditions(column: str) -> tuple[str, ...]:
    """Return the columns in which runs must agree for their values of a column to be comparable."""
    if column == "value":
        return ("metric",)
    if is_epsilon(column):
        return (UNITS.get(column, "epsilon_of"), "delta")
    return ()


def require_comparable(column: str, runs: pd.DataFrame, by: Collection[str], what: str) -> None:
    """Reject values of several metrics, or ε that protect different units or hold at different δ.

    Args:
        column: the column of the values.
        runs: the records.
        by: columns that define groups; the runs of different groups may differ in them.
        what: what the values are to share: "mean" or "axis".
    """
    for condition in list_conditions(column):
        values = [str(value) for value in runs[condition].unique()]
        if len(values) > 1 and condition not in by:
            raise UserError(
                f"{column}: runs with {condition} {' and '.join(values)} have no common {what}. "
                f"Add {condition} to --by, or choose runs: {condition}={values[0]}."
            )


def _unfinished(results: Path, filters: Sequence[str]) -> list[str]:
    """Return a sentence that names the unfinished runs, or an empty list if there are none.

    Of the filters, only those on the recipe apply, because an unfinished run has no record.
    """
    recipe_filters = []  # the values of each
    for condition in filters:
        column, _, value = condition.partition("=")
        if column == "recipe":
            recipe_filters.append(_split_values(value))
    unfinished = []
    for spending in sorted(results.glob("runs/*/*/spending.json")):
        home = spending.parent
        recipe = home.parent.name
        if not all(_passes("recipe", recipe, words) for words in recipe_filters):
            continue
        if not (home / "record.json").exists() and not records.is_deleted(home):
            unfinished.append(f"{recipe}/{home.name[:8]}")
    if not unfinished:
        return []
    return [f"Not finished: {', '.join(unfinished)}; the same command continues it."]


def _passes(column: str, cell: Any, words: Sequence[str]) -> bool:
    """Return True if a cell matches one of the user's words.

    Each of a run's tags is a cell. A value also matches as it is shown: a number rounded, a digest
    or a time by its beginning.
    """
    cells = cell.split(", ") if column == "tags" and isinstance(cell, str) else [cell]
    for value, word in product(cells, words):
        begins = column in (*DIGESTS, TIME) and _begins(value, word)
        if begins or _equals(value, word) or _equals(show(column, value), word):
            return True
    return False


def _begins(cell: Any, word: str) -> bool:
    """Return True if a digest or a time begins with a word of at least four characters."""
    begin = word.replace(" ", "T").lower()  # between date and time
    return len(word) >= 4 and str(cell).lower().startswith(begin)


def _equals(cell: Any, word: str) -> bool:
    """Return True if a cell matches a word of a filter.

    `1e-5` matches 0.00001, `null` matches an empty cell, and `*` in a word matches any text.
    """
    if "*" in word and isinstance(cell, str):
        pattern = ".*".join(map(re.escape, word.split("*")))
        return re.fullmatch(pattern, cell, flags=re.IGNORECASE | re.DOTALL) is not None
    if cell is None or cell != cell:  # NaN differs from itself
        return word.lower() in ("", "none", "null", "nan")
    if str(cell).replace(" ", "").lower() == word.replace(" ", "").lower():
        return True
    try:
        return bool(float(cell) == float(word))
    except (TypeError, ValueError):
        return False


def _sortable(column: pd.Series) -> pd.Series:
    """Return a column as sorting keys: numbers if all its values are numbers, otherwise texts."""
    numbers = pd.to_numeric(column, errors="coerce")
    if (numbers.isna() & column.notna()).any():
        return column.astype(str).where(column.notna())
    return numbers


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def show(column: str, value: Any) -> str:
    """Return a value as a column shows it. Digests are shortened to eight digits."""
    if value is None or value != value:
        return ""
    if column in DIGESTS:
        return str(value)[:8]
    if column == TIME:
        return str(value)[:16].replace("T", " ")
    if is_epsilon(column) and isinstance(value, int | float):
        return show_epsilon(value, at_least=column.endswith("at_least"))
    return f"{value:.4g}".replace("inf", "∞") if isinstance(value, float) else str(value)
