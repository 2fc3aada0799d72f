"""List the files of a person's own data: in class folders, or by a CSV. None is opened.

PATH/CLASS/FILE                 each file counts as a patient of its own
PATH/CLASS/PATIENT/.../FILE     the folder below the class is the patient
PATH/train|test|validation/CLASS/...    split by the person
PATH.csv                        columns path, label and, where known, patient and split
"""

from __future__ import annotations

import csv
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from zdp_bench.data.files import require_inside, visible_files
from zdp_bench.errors import UserError

PARTS = ("train", "test", "validation")
COLUMNS = ("path", "label", "patient", "split")


@dataclass(frozen=True)
class Item:
    """One file, its class and its patient.

    Attributes:
        name: the path below the folder, or as the CSV has it.
        patient: the file's own name where none is known.
        part: one of PARTS; empty where the split is still to be drawn.
    """

    path: Path
    name: str
    label: str
    patient: str
    part: str


def find_items(path: Path, suffixes: Collection[str], patient: str | None) -> list[Item]:
    """List every file, sorted by name.

    Args:
        suffixes: of the files that are expected.
        patient: a regular expression whose first group, in the file's name, is the patient.

    Raises:
        UserError: nothing is there, a file is of another kind or leads out of the folder, or
            patients or splits contradict one another.
    """
    if not path.exists():
        raise UserError(f"dataset.path={path}: there is no such folder or CSV.")
    found = list(_by_csv(path) if path.suffix == ".csv" else _by_folder(path))
    if not found:
        raise UserError(f"dataset.path={path}: holds no file in a class folder.")
    for item in found:
        if item.path.suffix.lower() not in suffixes:
            raise UserError(
                f"{item.path}: is none of {', '.join(suffixes)}; move it out of the data."
            )
    if patient is not None:
        found = [_with_patient(item, patient) for item in found]
    _require_consistent(path, found)
    return sorted(found, key=lambda item: item.name)


def _by_folder(path: Path) -> Iterator[Item]:
    if not path.is_dir():
        raise UserError(f"dataset.path={path}: is neither a folder nor a CSV.")
    split = all((path / part).is_dir() for part in PARTS[:2])
    for part in PARTS if split else ("",):
        for folder in visible_files(path / part) if (path / part).is_dir() else []:
            if not folder.is_dir():
                raise UserError(
                    f"{folder}: is no class folder. PATH/CLASS/FILE is expected, or a CSV."
                )
            for file in _files_below(folder):
                require_inside(file, path)
                inner = file.relative_to(folder).parts
                name = file.relative_to(path).as_posix()
                patient = inner[0] if len(inner) > 1 else name
                yield Item(file, name, folder.name, patient, part)


def _files_below(folder: Path) -> Iterator[Path]:
    for path in visible_files(folder):
        if path.is_dir():
            yield from _files_below(path)
        else:
            yield path


def _by_csv(path: Path) -> Iterator[Item]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: cannot be read as CSV ({type(error).__name__}).") from None
    for number, line in enumerate(lines, start=2):
        of = {key: (line.get(key) or "").strip() for key in COLUMNS}
        where = f"{path}, line {number}"
        if not of["path"] or not of["label"]:
            raise UserError(f"{where}: columns path and label must both be there and filled.")
        if ("split" in line and of["split"] not in PARTS) or (
            "patient" in line and not of["patient"]
        ):
            raise UserError(
                f"{where}: split must be {', '.join(PARTS[:2])} or {PARTS[2]}, and patient must "
                "be filled; leave the column out if it is not known."
            )
        named = path.parent / of["path"]
        if not named.is_file():
            raise UserError(f"{where}: there is no file {named}.")
        require_inside(named, path.parent)
        yield Item(named, of["path"], of["label"], of["patient"] or of["path"], of["split"])


def _with_patient(item: Item, pattern: str) -> Item:
    try:
        match = re.search(pattern, item.path.name)
    except re.error as error:
        raise UserError(f"dataset.patient={pattern}: is no regular expression: {error}.") from None
    if not match or not match.groups() or not match[1]:
        raise UserError(
            f"{item.path}: its name does not tell the patient by dataset.patient={pattern}, whose "
            "first group is the patient."
        )
    return Item(item.path, item.name, item.label, match[1], item.part)


def _require_consistent(path: Path, found: list[Item]) -> None:
    """Refuse a patient in two parts, and the same file twice."""
    part_of: dict[str, str] = {}
    names: set[str] = set()
    for item in found:
        if item.name in names:
            raise UserError(f"{path}: names {item.name} twice.")
        names.add(item.name)
        if part_of.setdefault(item.patient, item.part) != item.part:
            raise UserError(
                f"{path}: patient {item.patient} is in {part_of[item.patient]} and in {item.part}; "
                "split by patient, or the test measures what was trained on."
            )
