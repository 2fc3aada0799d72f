"""List the files of your own data, from folders or a CSV, without opening them.

PATH/CLASS/FILE                         each file is its own patient
PATH/CLASS/PATIENT/.../FILE             the folder below the class is the patient
PATH/images/..., PATH/masks/...         the same names; the folder below images is the patient
PATH/images/..., PATH/references/...    the same, with the target of each image's reconstruction
PATH/train|test|validation/...          your own split of any of the above; also Train, val, ...
PATH.csv                                columns path, one of TARGETS, and perhaps patient and split
"""

from __future__ import annotations

import csv
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from difflib import get_close_matches
from io import StringIO
from itertools import zip_longest
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from zdp_bench.data import signals
from zdp_bench.data.files import require_inside, visible_files
from zdp_bench.data.owner_names import may_name_owners, require_named, require_one_spelling
from zdp_bench.data.owners import pick_test_owners, spread_evenly
from zdp_bench.errors import UserError, require
from zdp_bench.extras.own_data.readers import HEADER_SUFFIX, KINDS, Facts, Kind, fits
from zdp_bench.foreign_files import (
    Unfit,
    compile_pattern,
    exists,
    expect,
    is_file,
    read_text,
    reading,
    resolve,
)

REQUIRED_PARTS = ("train", "test")
PARTS = (*REQUIRED_PARTS, "validation")
# Optional columns of a CSV, and how like one of them a misspelt name is, out of 1: `cv_split` is
# taken for one, and `patient_age` is not.
MIN_LIKENESS = {"patient": 0.8, "split": 0.75}
# name of a part's folder, in any letter case -> part
PART_OF_FOLDER = {**{part: part for part in PARTS}, "training": "train", "testing": "test"}
PART_OF_FOLDER |= {"val": "validation", "valid": "validation"}
TARGETS = ("label", "mask", "reference")
COLUMNS = ("path", *TARGETS, "patient", "split")
IMAGES = "images"
PARTNERS = {"masks": "mask", "references": "reference"}  # folder beside images/ -> target
MAX_CSV = 2**28  # bytes
MISSING = ("", "nan", "na", "<na>", "n/a", "nat")  # targets that tables write if there is none
NUMBER = re.compile(r"[+-]?\d+(\.\d+)?")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Item:
    """A file with its patient and its class, mask or reference.

    Attributes:
        path: path of the file.
        name: path below the folder, or as the CSV states it.
        label: class; '' for a file with a mask or reference.
        patient: patient, or `name` if the patient is not known.
        part: one of `PARTS`; '' if the split has not been drawn yet.
        target: one of `TARGETS`: what the file has. Default: "label".
        partner: path of the mask, or of the reference, which is a file of the same kind. Default:
            None.
    """

    path: Path
    name: str
    label: str
    patient: str
    part: str
    target: str = "label"
    partner: Path | None = None


def find_items(path: Path, patient: str | None) -> list[Item]:
    """List all files, sorted by name.

    Args:
        path: path of a folder or a CSV. Paths in a CSV are relative to its folder.
        patient: regular expression whose first group is the patient. It is searched in the file's
            name, and then in its path below the folder. None: the folder names the patient.

    Raises:
        UserError: the path has none of the forms above, or its files contradict one another.
    """
    try:
        require(exists(path), "dataset.path", path, "folder or CSV not found")
        is_csv = path.is_file()
        is_example = is_csv and any(kind.marks and fits(path, kind) for kind in KINDS)
        require(not is_example, "dataset.path", path, "is one file; name its folder, or a CSV")
        items = list(_list_csv(path, patient is not None) if is_csv else _list_folder(path))
    except OSError as error:  # no permission, or a name that is too long
        where = error.filename or path
        raise UserError(f"{where}: cannot be read ({error.strerror}).") from None
    require(bool(items), "dataset.path", path, "contains no file in a class folder")
    if patient is not None:
        pattern = _compile("dataset.patient", patient)
        items = [_with_patient(item, pattern) for item in items]
    _require_consistent(path, path.parent if path.is_file() else path, items)
    return sorted(items, key=lambda item: item.name)


