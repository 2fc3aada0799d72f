"""List the files of your own data, from folders or a CSV, without opening them.

PATH/CLASS/FILE                 each file is its own patient
PATH/CLASS/PATIENT/.../FILE     the folder below the class is the patient
PATH/images/..., PATH/masks/... the same names in both; the folder below images is the patient
PATH/images/..., PATH/references/...  the same, with the target of each image's reconstruction
PATH/train|test|validation/...  split by you, with any of the above below; also Train, val
PATH.csv                        columns path, one of TARGETS and, if known, patient and split
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import torch
from torch import Tensor

from zdp_bench.data.files import require_inside, visible_files
from zdp_bench.data.owner_names import require_named, require_one_spelling
from zdp_bench.data.owners import pick_test_owners
from zdp_bench.errors import UserError, require
from zdp_bench.extras.own_data.readers import HEADER, Facts, Kind
from zdp_bench.foreign_files import Unfit, compile_pattern, expect, read_text, reading

PARTS = ("train", "test", "validation")
# name of a part's folder, in any letter case -> part
SPLITS = {**{part: part for part in PARTS}, "training": "train", "testing": "test"}
SPLITS |= {"val": "validation", "valid": "validation"}
TARGETS = ("label", "mask", "reference")
COLUMNS = ("path", *TARGETS, "patient", "split")
IMAGES = "images"
PARTNERS = {"masks": "mask", "references": "reference"}  # folder beside images/ -> target
MAX_CSV = 2**28  # bytes

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Item:
    """A file with its class, mask or reference, and its patient.

    Attributes:
        path: path of the file.
        name: its path below the folder, or as the CSV states it.
        label: its class; '' if it has a mask or a reference.
        patient: its patient; the file's name if the patient is not known.
        part: one of PARTS; '' if the split has not been drawn yet.
        target: which of TARGETS it has.
        partner: path of its mask, or of its reference, which is of the same kind.
    """

    path: Path
    name: str
    label: str
    patient: str
    part: str
    target: str = "label"
    partner: Path | None = None


def find_items(path: Path, patient: str | None) -> list[Item]:
    """List every file, sorted by name.

    Args:
        path: path of a folder or a CSV. Paths in a CSV are relative to its folder.
        patient: regular expression whose first group is the patient. It is searched in the file's
            name, and then in its path below the folder.
    """
    try:
        require(path.exists(), "dataset.path", path, "folder or CSV not found")
        found = list(_by_csv(path) if path.is_file() else _by_folder(path))
    except OSError as error:  # no permission, or a name that is too long
        where = error.filename or path
        raise UserError(f"{where}: cannot be read ({error.strerror}).") from None
    require(bool(found), "dataset.path", path, "contains no file in a class folder")
    if patient is not None:
        rule = _compile("dataset.patient", patient)
        found = [_with_patient(item, rule) for item in found]
    _require_consistent(path, path.parent if path.is_file() else path, found)
    return sorted(found, key=lambda item: item.name)


def _find_parts(path: Path) -> dict[str, Path]:
    """Return the folder of each part, or the folder itself as '' if it is not split.

    A single folder with the name of a part, beside others, is a class, such as pictures of trains.

    Raises:
        UserError: A split lacks train or test, or has two folders for one part.
    """
    folders = [folder for folder in visible_files(path) if folder.is_dir()]
    named = [folder for folder in folders if folder.name.casefold() in SPLITS]
    if not named or len(named) == 1 < len(folders):
        return {"": path}
    parts = {SPLITS[folder.name.casefold()]: folder for folder in named}
    if len(parts) < len(named) or not {*PARTS[:2]} <= parts.keys():
        raise UserError(
            f"{path}: has the folders {', '.join(folder.name for folder in named)}. A split has "
            "train/ and test/, and perhaps validation/, with the classes in each: rename them, or "
            "move the classes to where these folders are, and the test part is drawn by patient."
        )
    return {part: parts[part] for part in PARTS if part in parts}


def _by_folder(path: Path) -> Iterator[Item]:
    for part, home in _find_parts(path).items():
        partners = [name for name in PARTNERS if (home / name).is_dir()]
        if (home / IMAGES).is_dir() and partners:
            yield from _with_partners(path, home, part, partners[0])
        elif (home / IMAGES).is_dir():
            raise UserError(
                f"{home}: has {IMAGES}/, and neither {' nor '.join(f'{p}/' for p in PARTNERS)} "
                "beside it."
            )
        else:
            for folder in visible_files(home):
                if not folder.is_dir():
                    raise UserError(
                        f"{folder}: is not a class folder. Expected PATH/CLASS/FILE, or a CSV."
                    )
                yield from _items_below(folder, path, folder.name, part)


def _with_partners(path: Path, home: Path, part: str, folder: str) -> Iterator[Item]:
    """Pair the files below images/ with those of the same name, but for the suffix, in `folder`."""
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
        yield replace(item, target=what, partner=partner)
    if partners:
        lone = min(partners.values())
        raise UserError(f"{lone}: is the {what} without an image of the same name.")


def _bare(path: Path, folder: Path) -> str:
    """'p1/scan.nii.gz' of a file below a folder -> 'p1/scan'."""
    name = path.relative_to(folder).as_posix()
    return re.sub(r"(\.nii)?\.[^./]+$", "", name)


def _items_below(folder: Path, path: Path, label: str, part: str) -> Iterator[Item]:
    for file in _files_below(folder):
        inner = file.relative_to(folder).parts
        name = file.relative_to(path).as_posix()
        if len(inner) > 1 and inner[0].casefold() in SPLITS:
            raise UserError(
                f"{folder / inner[0]}: is the folder of a patient in this place, and is named as a "
                "part of a split; put train/ and test/ above the classes, or above images/."
            )
        yield Item(file, name, label, inner[0] if len(inner) > 1 else name, part)


def _files_below(folder: Path) -> Iterator[Path]:
    """Yield every file in a folder and its subfolders, sorted by name."""
    pending = _entries(folder)
    while pending:
        path = pending.pop()
        if path.is_dir() and not path.is_symlink():
            pending += _entries(path)
        else:
            yield path


def _entries(folder: Path) -> list[Path]:
    """List the entries of a folder in reverse order, because `_files_below` pops from the end.

    Signal files with a header beside them are left out.
    """
    here = visible_files(folder)
    headers = {path.stem for path in here if path.suffix == HEADER}
    entries = []
    for path in reversed(here):
        is_folder = path.is_dir() and not path.is_symlink()
        if is_folder or path.suffix == HEADER or path.stem not in headers:
            entries.append(path)
    return entries


def _by_csv(path: Path) -> Iterator[Item]:
    """Read a CSV with commas, semicolons or tabs; repeated lines count once."""
    with reading(path):
        text = read_text(path, MAX_CSV, "utf-8-sig")
        sep = max(",;\t", key=text.partition("\n")[0].count)
        table = pandas.read_csv(
            StringIO(text), sep=sep, header=None, dtype=str, keep_default_na=False
        ).apply(lambda column: column.str.strip())
        expect(len(table) > 1, "contains no line below its header; list a file in each")
        _require_columns(table.iloc[0].tolist())
        names = [name.lower() for name in table.iloc[0]]
        table = table[1:].set_axis(names, axis=1)[[name for name in COLUMNS if name in names]]
    lines = table.to_dict("records")
    numbered = [(f"{path}, line {number}", line) for number, line in enumerate(lines, start=2)]
    yield from dict.fromkeys(_item_of(path, where, line) for where, line in numbered)


def _require_columns(header: list[str]) -> None:
    """Reject a header that lacks a needed column, has one twice, or one that may be a slip."""
    names = [name.lower() for name in header]
    twice = [name for name, times in Counter(names).items() if times > 1 and name in COLUMNS]
    expect(not twice, f"has several columns '{' '.join(twice[:1])}'; leave one")
    targets = [name for name in TARGETS if name in names]
    rule = (
        f"has the columns {', '.join(header)[:200]}; path and label are required, or path and "
        "mask, or path and reference; patient and split are optional. Rename your columns"
    )
    expect("path" in names and len(targets) == 1, rule)
    for name in filter(None, header):
        near = get_close_matches(name.lower(), {"patient", "split"} - {*names}, 1, 0.75)
        if name.lower() not in COLUMNS:
            rule = f"has a column '{name}', which is not known. Is it {' '.join(near)}? Rename it"
            expect(not near, rule)


def _item_of(path: Path, where: str, of: Mapping[Any, str]) -> Item:
    (target,) = {*TARGETS} & {*of}
    if not of["path"] or not of[target]:
        raise UserError(f"{where}: columns path and {target} must exist and have no empty cells.")
    if (part := of.get("split", PARTS[0])) not in PARTS:
        rule = f"must be {', '.join(PARTS[:2])} or {PARTS[2]} in every line, or in no column"
        raise UserError(f"{where}: split {part!r} {rule}.")
    if not of.get("patient", "-"):
        raise UserError(f"{where}: patient is empty; fill it in, or leave the column out.")
    file, name = _named(path, where, of["path"]), of["path"]
    partner = None if target == "label" else _named(path, where, of[target])
    patient, part = of.get("patient", name), of.get("split", "")
    return Item(file, name, of.get("label", ""), patient, part, target, partner)


def _named(path: Path, where: str, name: str) -> Path:
    """Return the file that a CSV's line names."""
    file = path.parent / name
    if not file.is_file():
        raise UserError(f"{where}: file not found: {file}.")
    return file


