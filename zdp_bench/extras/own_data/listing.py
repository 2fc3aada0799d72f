"""List the files of a person's own data, in folders or by a CSV. None is opened.

PATH/CLASS/FILE                 each file counts as a patient of its own
PATH/CLASS/PATIENT/.../FILE     the folder below the class is the patient
PATH/images/..., PATH/masks/... the same names below both; the folder below images is the patient
PATH/images/..., PATH/references/...  the same, with what each image should be
PATH/train|test|validation/...  split by the person, with either of the above below
PATH.csv                        columns path, one of TARGETS and, where known, patient and split
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from zdp_bench.data.files import require_inside, visible_files
from zdp_bench.data.owners import hold_out_owners
from zdp_bench.errors import UserError, require, suggestion
from zdp_bench.extras.own_data.readers import Kind
from zdp_bench.foreign_files import expect, reading

PARTS = ("train", "test", "validation")
TARGETS = ("label", "mask", "reference")
COLUMNS = ("path", *TARGETS, "patient", "split")
IMAGES = "images"
PARTNERS = {"masks": "mask", "references": "reference"}  # folder beside images/ -> what it holds
LARGEST_CSV = 2**28  # bytes
HEADER = ".hea"  # of WFDB: what else has its name belongs to it


@dataclass(frozen=True)
class Item:
    """One file, its class, mask or reference, and its patient.

    Attributes:
        name: the path below the folder, or as the CSV has it.
        label: empty where it has a mask or a reference.
        reference: what the image should be, of the same kind.
        patient: the file's own name where none is known.
        part: one of PARTS; empty where the split is still to be drawn.
    """

    path: Path
    name: str
    label: str
    patient: str
    part: str
    mask: Path | None = None
    reference: Path | None = None

    @property
    def partner(self) -> Path | None:
        """The mask or the reference, if it has one."""
        return self.mask or self.reference

    @property
    def target(self) -> str:
        """Which of TARGETS it has."""
        return "mask" if self.mask else "reference" if self.reference else "label"


def find_items(path: Path, suffixes: Collection[str], patient: str | None) -> list[Item]:
    """List every file, sorted by name.

    Args:
        suffixes: of the files that are expected.
        patient: a regular expression whose first group, in the file's name, is the patient.
    """
    try:
        require(path.exists(), "dataset.path", path, "there is no such folder or CSV")
        found = list(_by_csv(path) if path.suffix == ".csv" else _by_folder(path))
    except OSError as error:  # no permission, or a name that is too long
        where = error.filename or path
        raise UserError(f"{where}: cannot be read ({error.strerror}).") from None
    require(bool(found), "dataset.path", path, "holds no file in a class folder")
    for item in found:
        if not item.path.name.lower().endswith(tuple(suffixes)):
            raise UserError(
                f"{item.path}: is none of {', '.join(suffixes)}; move it out of the data."
            )
    if patient is not None:
        found = [_with_patient(item, patient) for item in found]
    _require_consistent(path, found)
    return sorted(found, key=lambda item: item.name)


def _by_folder(path: Path) -> Iterator[Item]:
    require(path.is_dir(), "dataset.path", path, "is neither a folder nor a CSV")
    split = all((path / part).is_dir() for part in PARTS[:2])
    for part in PARTS if split else ("",):
        home = path / part
        partners = [name for name in PARTNERS if (home / name).is_dir()]
        if (home / IMAGES).is_dir() and partners:
            yield from _with_partners(path, home, part, partners[0])
        elif (home / IMAGES).is_dir():
            raise UserError(
                f"{home}: has {IMAGES}/, and neither {' nor '.join(f'{p}/' for p in PARTNERS)} "
                "beside it."
            )
        elif home.is_dir():
            for folder in visible_files(home):
                if not folder.is_dir():
                    raise UserError(
                        f"{folder}: is no class folder. PATH/CLASS/FILE is expected, or a CSV."
                    )
                yield from _items_below(folder, path, folder.name, part)


def _with_partners(path: Path, home: Path, part: str, folder: str) -> Iterator[Item]:
    """Pair the files below images/ with those below `folder` of the same name, up to its ending."""
    what = PARTNERS[folder]
    if others := [f for f in visible_files(home) if f.name not in (IMAGES, folder)]:
        raise UserError(f"{others[0]}: stands beside {IMAGES}/ and {folder}/; move it away.")
    partners: dict[str, Path] = {}
    for item in _items_below(home / folder, path, "", part):
        if (other := partners.setdefault(_bare(item.path, home / folder), item.path)) != item.path:
            raise UserError(f"{item.path}: is a {what} of the same image as {other.name}.")
    for item in _items_below(home / IMAGES, path, "", part):
        if (partner := partners.pop(_bare(item.path, home / IMAGES), None)) is None:
            raise UserError(f"{item.path}: has no {what} of the same name below {home / folder}.")
        yield _with_partner(item, what, partner)
    if partners:
        lone = min(partners.values())
        raise UserError(f"{lone}: is the {what} of no image; there is none of its name.")


def _with_partner(item: Item, what: str, file: Path) -> Item:
    mask, reference = (file if what == target else None for target in TARGETS[1:])
    return replace(item, mask=mask, reference=reference)


def _bare(path: Path, folder: Path) -> str:
    """'p1/scan.nii.gz' of a file below a folder -> 'p1/scan'."""
    name = path.relative_to(folder).as_posix()
    return re.sub(r"(\.nii)?\.[^./]+$", "", name)


def _items_below(folder: Path, path: Path, label: str, part: str) -> Iterator[Item]:
    for file in _files_below(folder):
        require_inside(file, path)
        inner = file.relative_to(folder).parts
        name = file.relative_to(path).as_posix()
        yield Item(file, name, label, inner[0] if len(inner) > 1 else name, part)


def _files_below(folder: Path) -> Iterator[Path]:
    here = visible_files(folder)
    headers = {path.stem for path in here if path.suffix == HEADER}
    for path in here:
        if path.is_dir() and path.is_symlink():
            raise UserError(f"{path}: is a link to a folder; put the folder itself there.")
        if path.is_dir():
            yield from _files_below(path)
        elif path.suffix == HEADER or path.stem not in headers:
            yield path


def _by_csv(path: Path) -> Iterator[Item]:
    with reading(path, LARGEST_CSV), path.open(encoding="utf-8-sig", newline="") as file:
        table = csv.DictReader(file)
        columns = [name.strip() for name in table.fieldnames or []]
        table.fieldnames = columns
        lines = list(table)
        _require_columns(columns)
    for number, line in enumerate(lines, start=2):
        yield _item_of(path, f"{path}, line {number}", line, columns)


def _require_columns(columns: list[str]) -> None:
    """Refuse columns that lack a needed one, or have one that may be a slip of another's name."""
    fits = "path" in columns and len({*TARGETS} & {*columns}) == 1
    rule = "path and label are needed, or path and mask, or path and reference; patient and split"
    expect(fits, f"has the columns {', '.join(columns)[:200]}; {rule} where they are known")
    lacking = {*COLUMNS} - {*columns} - {*TARGETS}
    for name in {*columns} - {*COLUMNS}:
        near = suggestion(name.lower(), lacking)
        expect(not near, f"has a column '{name}', which is not known.{near} Rename it")


