"""All records of a results folder, by an index that saves opening a file for each.

The index is `.records.index` beside `runs`: the records without their large sections, and what
changes with each file (inode, time, size). A file that changed is read again, and the index written
anew. It may be deleted at any time, and is not needed where it cannot be written.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from zdp_bench.disk import write_bytes
from zdp_bench.errors import UserError
from zdp_bench.records import record as record_module
from zdp_bench.records.record import Document, Record, read_document, without_large

NAME = ".records.index"
State = tuple[int, int, int]  # a new version of a file has an inode of its own

_READ: dict[Path, tuple[State, Record]] = {}  # by file: a page asks 20 times


def read_all(results: Path) -> list[Record]:
    """Return every record under `results/runs`, sorted by recipe, seed and digest.

    A damaged one is left out with a warning on stderr: no reason to lose the others. Do not change
    what is returned: whoever asks next gets the same objects.
    """
    states = dict(_find(results / "runs"))
    stale = [path for path in states if path not in _READ or _READ[path][0] != states[path]]
    if stale:
        _read_again(results, states, stale)
    found = [_READ[path][1] for path in states if path in _READ]
    return sorted(found, key=lambda record: (record.recipe, record.seed, record.run))


def _find(runs: Path) -> Iterator[tuple[Path, State]]:
    """Yield the records below a folder, and what changes with each."""
    for recipe in _folders(runs):
        for home in _folders(recipe):
            path = os.path.join(home, "record.json")
            try:
                found = os.stat(path)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError:  # `read_document` says what is wrong
                yield Path(path), (0, 0, 0)
                continue
            yield Path(path), (found.st_ino, found.st_mtime_ns, found.st_size)


def _folders(folder: str | Path) -> list[str]:
    with suppress(OSError), os.scandir(folder) as entries:
        return sorted(entry.path for entry in entries if entry.is_dir())
    return []


def _read_again(results: Path, states: dict[Path, State], stale: list[Path]) -> None:
    """Read records, by the index where it has them as they are, and bring the index up to date."""
    index = _read_index(results / NAME)
    names = {path: path.relative_to(results).as_posix() for path in states}
    is_current = index.keys() <= set(names.values())
    for path in stale:
        _READ.pop(path, None)
        state, values = index.get(names[path], (None, None))
        if state is None or tuple(state) != states[path]:
            values = _read_values(path)
            if values is None:
                continue
            is_current = False
        _READ[path] = states[path], Record.of(values, path)
    if not is_current:
        _write_index(results, names)


def _read_values(path: Path) -> Document | None:
    """Return a record without its large sections; None, with a warning, if it is damaged."""
    try:
        document = read_document(path)
    except UserError as error:
        warn_left_out(str(error))
        return None
    return None if document is None else without_large(document)


def _read_index(path: Path) -> dict[str, Any]:
    """Return [state, values] by a record's path; {} if there is no index of this version."""
    try:
        index = json.loads(path.read_bytes())
        if index["version"] == _version():
            records: dict[str, Any] = index["records"]
            return records
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return {}


def _write_index(results: Path, names: dict[Path, str]) -> None:
    """Write the index; a folder that cannot be written only makes reading slow."""
    kept = {
        name: [_READ[path][0], _READ[path][1].values]
        for path, name in names.items()
        if path in _READ
    }
    body = json.dumps({"version": _version(), "records": kept}, separators=(",", ":"))
    with suppress(OSError, UserError):
        write_bytes(results / NAME, body.encode())


@cache
def _version() -> str:
    """Return a digest of what decides how a record is checked and what of it is kept."""
    return hashlib.sha256(Path(record_module.__file__).read_bytes()).hexdigest()[:16]


@cache
def warn_left_out(words: str) -> None:
    """Print why a file is left out, once per process."""
    print(f"zdp-bench: left out: {words}", file=sys.stderr)