def _find_parts(path: Path) -> dict[str, Path]:
    """Return the folder of each part, or {'': path} if the files are not split.

    A single folder with the name of a part, beside others, is a class, such as pictures of trains,
    unless another one has the same folders.

    Raises:
        UserError: a split lacks train or test, has two folders for one part, or has something else
            beside them.
    """
    entries = visible_files(path)
    folders = [folder for folder in entries if folder.is_dir()]
    part_folders = [folder for folder in folders if folder.name.casefold() in PART_OF_FOLDER]
    is_class = len(part_folders) == 1 and len(folders) > 1
    if is_class:
        _require_other_content(part_folders[0], folders)
    if not part_folders or is_class:
        return {"": path}
    parts = {PART_OF_FOLDER[folder.name.casefold()]: folder for folder in part_folders}
    has_two_for_one_part = len(parts) < len(part_folders)
    if has_two_for_one_part or not parts.keys() >= {*REQUIRED_PARTS}:
        names = ", ".join(folder.name for folder in part_folders)
        raise UserError(
            f"{path}: has the folders {names}. A split has train/ and test/, and perhaps "
            "validation/, with the classes in each. If these folders are classes, rename them. To "
            "have the test part drawn by patient, move the classes out of them."
        )
    if others := [entry for entry in entries if entry not in part_folders]:
        raise UserError(
            f"{others[0]}: is beside {parts['train'].name}/ and {parts['test'].name}/, and belongs "
            "to no part; move it away, or name a folder of validation examples validation/."
        )
    return {part: parts[part] for part in PARTS if part in parts}


def _require_other_content(part: Path, folders: list[Path]) -> None:
    """Reject a folder beside that of a part which has the same folders, as in a split.

    Otherwise both would be classes, and the classes in them patients.
    """
    inner_names = {
        folder: {entry.name for entry in visible_files(folder) if entry.is_dir()}
        for folder in folders
    }
    for folder, names in inner_names.items():
        if folder != part and names and names == inner_names[part]:
            raise UserError(
                f"{folder}: has the same folders as {part.name}/ beside it; if both are parts of a "
                "split, name them train/, test/ or validation/. If they are classes, rename "
                f"{part.name}/."
            )


def _list_folder(path: Path) -> Iterator[Item]:
    for part, home in _find_parts(path).items():
        partner_folders = [name for name in PARTNERS if (home / name).is_dir()]
        if (home / IMAGES).is_dir() and partner_folders:
            # If there are several, `_pair_files` rejects the others.
            yield from _pair_files(path, home, part, partner_folders[0])
        elif (home / IMAGES).is_dir():
            raise UserError(
                f"{home}: has {IMAGES}/, but neither {' nor '.join(f'{p}/' for p in PARTNERS)} "
                "beside it."
            )
        else:
            for folder in visible_files(home):
                if not folder.is_dir():
                    raise UserError(
                        f"{folder}: is not a class folder. Expected PATH/CLASS/FILE, or a CSV."
                    )
                yield from _items_below(folder, path, folder.name, part)


def _pair_files(path: Path, home: Path, part: str, partner_folder: str) -> Iterator[Item]:
    """Yield the files below images/, each with its mask or reference.

    Both have the same name, at least apart from the suffix.

    Args:
        path: path of the data.
        home: folder of the part, which contains images/.
        part: the part.
        partner_folder: name of the folder of masks or references.
    """
    target = PARTNERS[partner_folder]
    for file in visible_files(home):
        if file.name not in (IMAGES, partner_folder):
            raise UserError(f"{file}: is beside {IMAGES}/ and {partner_folder}/; move it away.")
    images_home, partners_home = home / IMAGES, home / partner_folder
    partners: dict[str, Path] = {}  # `_pair_name` -> path
    for item in _items_below(partners_home, path, "", part):
        pair_name = _pair_name(item.path, partners_home, images_home)
        first_path = partners.setdefault(pair_name, item.path)
        if first_path != item.path:
            raise UserError(f"{item.path}: is a {target} of the same image as {first_path.name}.")
    for item in _items_below(images_home, path, "", part):
        partner = partners.pop(_pair_name(item.path, images_home, partners_home), None)
        if partner is None:
            raise UserError(f"{item.path}: has no {target} of the same name below {partners_home}.")
        yield replace(item, target=target, partner=partner)
    if partners:
        unpaired = min(partners.values())
        raise UserError(
            f"{unpaired}: is a {target} without an image of the same name, or the second {target} "
            "of one."
        )


def _pair_name(path: Path, folder: Path, other_folder: Path) -> str:
    """Return what an image and its mask or reference have in common.

    That is the path below the folder if the other folder has a file with this path too. Otherwise,
    it is the path without suffix: 'p1/scan' for 'p1/scan.nii.gz'. The numbers at the end of DICOM
    names, such as 'IM.001' and '1.2.840', are no suffixes.
    """
    name = path.relative_to(folder).as_posix()
    if (other_folder / name).is_file():
        return name
    return re.sub(r"(\.nii)?\.[a-z][^./]*$", "", name, flags=re.IGNORECASE)


