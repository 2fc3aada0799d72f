"""A run's record: one JSON file, written once and atomically, from which everything is reported.

    results/runs/<recipe>/<digest of configuration and data>/record.json

Everything but `environment` and `measured` is a function of the configuration, the data and the
seed: two runs of one seed write the same. `results/records.csv` is rebuilt from the records.
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from zdp_bench.errors import UserError

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
    "metric": "headline.name",
    "value": "headline.value",
    "epsilon_claimed": "privacy.epsilon_claimed",
    "claimed_by": "privacy.claimed_by",
    "epsilon_tight": "privacy.epsilon_tight",
    "epsilon_tight_at_least": "privacy.epsilon_tight_at_least",
    "epsilon_rdp": "privacy.epsilon_rdp",
    "epsilon_patient": "privacy.epsilon_patient",
    "records_per_patient": "privacy.records_per_patient",
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

# The keys, and their types, that every record must have.
REQUIRED: dict[str, type] = dict.fromkeys(("recipe", "run", "experiment"), str) | {"seed": int}
REQUIRED |= dict.fromkeys(("config", "data", "metrics", "headline", "privacy"), dict)


def folder(results: Path, recipe: str, run: str) -> Path:
    """Return the folder of everything that a run writes."""
    return results / "runs" / recipe / run[:16]


def write(path: Path, record: Record) -> None:
    """Write a record atomically."""
    write_text(path, json.dumps(_to_json(record), indent=1, sort_keys=True) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` atomically; of two writers, one wins."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        if error.errno and not error.filename:  # a full disk's error names none
            error.filename = str(path)
        raise


def write_arrays(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write named arrays to `path` atomically, compressed."""
    partial = path.with_name(f".{os.getpid()}-{path.name}")
    np.savez_compressed(partial, **arrays)  # type: ignore[arg-type]
    os.replace(partial, path)


def read(path: Path) -> Record | None:
    """Return a record, or None if there is none.

    Raises:
        UserError: the file is damaged, or no record.
    """
    try:
        found = _from_json(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not all(
        isinstance(found.get(key), kind) for key, kind in REQUIRED.items()
    ):
        raise UserError(
            f"{path}: is damaged or no record of zdp-bench. Delete it: the same run writes it "
            "again, from the checkpoint there."
        )
    return found


@cache
def _warn(words: str) -> None:
    """Print a warning, once a process however often the records are read."""
    print(f"zdp-bench: left out: {words}", file=sys.stderr)


def write_scores(path: Path, truth: np.ndarray, scores: np.ndarray) -> None:
    """Write the test set's classes [n] and scores [n], in its order; a DeLong test needs them."""
    lines = [f"{int(label)},{score:.7g}" for label, score in zip(truth, scores, strict=True)]
    write_text(path, "\n".join(["truth,score", *lines]) + "\n")


def read_scores(path: Path) -> tuple[np.ndarray, np.ndarray] | None:
    """Return (truth [n], scores [n]), or None if a run left none."""
    if not path.is_file():
        return None
    table = np.loadtxt(path, delimiter=",", skiprows=1, ndmin=2)
    return table[:, 0], table[:, 1]


def read_all(results: Path) -> list[Record]:
    """Return every record under `results/runs`, sorted by recipe, seed and digest.

    A damaged one is left out with a warning on stderr: no reason to lose the others.
    """
    found = []
    for path in sorted((results / "runs").glob("*/*/record.json")):
        try:
            found += [record] if (record := read(path)) else []
        except UserError as error:
            _warn(str(error))
    return sorted(found, key=lambda r: (r["recipe"], r["seed"], r["run"]))


def frame(records: list[Record]) -> pd.DataFrame:
    """Return a table of one row a record, with `COLUMNS`."""
    import pandas as pd  # here, for it takes a quarter of a second

    made = pd.DataFrame(
        [{column: _at(record, path) for column, path in COLUMNS.items()} for record in records],
        columns=list(COLUMNS),
    )
    # records of older versions do not name them
    return made.fillna({"privacy_unit": "patient", "epsilon_of": "record"})


def rebuild_csv(results: Path) -> Path:
    """Write `records.csv` from all records."""
    path = results / "records.csv"
    write_text(path, frame(read_all(results)).to_csv(index=False, lineterminator="\n"))
    return path


def _at(record: Record, path: str) -> Any:
    value: Any = record
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _to_json(value: Any) -> Any:
    """Replace ∞ and NaN, which JSON lacks, by the strings "inf" and "nan"."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _to_json(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(entry) for entry in value]
    return value


def _from_json(value: Any) -> Any:
    if value in ("inf", "-inf", "nan"):
        return float(value)
    if isinstance(value, dict):
        return {key: _from_json(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_from_json(entry) for entry in value]
    return value