def _compile(key: str, pattern: str) -> re.Pattern[str]:
    """Compile the regular expression of an option, which an error names."""
    try:
        return compile_pattern(pattern)
    except Unfit as error:
        raise UserError(f"{key}: {error}.") from None


def _with_patient(item: Item, rule: re.Pattern[str]) -> Item:
    match = rule.search(item.path.name) or rule.search(item.name)
    if not match or not match.groups() or not match[1]:
        raise UserError(
            f"{item.path}: its name does not match dataset.patient={rule.pattern}, whose first "
            "group should be the patient."
        )
    return replace(item, patient=match[1])


def _require_consistent(path: Path, home: Path, found: list[Item]) -> None:
    """Reject a patient in two parts, a link out of the data, and a name or file twice."""
    if patients := [item.patient for item in found if item.patient != item.name]:
        require_named(str(path), "patient", patients)
    require_one_spelling(str(path), "class", {i.label for i in found})
    part_of: dict[str, str] = {}
    names: dict[Path, str] = {}
    home = home.resolve()
    for item in found:
        real = _real(item.path, home)
        if item.partner:
            _real(item.partner, home)
        if real in names:
            also = "" if names[real] == item.name else f", also as {names[real]}"
            raise UserError(f"{path}: names {item.name} twice{also}.")
        names[real] = item.name
        if part_of.setdefault(item.patient, item.part) != item.part:
            raise UserError(
                f"{path}: patient {item.patient} is in {part_of[item.patient]} and in "
                f"{item.part}; split by patient, or the test set contains training patients."
            )


