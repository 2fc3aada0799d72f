"""A run's record: one JSON file, written once and atomically, from which everything is reported.

    results/runs/<recipe>/<digest of configuration and data>/record.json

Everything but `environment` and `measured` is a function of the configuration, the data and the
seed: two runs of one seed write the same. `records.csv` lists them; every run renews it.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from zdp_bench.disk import hold_lock, write_bytes, write_changed
from zdp_bench.errors import UserError, printable
from zdp_bench.foreign_files import Shape, misfits, read_json

if TYPE_CHECKING:
    import pandas as pd

Record = dict[str, Any]

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
NUMBER = int | float
# What every record holds: the fields that tables and pages read.
SHAPE: Shape = {
    **dict.fromkeys(("recipe", "run", "experiment"), str),
    "seed": int,
    "headline": {"name": str, "value": NUMBER},
    "privacy": {
        **dict.fromkeys(("epsilon_claimed", "epsilon_tight", "delta", "z"), NUMBER),
        **dict.fromkeys(("claimed_by", "unit", "epsilon_of"), str),
        **dict.fromkeys(("steps", "examples_per_patient"), int),
        **dict.fromkeys(("epsilon_patient", "epsilon_patient_at_least"), NUMBER | None),
        **dict.fromkeys(("epsilon_rdp", "epsilon_tight_at_least"), NUMBER | None),
    },
    "data": dict.fromkeys(("name", "provenance", "digest", "notes"), str),
    "config": dict,
    "metrics": {str: NUMBER},
    "epochs": ([dict], type(None)),
    "labels": ({"name": str | None, "tags": ([str], type(None)), "notes": str | None}, type(None)),
}
ADVICE = "Delete it: the same run writes it again, from the checkpoint there."
_FORMULA = re.compile(r"\s*[=+\-@＝＋－＠]")
# ∞ and NaN as `to_json` writes them: whole strings, not keys.
_NUMBERS = {
    f'"{word}"': (re.compile(rf'"{word}"(?<!\\"{word}")(?!\s*:)'), number)
    for word, number in {"inf": "Infinity", "-inf": "-Infinity", "nan": "NaN"}.items()
}


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


def write(path: Path, record: Record) -> None:
    """Write a record atomically."""
    write_text(path, json.dumps(to_json(record), indent=1, sort_keys=True) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` as `disk.write_bytes` does, in UTF-8."""
    write_bytes(path, text.encode("utf-8"))


def write_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write named arrays to `path` atomically, compressed."""
    whole = io.BytesIO()
    np.savez_compressed(whole, **arrays)  # type: ignore[arg-type]
    write_bytes(path, whole.getbuffer())


def read(path: Path, advice: str = ADVICE) -> Record | None:
    """Return a record, or None if there is none.

    Args:
        advice: what to do about a damaged one.

    Raises:
        UserError: the file is damaged, or no record.
    """
    with suppress(OSError):  # which `read_json` tells
        if not path.exists():
            return None
    try:
        found = read_json(path, from_json)
        wrong = [*misfits(found, SHAPE)]
        if wrong or found["headline"]["name"] not in found["metrics"]:
            where = (wrong or ["headline.name"])[0]
            raise UserError(f"{path}: is damaged or not a record of zdp-bench (see {where}).")
    except UserError as error:
        raise UserError(f"{error} {advice}") from None
    return found


@cache
def _warn(words: str) -> None:
    """Print a warning once per process."""
    print(f"zdp-bench: left out: {words}", file=sys.stderr)


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


def read_all(results: Path) -> list[Record]:
    """Return every record under `results/runs`, sorted by recipe, seed and digest.

    A damaged one is left out with a warning on stderr: no reason to lose the others. Do not change
    what is returned: whoever asks next gets the same objects.
    """
    found = []
    for path in sorted((results / "runs").glob("*/*/record.json"), key=os.fspath):
        try:
            record = _read_once(path, _state(path))
            found += [record] if record else []
        except UserError as error:
            _warn(str(error))
    return sorted(found, key=lambda r: (r["recipe"], r["seed"], r["run"]))


@cache
def _read_once(path: Path, state: tuple[int, ...]) -> Record | None:
    """Return a record, read once for each version of its file: a page asks 20 times."""
    return read(path)


def _state(path: Path) -> tuple[int, ...]:
    """Return what changes with a file; `write_text` gives each version an inode of its own."""
    try:
        found = path.stat()
    except OSError:  # `read` says what is wrong
        return ()
    return found.st_ino, found.st_mtime_ns, found.st_size


def frame(records: list[Record]) -> pd.DataFrame:
    """Return a table of one row a record, with `COLUMNS`."""
    import pandas as pd  # here, for it takes a quarter of a second

    return pd.DataFrame(
        [{column: _cell(record, path) for column, path in COLUMNS.items()} for record in records],
        columns=list(COLUMNS),
    )


def _cell(record: Record, path: str) -> Any:
    """Return the value at a dotted path; a list as its entries with commas between them."""
    value = get(record, path)
    return ", ".join(value) if isinstance(value, list) else value


def is_of_unit(privacy: Mapping[str, Any]) -> bool:
    """True if a patient, or another owner of examples, was the unit of a record's steps."""
    return bool(privacy["epsilon_of"] != "example")


def shares_of_one(privacy: Mapping[str, Any]) -> int:
    """Return how many shares of one patient a step may hold, by a record's section on privacy."""
    return 1 if is_of_unit(privacy) else int(privacy["examples_per_patient"])


def flatten(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a nested configuration by dotted key; lists are values."""
    found: dict[str, Any] = {}
    for key, value in node.items():
        name = f"{prefix}{key}"
        found |= flatten(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return found


def rebuild_csv(results: Path) -> Path:
    """Write `records.csv` from all records, one process at a time, so that no row is lost."""
    path = results / "records.csv"
    with hold_lock(results / ".records.lock"):
        for left_behind in results.glob(f".{path.name}.*.partial"):
            left_behind.unlink()
        made = frame(read_all(results)).map(plain_cell)
        write_changed(path, made.to_csv(index=False, lineterminator="\n").encode())
    return path


def renew_csv(results: Path) -> None:
    """Write `records.csv` after a run; only warn if that fails, since the record exists."""
    try:
        rebuild_csv(results)
    except PermissionError:
        return  # somebody else's folder, which got no run from here
    except (OSError, UserError) as error:
        print(f"zdp-bench: records.csv is not written: {error}", file=sys.stderr)


def plain_cell(value: Any) -> Any:
    """Return a cell of a CSV file; text that a sheet would compute has a ' before it."""
    if not isinstance(value, str):
        return value
    with suppress(ValueError):
        float(value)
        return value
    return printable(f"'{value}" if _FORMULA.match(value) else value)


def get(record: Record, path: str) -> Any:
    """Return the value at a dotted path; None if the record has none."""
    value: Any = record
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def has_each_epoch(record: Record) -> bool:
    """True if a record has the metrics of every epoch, as `execution.evaluate=each` writes them."""
    numbers = [of["epoch"] for of in record["epochs"] if of["epoch"] is not None]
    return numbers == [*range(1, len(numbers) + 1)]


def to_json(value: Any) -> Any:
    """Replace ∞ and NaN, which JSON does not have, by the strings "inf" and "nan"."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: to_json(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(entry) for entry in value]
    return value


def from_json(text: str) -> Any:
    """Return what a JSON text holds, with the numbers that `to_json` wrote as strings."""
    for word, (pattern, number) in _NUMBERS.items():
        if word in text:
            text = pattern.sub(number, text)
    return json.loads(text)
