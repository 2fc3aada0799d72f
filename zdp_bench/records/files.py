"""The files of records: where they are, how they are written, and `records.csv`."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from zdp_bench.disk import hold_lock, write_bytes, write_changed
from zdp_bench.errors import UserError, printable
from zdp_bench.foreign_files import read_bytes
from zdp_bench.records.index import read_all
from zdp_bench.records.json_numbers import to_json
from zdp_bench.records.record import Document, Record

if TYPE_CHECKING:
    import pandas as pd

# The columns of records.csv, in order, and the path of each in a record.
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

DELETED = ".deleted-"  # in the name of the folder of a deleted run, before a number
LOCK = ".records.lock"
MOST_CSV = 1 << 28  # bytes: half a million rows
_FORMULA = re.compile(r"\s*[=+\-@＝＋－＠]")


def folder(results: Path, recipe: str, run: str) -> Path:
    """Return the folder of everything that a run writes."""
    return results / "runs" / recipe / run[:16]


def is_deleted(home: Path) -> bool:
    """True if a folder holds only what a deleted run has spent."""
    return DELETED in home.name


def is_named(word: str, recipe: str, run: str) -> bool:
    """True if a word names a run: RECIPE, RECIPE/RUN, or RUN, four or more digits of its digest."""
    return (
        word == recipe
        or ("/" in word and f"{recipe}/{run}".startswith(word))
        or (len(word) >= 4 and run.startswith(word))
    )


def write(path: Path, document: Document) -> None:
    """Write a record's JSON atomically."""
    write_text(path, json.dumps(to_json(document), indent=1, sort_keys=True) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` as `disk.write_bytes` does, in UTF-8."""
    write_bytes(path, text.encode("utf-8"))


def write_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write named arrays to `path` atomically, compressed."""
    whole = io.BytesIO()
    np.savez_compressed(whole, **arrays)  # type: ignore[arg-type]
    write_bytes(path, whole.getbuffer())


def write_scores(path: Path, truth: np.ndarray, scores: np.ndarray) -> None:
    """Write the test set's classes [n] and scores [n], in its order; a DeLong test needs them.

    A score is written with all its digits: rounded, two that differ would tie.
    """
    lines = [f"{int(label)},{score!s}" for label, score in zip(truth, scores, strict=True)]
    write_text(path, "\n".join(["truth,score", *lines]) + "\n")


def read_scores(path: Path) -> tuple[np.ndarray, np.ndarray] | None:
    """Return (truth [n], scores [n]), or None if a run left none."""
    if not path.is_file():
        return None
    table = np.loadtxt(path, delimiter=",", skiprows=1, ndmin=2)
    return table[:, 0], table[:, 1]


def frame(records: list[Record]) -> pd.DataFrame:
    """Return a table of one row a record, with `COLUMNS`."""
    import pandas as pd  # here, for it takes a quarter of a second

    cells = {column: [_cell(record, keys) for record in records] for column, keys in _KEYS.items()}
    return pd.DataFrame(cells)


_KEYS = {column: tuple(path.split(".")) for column, path in COLUMNS.items()}


def _cell(record: Record, keys: tuple[str, ...]) -> Any:
    """Return the value at the keys of a path; a list as its entries with commas between them."""
    value: Any = record.values
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    if keys == _KEYS["dataset"]:
        value = record.data.title or value
    return ", ".join(map(str, value)) if isinstance(value, list) else value


def flatten(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a nested configuration by dotted key; lists are values."""
    found: dict[str, Any] = {}
    for key, value in node.items():
        if isinstance(value, dict):
            found |= flatten(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def rebuild_csv(results: Path) -> Path:
    """Write `records.csv` from all records, one process at a time, so that no row is lost."""
    path = results / "records.csv"
    with hold_lock(results / LOCK):
        for left_behind in results.glob(f".{path.name}.*.partial"):
            left_behind.unlink()
        rows = [_row_of(record) for record in read_all(results)]
        write_changed(path, _as_csv([[*COLUMNS], *rows]))
    return path


def add_to_csv(results: Path, record: Record) -> None:
    """Append a run's row to `records.csv`; rebuild one that is cut, or of another version."""
    path = results / "records.csv"
    with hold_lock(results / LOCK):
        written = _read_csv(path)
        is_whole = written.startswith(_as_csv([[*COLUMNS]])) and written.endswith(b"\n")
        has_row = record.run.encode() in written
        if is_whole and not has_row:
            with path.open("ab") as file:
                file.write(_as_csv([_row_of(record)]))
    if not is_whole:
        rebuild_csv(results)


def _read_csv(path: Path) -> bytes:
    """Return what `records.csv` holds; nothing if it cannot be read, so that it is rebuilt."""
    try:
        return read_bytes(path, MOST_CSV)
    except (OSError, UserError):
        return b""


def renew_csv(results: Path, record: Record | None = None) -> None:
    """Bring `records.csv` up to date after `record` was made, or after any may have changed.

    It only warns if that fails, since the records exist.
    """
    try:
        if record is None:
            rebuild_csv(results)
        else:
            add_to_csv(results, record)
    except PermissionError:
        return  # somebody else's folder, which got no run from here
    except (OSError, UserError) as error:
        print(f"zdp-bench: records.csv is not written: {error}", file=sys.stderr)


def _row_of(record: Record) -> list[Any]:
    return [plain_cell(_cell(record, keys)) for keys in _KEYS.values()]


def _as_csv(rows: Sequence[Sequence[Any]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def plain_cell(value: Any) -> Any:
    """Return a cell of a CSV file; text that a sheet would compute has a ' before it."""
    if not isinstance(value, str):
        return value
    with suppress(ValueError):
        float(value)
        return value
    return printable(f"'{value}" if _FORMULA.match(value) else value)
