"""Write records, scores and `records.csv`, and find their folders."""

from __future__ import annotations

import csv
import io
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from zdp_bench.disk import find_target, hold_lock, list_partial, write_bytes, write_changed
from zdp_bench.errors import UserError, print_message, printable
from zdp_bench.foreign_files import expect, is_file, read_bytes, reading
from zdp_bench.records.index import read_all
from zdp_bench.records.json_numbers import format_json
from zdp_bench.records.record import Document, Record

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T")

# column of records.csv, in order -> dotted path of its value in a record
COLUMNS: dict[str, str] = {
    "recipe": "recipe",
    "table": "claims.table",
    "row": "claims.row",
    "variant": "claims.variant",
    "seed": "seed",
    "name": "labels.name",
    "tags": "labels.tags",
    "notes": "labels.notes",
    "metric": "headline.name",
    "value": "headline.value",
    "epsilon_claimed": "privacy.epsilon_claimed",
    "claimed_by": "privacy.claimed_by",
    "epsilon_tight": "privacy.epsilon_tight",
    "epsilon_tight_at_least": "privacy.epsilon_tight_at_least",
    "epsilon_rdp": "privacy.epsilon_rdp",
    "epsilon_patient": "privacy.epsilon_patient",
    "examples_per_patient": "privacy.examples_per_patient",
    "privacy_unit": "privacy.unit",
    "epsilon_of": "privacy.epsilon_of",
    "delta": "privacy.delta",
    "z": "privacy.z",
    "steps": "privacy.steps",
    "sampling": "privacy.sampling.scheme",
    "sample_rate": "privacy.sampling.sample_rate",
    "expected_batch_size": "privacy.sampling.expected_batch_size",
    "stopped_by": "stopped_by",
    "algorithm": "config.algorithm.name",
    "model": "config.model.name",
    "parameters_real": "model.parameters_real",
    "dataset": "data.name",
    "provenance": "data.provenance",
    "data_digest": "data.digest",
    "ledger_digest": "privacy.ledger.digest",
    "started_utc": "measured.started_utc",
    "train_seconds": "measured.train_seconds",
    "peak_memory_bytes": "measured.peak_memory_bytes",
    "device": "environment.device",
    "threads": "environment.threads",
    "torch": "environment.versions.torch",
    "zdp_bench": "environment.versions.zdp-bench",
    "commit": "environment.commit",
    "experiment": "experiment",
    "run": "run",
}

FOLDER_DIGITS = 16  # digits of a run's digest that name its folder
_DIGITS = re.compile("[0-9a-f]*")
DELETED = ".deleted-"  # a deleted run's folder is renamed to end in this and a number
LOCK = ".records.lock"
MAX_CSV = 1 << 28  # bytes: half a million rows
_FORMULA = re.compile(r"\s*[=+\-@＝＋－＠]")  # beginning of a cell that a spreadsheet computes


def folder(results: Path, recipe: str, run: str) -> Path:
    """Return the folder that a run writes to."""
    return results / "runs" / recipe / run[:FOLDER_DIGITS]


def is_deleted(home: Path) -> bool:
    """Return True if a folder is that of a deleted run, and holds only what the run spent.

    Args:
        home: a run's folder, or that of one of its nodes, such as RUN/nodes/00.
    """
    names = home.name, home.parent.parent.name  # not the recipe's, which is between them
    return any(DELETED in name for name in names)


def list_deleted(home: Path) -> list[Path]:
    """Return a folder for each time that a run was deleted, which holds what the run spent."""
    return sorted(home.parent.glob(f"{home.name}{DELETED}*"))


def is_named(word: str, recipe: str, run: str) -> bool:
    """Return True if a word names a run.

    Args:
        word: RECIPE, RECIPE/RUN or RUN. RUN is the run's digest or the beginning of it, which must
            have at least four digits if it stands alone.
        recipe: the run's recipe.
        run: the run's digest, or the name of its folder, which is the beginning of the digest.
    """
    if word == recipe:
        return True
    named_recipe, slash, digits = word.rpartition("/")
    is_enough = named_recipe == recipe if slash else len(digits) >= 4
    if len(run) == FOLDER_DIGITS and _DIGITS.fullmatch(digits):
        digits = digits[:FOLDER_DIGITS]
    return is_enough and run.startswith(digits)


def write(path: Path, document: Document) -> None:
    """Write a record's JSON atomically."""
    write_text(path, format_json(document) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a text in UTF-8, atomically; see `disk.write_bytes`."""
    write_bytes(path, text.encode("utf-8"))


def write_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write named arrays as a compressed `.npz` file, atomically."""
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)  # type: ignore[arg-type]
    write_bytes(path, content)