def _items_below(folder: Path, path: Path, label: str, part: str) -> Iterator[Item]:
    for file in _files_below(folder):
        inner = file.relative_to(folder).parts
        name = file.relative_to(path).as_posix()
        if len(inner) > 1 and inner[0].casefold() in PART_OF_FOLDER:
            raise UserError(
                f"{folder / inner[0]}: is the folder of a patient in this place, but is named like "
                "a part of a split; put train/ and test/ above the classes, or above images/."
            )
        patient = inner[0] if len(inner) > 1 else name
        yield Item(file, name, label, patient, part)


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

    Signal files with a header beside them, which has their stem or names them, are left out.
    """
    paths = visible_files(folder)
    headers = {path for path in paths if path.suffix.lower() == HEADER_SUFFIX}
    stems = {header.stem for header in headers}
    named = set[str]().union(*map(signals.signal_names, headers))
    entries = []
    for path in reversed(paths):
        is_folder = path.is_dir() and not path.is_symlink()
        is_signal = path.stem in stems or path.name in named
        if is_folder or path in headers or not is_signal:
            entries.append(path)
    return entries


def _list_csv(path: Path, has_pattern: bool) -> Iterator[Item]:
    """Yield the files in a CSV with commas, semicolons or tabs. Repeated lines count once.

    Args:
        path: path of the CSV.
        has_pattern: whether the files' names state the patients, so that no column has to.
    """
    with reading(path):
        text = read_text(path, MAX_CSV, "utf-8-sig")
        lines = _read_lines(text)
        expect(bool(lines), "is empty; it must name its columns and list the files")
        (_, header), *rows = lines
        expect(bool(rows), "contains no line below its header; list a file in each")
        _require_columns(header, has_pattern)
        if has_pattern:
            rule = (
                "has a column patient, which dataset.patient would replace; leave one of them out"
            )
            expect("patient" not in [name.lower() for name in header], rule)
        else:
            _require_patient_column(header)
        for number, cells in rows:
            fault = f"has {len(cells)} cells in line {number}, and {len(header)} columns"
            expect(len(cells) <= len(header), fault)
    names = [name.lower() for name in header]
    items: dict[Item, None] = {}
    for number, cells in rows:
        cell_of = dict(zip_longest(names, cells, fillvalue=""))
        used = {name: cell_of[name] for name in COLUMNS if name in cell_of}
        items[_item_of(path, f"{path}, line {number}", used)] = None
    yield from items


def _read_lines(text: str) -> list[tuple[int, list[str]]]:
    """Return the number and the cells of each line of a CSV, without blank lines."""
    first_line = text.lstrip().partition("\n")[0]
    separator = max(",;\t", key=first_line.count)
    reader = csv.reader(StringIO(text, newline=""), delimiter=separator, strict=True)
    lines = []
    for row in reader:
        cells = [cell.strip() for cell in row]
        if cells not in ([], [""]):
            lines.append((reader.line_num, cells))
    return lines


def _require_columns(header: list[str], has_pattern: bool) -> None:
    """Reject a header that lacks a column, repeats one, or has one that may be misspelt.

    Args:
        header: names of the columns.
        has_pattern: see `_list_csv`.
    """
    names = [name.lower() for name in header]
    repeated = [name for name, count in Counter(names).items() if count > 1 and name in COLUMNS]
    if repeated:
        raise Unfit(f"has several columns '{repeated[0]}'; leave one")
    targets = [name for name in TARGETS if name in names]
    fault = (
        f"has the columns {', '.join(header)[:200]}; path and label are required, or path and "
        "mask, or path and reference; patient and split are optional. Rename your columns"
    )
    expect("path" in names and len(targets) == 1, fault)
    for name in filter(None, header):
        if name.lower() in COLUMNS:
            continue
        for column, min_likeness in MIN_LIKENESS.items():
            if column in names or (column == "patient" and has_pattern):
                continue
            if get_close_matches(name.lower(), [column], cutoff=min_likeness):
                raise Unfit(f"has an unknown column '{name}'. Is it {column}? Rename it")


def _require_patient_column(header: list[str]) -> None:
    """Reject a header that names patients in a column of another name.

    Each file would count as a patient of its own.
    """
    if "patient" in [name.lower() for name in header]:
        return
    for name in header:
        rule = (
            f"has the column '{name}', which may name patients, and no column 'patient', so each "
            "file would count as its own patient; rename the column to patient, or remove it"
        )
        expect(not may_name_owners(name), rule)


def _item_of(path: Path, where: str, cells: Mapping[str, str]) -> Item:
    """Return the item of a CSV's line.

    Args:
        path: path of the CSV.
        where: path and number of the line, for errors.
        cells: column -> cell.
    """
    (target,) = {*TARGETS} & {*cells}  # exactly one; see `_require_columns`
    if not cells["path"] or cells[target].casefold() in MISSING:
        raise UserError(
            f"{where}: columns path and {target} must exist and have no empty cells or NaN; leave "
            "the line out, or fill it in."
        )
    if "split" in cells and cells["split"] not in PARTS:
        rule = f"must be {', '.join(REQUIRED_PARTS)} or {PARTS[2]} in every line, or have no column"
        raise UserError(f"{where}: split {cells['split']!r} {rule}.")
    if "patient" in cells and not cells["patient"]:
        raise UserError(f"{where}: patient is empty; fill it in, or leave the column out.")
    name = cells["path"]
    return Item(
        _require_file(path, where, name),
        name,
        cells.get("label", ""),
        patient=cells.get("patient", name),
        part=cells.get("split", ""),
        target=target,
        partner=None if target == "label" else _require_file(path, where, cells[target]),
    )


def _require_file(path: Path, where: str, name: str) -> Path:
    """Return the file that a line of a CSV names, which must exist."""
    file = path.parent / name
    if not is_file(file):
        raise UserError(f"{where}: file not found: {file}.")
    return file


def _compile(key: str, pattern: str) -> re.Pattern[str]:
    """Compile a regular expression; an error names its option `key`."""
    try:
        return compile_pattern(pattern)
    except Unfit as error:
        raise UserError(f"{key}: {error}.") from None


def _with_patient(item: Item, pattern: re.Pattern[str]) -> Item:
    match = pattern.search(item.path.name) or pattern.search(item.name)
    if not match or not match.groups() or not match[1]:
        raise UserError(
            f"{item.path}: its name does not match dataset.patient={pattern.pattern}, whose first "
            "group should be the patient."
        )
    return replace(item, patient=match[1])


def _require_consistent(path: Path, home: Path, items: list[Item]) -> None:
    """Reject a patient in two parts, a link out of the data, and a file that is listed twice.

    Args:
        path: path of the data, for errors.
        home: folder that contains all files.
        items: the files.
    """
    if patients := [item.patient for item in items if item.patient != item.name]:
        require_named(str(path), "patient", patients)
    require_one_spelling(str(path), "class", {item.label for item in items})
    part_of: dict[str, str] = {}
    name_of: dict[Path, str] = {}
    home = home.resolve()
    for item in items:
        real_path = _resolve_inside(item.path, home)
        if item.partner:
            _resolve_inside(item.partner, home)  # only checked: several images may share a mask
        if real_path in name_of:
            first_name = name_of[real_path]
            alias = "" if first_name == item.name else f", also as {first_name}"
            raise UserError(f"{path}: names {item.name} twice{alias}.")
        name_of[real_path] = item.name
        if part_of.setdefault(item.patient, item.part) != item.part:
            raise UserError(
                f"{path}: patient {item.patient} is in {part_of[item.patient]} and in "
                f"{item.part}; split by patient, or the test set contains training patients."
            )


def _resolve_inside(path: Path, home: Path) -> Path:
    """Return the real path of a file, with links resolved, which must be inside `home`.

    `require_inside` does the same, but is slower, because it also resolves `home` each time. It is
    called only if the check here fails, for its error.

    Args:
        path: path of the file.
        home: the folder, with links resolved.
    """
    try:
        real_path = resolve(path)
    except OSError:
        return require_inside(path, home)
    if real_path.is_dir():
        raise UserError(f"{path}: is a link to a folder; put the folder itself there.")
    if not real_path.is_relative_to(home):
        return require_inside(path, home)
    return real_path


@dataclass(frozen=True)
class Listing:
    """The files that are used, and their classes.

    Attributes:
        kind: kind of all files.
        items: the files, each with its part.
        facts: facts in the header of each file.
        used: indices [k] of the examples of each file that are used.
        classes: names of the classes, in the order of their numbers. Empty if the files have masks
            or references.
        skipped: number of files that were left out because they cannot be read.
    """

    kind: Kind
    items: list[Item]
    facts: list[Facts]
    used: list[np.ndarray]
    classes: list[str]
    skipped: int

    def rows(self, part: str) -> Tensor:
        """Return the indices of a part's examples, among all used examples in order."""
        return torch.nonzero(self.spread([item.part == part for item in self.items])).flatten()

    def spread(self, values: list[int] | list[bool]) -> Tensor:
        """Repeat the value of each file for each of its used examples, [n]."""
        counts = torch.tensor([len(indices) for indices in self.used])
        return torch.tensor(values).repeat_interleave(counts)

    @property
    def target(self) -> str:
        """What the files have: 'label', 'mask' or 'reference'."""
        return self.items[0].target

    @property
    def has_signed_or_fractional_classes(self) -> bool:
        """True if a class is a number with a sign or a fraction.

        Earlier versions sorted such classes in another order.
        """
        return any(NUMBER.fullmatch(name) and not name.isdecimal() for name in self.classes)

    @property
    def unit(self) -> str:
        """Kind of the owners of examples: patients or, if none is known, files."""
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
    """Return the listing of the files that have a used example.

    Args:
        path: path of the data, for errors.
        kind, items, facts, used, skipped: see `Listing`.

    Raises:
        UserError: files have different targets, there is only one class, or the train or test part
            lacks examples or a class.
    """
    kept = [index for index, indices in enumerate(used) if len(indices)]
    items = [items[index] for index in kept]
    facts = [facts[index] for index in kept]
    used = [used[index] for index in kept]
    require(bool(items), "dataset.path", path, "contains no example")
    targets = sorted({item.target for item in items})
    fault = f"some of its files have a {targets[0]}, and others a {targets[-1]}"
    require(len(targets) == 1, "dataset.path", path, fault)
    classes = sorted({item.label for item in items if item.target == "label"}, key=_sort_key)
    fault = "contains only one class; a classifier needs two"
    require(len(classes) != 1, "dataset.path", path, fault)
    advice = "Change the split, dataset.test_share or dataset.split_seed"
    if classes:
        advice += f", or dataset.path if {classes[0]} is no class"
    for part in REQUIRED_PARTS:
        items_of_part = [item for item in items if item.part == part]
        fault = f"there is no {part} example. {advice}"
        require(bool(items_of_part), "dataset.path", path, fault)
        classes_of_part = {item.label for item in items_of_part}
        for label in classes:
            fault = f"class {label} has no {part} example. {advice}"
            require(label in classes_of_part, "dataset.path", path, fault)
    return Listing(kind, items, facts, used, classes, skipped)


