"""Read all records of a results folder, with an index that avoids opening every file.

The index is the file `.records.index` beside `runs`. It holds the records without their large
sections, and the state (inode, times, size) of each file. If the state of a file has changed, the
file is read again and the index is rewritten. The index can be deleted at any time. If it cannot be
written, reading is only slower. Values that few commands need can have another index
(`read_of_each`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from zdp_bench.disk import write_bytes
from zdp_bench.errors import UserError, print_message
from zdp_bench.foreign_files import read_bytes
from zdp_bench.records import record as record_module
from zdp_bench.records.record import Document, Record, read_document, without_large

NAME = ".records.index"
MAX_INDEX = 1 << 29  # bytes: a hundred thousand records
# Inode (a file that was replaced has another); times in ns of the last modification and, because
# programs can set that one, of the last change of the inode; and size in bytes.
State = tuple[int, int, int, int]

# file -> the record that this process read; the report's page reads all records 20 times
_READ: dict[Path, tuple[State, Record]] = {}


def read_all(results: Path) -> list[Record]:
    """Return every record under `results/runs`, sorted by recipe, seed and digest.

    A damaged record is left out with a warning on stderr, so that the others can be used. Do not
    change the records: later calls return the same objects.
    """
    states = dict(_find(results / "runs"))
    stale = [path for path in states if path not in _READ or _READ[path][0] != states[path]]
    if stale:
        values = _read_indexed(results, NAME, _version(), states, _read_values)
        for path in stale:
            _READ.pop(path, None)
            if path in values:
                _READ[path] = states[path], Record.of(values[path], path)
    records = [_READ[path][1] for path in states if path in _READ]
    return sorted(records, key=lambda record: (record.recipe, record.seed, record.run))


def read_of_each(
    results: Path, name: str, version: str, read: Callable[[Path], Any]
) -> dict[Path, Any]:
    """Return values computed from the file of each record, and store them in an index.

    Args:
        results: folder of results.
        name: name of the index's file, beside `runs`.
        version: identifies what `read` computes. Another version makes the index void.
        read: function that computes JSON values from a record's file, or None to leave it out.
    """
    return _read_indexed(results, name, version, dict(_find(results / "runs")), read)


def _find(runs: Path) -> Iterator[tuple[Path, State]]:
    """Yield the path and the state of every record under a folder."""
    for recipe in _folders(runs):
        for home in _folders(recipe):
            path = os.path.join(home, "record.json")
            try:
                status = os.stat(path)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError:  # `read_document` reports what is wrong
                yield Path(path), (0, 0, 0, 0)
                continue
            times = status.st_mtime_ns, status.st_ctime_ns
            yield Path(path), (status.st_ino, *times, status.st_size)


def _folders(folder: str | Path) -> list[str]:
    with suppress(OSError), os.scandir(folder) as entries:
        return sorted(entry.path for entry in entries if entry.is_dir())
    return []


def _read_indexed(
    results: Path,
    name: str,
    version: str,
    states: dict[Path, State],
    read: Callable[[Path], Any],
) -> dict[Path, Any]:
    """Return the values of all files: from the index, or from files that have changed since.

    The index is updated.
    """
    index = _read_index(results / name, version)
    names = {path: str(path).removeprefix(f"{results}/") for path in states}
    is_current = index.keys() <= set(names.values())  # no file was deleted
    entries: dict[str, tuple[State, Any]] = {}
    values = {}
    for path, state in states.items():
        indexed_state, value = index.get(names[path], (None, None))
        if indexed_state is None or tuple(indexed_state) != state:
            value = read(path)
            if value is None:
                continue
            is_current = False
        values[path] = value
        entries[names[path]] = state, value
    if not is_current:
        _write_index(results / name, version, entries)
    return values


def _read_values(path: Path) -> Document | None:
    """Read a record without its large sections. Warn and return None if it is damaged."""
    try:
        document = read_document(path)
    except UserError as error:
        warn_left_out(str(error))
        return None
    return None if document is None else without_large(document)


def _read_index(path: Path, version: str) -> dict[str, Any]:
    """Return the [state, values] of each path, or {} if the index is damaged or void."""
    try:
        head, _, body = read_bytes(path, MAX_INDEX).partition(b"\n")
    except (OSError, UserError):
        return {}
    if head != _head(version, body):
        return {}
    try:
        index = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(index, dict) or not all(map(_is_entry, index.values())):
        return {}
    return index


def _is_entry(entry: Any) -> bool:
    """Return True if an entry is [state, values]; anyone can write the first line of an index."""
    return isinstance(entry, list) and [*map(type, entry)] == [list, dict]


def _write_index(path: Path, version: str, entries: dict[str, tuple[State, Any]]) -> None:
    """Write the index, if the folder can be written to."""
    body = json.dumps(entries, separators=(",", ":")).encode()
    with suppress(OSError, UserError):
        write_bytes(path, _head(version, body) + b"\n" + body)


def _head(version: str, body: bytes) -> bytes:
    """Return the first line of an index, by which damage is detected."""
    return f"{version} {hashlib.sha256(body).hexdigest()}".encode()


@cache
def _version() -> str:
    """Return the digest of the module that checks records and decides which sections are kept."""
    return hashlib.sha256(Path(record_module.__file__).read_bytes()).hexdigest()[:16]


@cache
def warn_left_out(reason: str) -> None:
    """Print why a file is left out, once per process."""
    print_message(f"left out: {reason}")