def write_scores(path: Path, truth: np.ndarray, scores: np.ndarray) -> None:
    """Write the classes [n] and scores [n] of the test examples, in order, for DeLong's test.

    Scores are written with all digits, because rounding would make different scores tie.
    """
    lines = [f"{int(label)},{score!s}" for label, score in zip(truth, scores, strict=True)]
    write_text(path, "\n".join(["truth,score", *lines]) + "\n")


def read_scores(path: Path) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the classes [n] and scores [n] that `write_scores` wrote; None if there is no file.

    Raises:
        UserError: the file is damaged.
    """
    if not is_file(path):
        return None
    with reading(path, MAX_CSV), warnings.catch_warnings(action="ignore"):  # of an empty file
        table = np.loadtxt(path, delimiter=",", skiprows=1, ndmin=2)
        is_whole = table.shape[1] == 2 and not np.isnan(table[:, 0]).any()
        expect(is_whole, "is damaged: a line is no class and score")
    return table[:, 0], table[:, 1]


def frame(records: list[Record]) -> pd.DataFrame:
    """Return a table with one row per record and the columns `COLUMNS`."""
    import pandas as pd  # imported here, because it takes a quarter of a second

    cells = {column: [_cell(record, keys) for record in records] for column, keys in _KEYS.items()}
    # As objects, because among numbers pandas makes null NaN, which is an undefined value.
    return pd.DataFrame(cells, dtype=object)


_KEYS = {column: tuple(path.split(".")) for column, path in COLUMNS.items()}


def _cell(record: Record, keys: tuple[str, ...]) -> Any:
    """Return the value at the keys of a path; the entries of a list are joined by commas."""
    value: Any = record.values
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    if keys == _KEYS["dataset"]:
        value = record.data.title or value
    return ", ".join(map(str, value)) if isinstance(value, list) else value


def group_by(items: Iterable[T], key: Callable[[T], Any]) -> dict[Any, list[T]]:
    """Group items, such as runs, by a key. The groups are in the order of their first items."""
    groups: dict[Any, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def flatten(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a nested configuration by dotted key; lists are not flattened."""
    flat: dict[str, Any] = {}
    for key, value in node.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def rebuild_csv(results: Path) -> Path:
    """Write `records.csv` from all records.

    A lock prevents two processes from writing at the same time, which could lose rows.
    """
    path = results / "records.csv"
    with hold_lock(results / LOCK):
        for partial in list_partial(results):
            if find_target(partial) == path:  # left by a killed process
                partial.unlink()
        rows = [_row_of(record) for record in read_all(results)]
        write_changed(path, _as_csv([[*COLUMNS], *rows]))
    return path


def add_to_csv(results: Path, record: Record) -> None:
    """Append a run's row to `records.csv`, unless the file has it.

    A file is rebuilt if it is damaged, has other columns, or has another row of the same run: an
    earlier one, or that of another recipe.
    """
    path = results / "records.csv"
    with hold_lock(results / LOCK):
        content = _read_csv(path)
        is_whole = content.startswith(_as_csv([[*COLUMNS]])) and content.endswith(b"\n")
        row = _as_csv([_row_of(record)])
        has_row = b"\n" + row in content
        has_run = record.run.encode() in content
        if is_whole and not has_run:
            with path.open("ab") as file:
                file.write(row)
    if not is_whole or (has_run and not has_row):
        rebuild_csv(results)


def _read_csv(path: Path) -> bytes:
    """Return the bytes of `records.csv`, or b"" if it cannot be read and must be rebuilt."""
    try:
        return read_bytes(path, MAX_CSV)
    except (OSError, UserError):
        return b""


def renew_csv(results: Path, record: Record | None = None) -> None:
    """Update `records.csv`. Only warn if that fails, because the records themselves are intact.

    Args:
        results: folder of results.
        record: the new record. None: several records may have changed, so rebuild the file.
    """
    try:
        if record is None:
            rebuild_csv(results)
        else:
            add_to_csv(results, record)
    except PermissionError:
        return  # another user's folder, to which this process has added no run
    except (OSError, UserError) as error:
        print_message(f"records.csv is not written: {error}")


def _row_of(record: Record) -> list[Any]:
    return [plain_cell(_cell(record, keys)) for keys in _KEYS.values()]


def _as_csv(rows: Sequence[Sequence[Any]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def plain_cell(value: Any) -> Any:
    """Return the value of a CSV cell; text that a spreadsheet would compute gets a leading '."""
    if not isinstance(value, str):
        return value
    with suppress(ValueError):
        float(value)
        return value
    return printable(f"'{value}" if _FORMULA.match(value) else value)