def split_items(items: list[Item], test_share: float, seed: int) -> list[Item]:
    """Return the files with their parts, which are drawn unless you split the files yourself.

    Args:
        items: the files.
        test_share: fraction of the patients to test on.
        seed: seed that draws them.
    """
    if all(item.part for item in items):
        return items
    patients, labels = [item.patient for item in items], [item.label for item in items]
    test_patients = pick_test_owners(patients, labels, test_share, seed)
    return [
        replace(item, part="test" if item.patient in test_patients else "train") for item in items
    ]


def choose_examples(
    items: list[Item], counts: list[int], max_per_patient: int | None
) -> list[np.ndarray]:
    """Return the indices [k] of the used examples of each file.

    If a patient has too many training examples, those used are spread evenly (`spread_evenly`) over
    the patient's files and over the examples of each file, such as the planes of a volume.

    Args:
        items: the files.
        counts: number of examples of each file.
        max_per_patient: maximum number of training examples per patient. None: all.
    """
    used = [np.arange(count) for count in counts]
    files_of: dict[str, list[int]] = {}  # patient -> indices of the files
    for index, item in enumerate(items):
        if item.part == "train":
            files_of.setdefault(item.patient, []).append(index)
    for files in files_of.values():
        ends = np.cumsum([counts[index] for index in files])
        if max_per_patient is None or ends[-1] <= max_per_patient:
            continue
        # Indices among all examples of the patient.
        chosen = spread_evenly(ends[-1], max_per_patient)
        for index, end in zip(files, ends, strict=True):
            start = end - counts[index]
            used[index] = chosen[(start <= chosen) & (chosen < end)] - start
    return used


def _sort_key(name: str) -> tuple[bool, Decimal, str]:
    """Return a sort key that puts numbers first, in the order of their values."""
    is_number = NUMBER.fullmatch(name) is not None
    return not is_number, Decimal(name) if is_number else Decimal(0), name