def _item_of(path: Path, where: str, line: dict[str, str], columns: Collection[str]) -> Item:
    of = {key: (line.get(key) or "").strip() for key in COLUMNS}
    (target,) = {*TARGETS} & {*columns}
    if not of["path"] or not of[target]:
        raise UserError(f"{where}: columns path and {target} must both be there and filled.")
    if ("split" in columns and of["split"] not in PARTS) or (
        "patient" in columns and not of["patient"]
    ):
        raise UserError(
            f"{where}: split must be {', '.join(PARTS[:2])} or {PARTS[2]}, and patient must "
            "be filled; leave the column out if it is not known."
        )
    patient = of["patient"] or of["path"]
    file = _named(path, where, of["path"])
    item = Item(file, of["path"], of["label"], patient, of["split"])
    return (
        item if target == "label" else _with_partner(item, target, _named(path, where, of[target]))
    )


def _named(path: Path, where: str, name: str) -> Path:
    """Return the file that a CSV's line names, which must be below the CSV's folder."""
    file = path.parent / name
    try:
        require_inside(file, path.parent)
    except ValueError:
        raise UserError(f"{where}: {name!r} is no file's name.") from None
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    if not file.is_file():
        raise UserError(f"{where}: there is no file {file}.")
    return file


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
    return replace(item, patient=match[1])


def _require_consistent(path: Path, found: list[Item]) -> None:
    """Refuse a patient in two parts, and the same file twice, also by two names."""
    part_of: dict[str, str] = {}
    names: dict[Path, str] = {}
    for item in found:
        real = item.path.resolve()
        if real in names:
            also = "" if names[real] == item.name else f", also as {names[real]}"
            raise UserError(f"{path}: names {item.name} twice{also}.")
        names[real] = item.name
        if part_of.setdefault(item.patient, item.part) != item.part:
            raise UserError(
                f"{path}: patient {item.patient} is in {part_of[item.patient]} and in {item.part}; "
                "split by patient, or the test measures what was trained on."
            )