def _real(path: Path, home: Path) -> Path:
    """Return where a file lies; `require_inside`, which is slower, names the problem."""
    try:
        real = path.resolve()
    except (OSError, RuntimeError):
        return require_inside(path, home)
    if real.is_dir():
        raise UserError(f"{path}: is a link to a folder; put the folder itself there.")
    return real if real.is_relative_to(home) else require_inside(path, home)


@dataclass(frozen=True)
class Listing:
    """The files that are used, each with its part, and the classes in order of their number.

    Attributes:
        facts: of each file's header.
        used: which examples of each file are used [k].
        classes: none if the files have masks or references.
        skipped: how many files were left out, because they cannot be read.
    """

    kind: Kind
    items: list[Item]
    facts: list[Facts]
    used: list[np.ndarray]
    classes: list[str]
    skipped: int

    def rows(self, part: str) -> Tensor:
        """Return the places of a part's examples, where all examples are in one array."""
        return torch.nonzero(self.spread([item.part == part for item in self.items])).flatten()

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


def list_examples(
    path: Path,
    kind: Kind,
    items: list[Item],
    facts: list[Facts],
    used: list[np.ndarray],
    skipped: int,
) -> Listing:
    """Return the listing of the files of which anything is used."""
    kept = [n for n, use in enumerate(used) if len(use)]
    items, facts, used = [items[n] for n in kept], [facts[n] for n in kept], [used[n] for n in kept]
    targets = sorted({item.target for item in items})
    rule = f"some of its files have a {targets[0]}, and others a {targets[-1]}"
    require(len(targets) == 1, "dataset.path", path, rule)
    classes = sorted({item.label for item in items if item.target == "label"}, key=_natural)
    one = len(classes) == 1
    require(not one, "dataset.path", path, "contains only one class; a classifier needs two")
    advice = "Change the split, dataset.test_share or dataset.split_seed"
    for part in PARTS[:2]:
        labels = {item.label for item in items if item.part == part}
        require(bool(labels), "dataset.path", path, f"there is no {part} example. {advice}")
        lacking = {*classes} - labels
        rule = f"class {min(lacking, default='')} has no {part} example. {advice}"
        require(not lacking, "dataset.path", path, rule)
    return Listing(kind, items, facts, used, classes, skipped)


def split_items(items: list[Item], test_share: float, seed: int) -> list[Item]:
    """Return the files with their parts: their own, or by a hash of the patient's name."""
    if all(item.part for item in items):
        return items
    patients, labels = [item.patient for item in items], [item.label for item in items]
    held = pick_test_owners(patients, labels, test_share, seed)
    return [replace(i, part="test" if i.patient in held else "train") for i in items]


def choose_examples(items: list[Item], counts: list[int], most: int | None) -> list[np.ndarray]:
    """Return which examples of each file are used: all, but at most so many of a patient to train.

    These are spread evenly over the patient's files, and over the planes of each.
    """
    used = [np.arange(count) for count in counts]
    files: dict[str, list[int]] = {}
    for n, item in enumerate(items):
        if item.part == "train":
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