@dataclass(frozen=True)
class Listing:
    """The files that are used, the part of each, and the classes in order of their number.

    Attributes:
        used: which examples of each file are used [k].
        classes: none if the files have masks or references.
        skipped: how many files were left out, because they cannot be read.
    """

    kind: Kind
    items: list[Item]
    parts: list[str]
    used: list[np.ndarray]
    classes: list[str]
    skipped: int = 0

    def count(self, part: str) -> int:
        """How many examples a part has."""
        return sum(len(use) for use, of in zip(self.used, self.parts, strict=True) if of == part)

    def rows(self, part: str) -> Tensor:
        """Return the places of a part's examples, where all examples are in one array."""
        return torch.nonzero(self.spread([of == part for of in self.parts])).flatten()

    def spread(self, values: list[int] | list[bool]) -> Tensor:
        """Return a value of each file as one of each example [n]."""
        each = torch.tensor([len(use) for use in self.used])
        return torch.tensor(values).repeat_interleave(each)

    @property
    def target(self) -> str:
        """What the files have: 'label', 'mask' or 'reference'."""
        return self.items[0].target

    @property
    def unit(self) -> str:
        """Who owns examples: a patient, or a file where no patient is known."""
        known = any(item.patient != item.name for item in self.items)
        return "patient" if known else self.kind.name

    def training(self, key: str) -> Counter[str]:
        """Count the training examples of each patient, or of each label."""
        found = Counter[str]()
        for item, use, part in zip(self.items, self.used, self.parts, strict=True):
            if part == "train":
                found[getattr(item, key)] += len(use)
        return found


def list_examples(
    path: Path, kind: Kind, items: list[Item], parts: list[str], used: list[np.ndarray]
) -> Listing:
    """Return the listing of the files of which anything is used."""
    kept = [n for n, use in enumerate(used) if len(use)]
    targets = sorted({item.target for item in items})
    rule = f"some of its files have a {targets[0]}, and others a {targets[-1]}"
    require(len(targets) == 1, "dataset.path", path, rule)
    listing = Listing(
        kind,
        [items[n] for n in kept],
        [parts[n] for n in kept],
        [used[n] for n in kept],
        sorted({item.label for item in items if item.target == "label"}, key=_natural),
    )
    one = len(listing.classes) == 1
    require(not one, "dataset.path", path, "holds one class only; a classifier needs two")
    advice = "Change the split, dataset.test_share or dataset.split_seed"
    for part in PARTS[:2]:
        there = listing.count(part)
        require(there > 0, "dataset.path", path, f"there is no {part} example. {advice}")
        chosen = zip(listing.items, listing.parts, strict=True)
        lacking = {*listing.classes} - {item.label for item, of in chosen if of == part}
        rule = f"class {min(lacking, default='')} has no {part} example. {advice}"
        require(not lacking, "dataset.path", path, rule)
    return listing


def split_items(items: list[Item], test_share: float, seed: int) -> list[str]:
    """Return the part of each file: its own, or drawn by patient."""
    if all(item.part for item in items):
        return [item.part for item in items]
    held = hold_out_owners([item.patient for item in items], test_share, seed)
    return ["test" if testing else "train" for testing in held]


def choose_examples(
    items: list[Item], parts: list[str], counts: list[int], most: int | None
) -> list[np.ndarray]:
    """Return which examples of each file are used: all, but at most so many of a patient to train.

    These are spread evenly over the patient's files, and over the planes of each.
    """
    used = [np.arange(count) for count in counts]
    files: dict[str, list[int]] = {}
    for n, (item, part) in enumerate(zip(items, parts, strict=True)):
        if part == "train":
            files.setdefault(item.patient, []).append(n)
    for own in files.values():
        ends = np.cumsum([counts[n] for n in own])
        if most is None or ends[-1] <= most:
            continue
        kept = np.linspace(0, ends[-1] - 1, most).round().astype(int)
        for n, end in zip(own, ends, strict=True):
            start = end - counts[n]
            used[n] = kept[(start <= kept) & (kept < end)] - start
    return used


def _natural(name: str) -> tuple[bool, int, str]:
    """Sort classes that are numbers by value, before all others."""
    return not name.isdecimal(), int(name) if name.isdecimal() else 0, name
