"""Dermatoscopic pictures of HAM10000, labelled melanoma or not (Tschandl et al. 2018).

    ham10000/HAM10000_metadata.csv
    ham10000/HAM10000_images_part_1|HAM10000_images_part_2/ISIC_0024306.jpg

The published table states the lesion of each picture (`lesion_id`), but not the patient. So the
owner of a picture is its lesion, and two lesions may be of the same person. The published data are
not split, so lesions are split here. ε does not cover validation pictures.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from zdp_bench.data import (
    Dataset,
    DatasetInfo,
    Examples,
    Fraction,
    Part,
    Pixels,
    PublicFraction,
    Splits,
)
from zdp_bench.data.files import (
    absent,
    count_parts,
    digest,
    list_files,
    require_distinct,
    sha256,
)
from zdp_bench.data.owner_names import require_named
from zdp_bench.data.owners import hold_out_owners, warn_of_shared_files
from zdp_bench.data.pictures import describe_size, load_pictures
from zdp_bench.errors import UserError, require
from zdp_bench.foreign_files import expect, read_text, reading
from zdp_bench.registry import register

FOLDER = Path("ham10000")
METADATA = "HAM10000_metadata.csv"
PARTS = ("HAM10000_images_part_1", "HAM10000_images_part_2")
COLUMNS = ("lesion_id", "image_id", "dx")
# The seven published diagnoses; mel is melanoma.
DIAGNOSES = ("akiec", "bcc", "bkl", "df", "mel", "nv", "vasc")
IMAGE = re.compile(r"ISIC_\d{7}")
# Numbers of the published data.
NUM_PICTURES = 10_015
NUM_LESIONS = 7_470
MAX_PER_LESION = 6
MAX_METADATA = 1 << 22  # bytes
# Mean and standard deviation that normalise pixels in [0, 1]: public constants, not estimates.
PIXELS = (0.5, 0.25)

Target = Literal["melanoma", "diagnosis"]


@dataclass(frozen=True)
class Picture:
    """A file, the lesion that it shows, and the diagnosis."""

    path: Path
    lesion: str
    diagnosis: str


@register("dataset", "ham10000")
@dataclass(frozen=True, kw_only=True)
class Ham10000(Dataset):
    """Pictures, float32 [3, size, size], stored as bytes.

    Args:
        size: number of rows and of columns of an example. Default: 224.
        target: "melanoma", whose label is 1 for melanoma, or "diagnosis", whose label is an index
            in `DIAGNOSES`. Default: "melanoma".
        test_share: fraction of the pictures to test on, in whole lesions. Default: 0.2.
        validation_share: fraction of the remaining pictures to validate on, in whole lesions.
            Default: 0.
        split_seed: seed that draws the lesions. Default: 0.
    """

    size: Pixels = 224
    target: Target = "melanoma"
    test_share: Fraction = 0.2
    validation_share: PublicFraction = 0.0
    split_seed: int = 0

    @property
    def outputs(self) -> int:
        return 1 if self.target == "melanoma" else len(DIAGNOSES)

    def split(self, lesions: list[str]) -> dict[str, np.ndarray]:
        """Draw the pictures of each part, in whole lesions.

        Args:
            lesions: lesion of each picture.

        Returns:
            Part -> indices of its pictures.
        """
        rows = np.arange(len(lesions))
        is_test = hold_out_owners(lesions, self.test_share, self.split_seed)
        rest = rows[~is_test]
        rule = f"leaves {len(rest)} pictures to train and {is_test.sum()} to test"
        require(0 < len(rest) < len(rows), "dataset.test_share", self.test_share, rule)
        remaining = [lesions[row] for row in rest]
        is_validation = hold_out_owners(remaining, self.validation_share, self.split_seed)
        rule = f"leaves none of {len(rest)} pictures to train on"
        require(not is_validation.all(), "dataset.validation_share", self.validation_share, rule)
        return {
            "train": rest[~is_validation],
            "validation": rest[is_validation],
            "test": rows[is_test],
        }

    def load(self, root: Path) -> Splits:
        """Load the pictures.

        They are 'official' if they have the published numbers of pictures and lesions, because no
        checksums are published.
        """
        home = root / FOLDER
        size = self.size
        pictures = list_pictures(home)
        paths = [picture.path for picture in pictures]
        digests = [sha256(path) for path in paths]
        contents = [f"{path.name}:{content}" for path, content in zip(paths, digests, strict=True)]
        files = digest(f"{size}:{''.join(contents)}")
        pixels = load_pictures("lesions", files, paths, size, channels=3)
        # None is dropped, because it is not known which of the lesions the picture shows.
        lesions = [picture.lesion for picture in pictures]
        warn_of_shared_files(paths, lesions, digests, f"remove one with its row in {METADATA}")
        names, groups = np.unique(lesions, return_inverse=True)
        labels = torch.tensor([self.label(picture.diagnosis) for picture in pictures])
        all_examples = Examples(pixels, labels, torch.from_numpy(groups), PIXELS)
        parts = {}
        for part, rows in self.split(lesions).items():
            parts[part] = Part(all_examples, torch.from_numpy(rows))
        is_complete = (len(pictures), len(names)) == (NUM_PICTURES, NUM_LESIONS)
        options = (
            size,
            self.target,
            self.test_share,
            self.validation_share,
            self.split_seed,
            PIXELS,
        )
        diagnoses = sha256(home / METADATA)
        return Splits(
            parts["train"],
            parts["test"],
            input_shape=(3, size, size),
            outputs=self.outputs,
            provenance="official" if is_complete else "derived",
            digest=digest(f"{files}:{diagnoses}:{options!r}"),
            notes="; ".join(self.describe(pictures, parts)),
            validation=parts["validation"] if len(parts["validation"]) else None,
            unit="lesion",
            owner_names=names.tolist(),
        )

    def label(self, diagnosis: str) -> int:
        """Return the class of a diagnosis."""
        if self.target == "melanoma":
            return int(diagnosis == "mel")
        return DIAGNOSES.index(diagnosis)

    def describe(
        self,
        pictures: Sequence[Picture],
        parts: dict[str, Part],
    ) -> list[str]:
        """Return the notes of the record on the pictures and the parts."""
        lesions = len({picture.lesion for picture in pictures})
        notes = [f"{len(pictures):,} pictures of {lesions:,} lesions"]
        if (len(pictures), lesions) != (NUM_PICTURES, NUM_LESIONS):
            notes.append(
                f"a part of the {NUM_PICTURES:,} published pictures of {NUM_LESIONS:,} lesions"
            )
        first_to_test = pictures[int(parts["test"].rows[0])]
        stored = describe_size(first_to_test.path)
        notes.append(f"pictures stored at {stored} (the first to test), read at {self.size}²")
        counts = {name: len(part) for name, part in parts.items()}
        notes.append(f"{count_parts(counts)}, by whole lesions")
        return notes

    def published_info(self, root: Path) -> DatasetInfo | None:
        if (root / FOLDER / METADATA).is_file():
            return None
        test = round(self.test_share * NUM_PICTURES)
        validation = round(self.validation_share * (NUM_PICTURES - test))
        train = NUM_PICTURES - test - validation
        return DatasetInfo(
            train=train,
            test=test,
            validation=validation,
            input_shape=(3, self.size, self.size),
            outputs=self.outputs,
            examples_per_patient=min(MAX_PER_LESION, train),
            unit="lesion",
            owners=max(1, round(NUM_LESIONS * train / NUM_PICTURES)),
        )


def list_pictures(home: Path) -> list[Picture]:
    """List the pictures in the metadata, sorted by name, without opening them.

    Raises:
        UserError: a picture is in neither folder, in both, or not in the metadata; or a row is
            damaged.
    """
    table = home / METADATA
    if not table.is_file():
        raise absent(table, "ham10000")
    rows = read_metadata(table)
    paths = find_files(home)
    for name in rows:
        if name not in paths:
            raise UserError(
                f"{home}: {name}.jpg is in neither {PARTS[0]} nor {PARTS[1]}, but {METADATA} names "
                "it; put it there, or remove its row."
            )
    for name, path in paths.items():
        if name not in rows:
            raise UserError(f"{path}: is not in {METADATA}; add its row, or remove the file.")
    return [Picture(paths[name], *rows[name]) for name in sorted(rows)]


def find_files(home: Path) -> dict[str, Path]:
    """Return the paths of the pictures in both folders, by name."""
    paths: list[Path] = []
    for folder in (home / part for part in PARTS):
        if folder.is_dir():
            rule = "is not named as a picture, such as ISIC_0024306.jpg"
            paths += list_files(folder, home, _is_picture, rule)
    require_distinct(paths, lambda path: path.stem, "picture")
    return {path.stem: path for path in paths}


def _is_picture(path: Path) -> bool:
    return path.suffix == ".jpg" and IMAGE.fullmatch(path.stem) is not None


def read_metadata(table: Path) -> dict[str, tuple[str, str]]:
    """Return the lesion and the diagnosis of each picture, by name.

    Raises:
        UserError: the table lacks a column, or a row is damaged or repeated.
    """
    lines = csv.DictReader(read_text(table, MAX_METADATA, "utf-8-sig").splitlines(), strict=True)
    rows: dict[str, tuple[str, str]] = {}
    with reading(table):
        columns = lines.fieldnames or []
        wrong = [column for column in COLUMNS if columns.count(column) != 1]
        expect(not wrong, f"has no column {', '.join(wrong)}, or several")
        for line in lines:
            where = f"in line {lines.line_num}"
            expect(None not in line, f"has more cells than columns {where}")
            lesion, image, diagnosis = (line[column] for column in COLUMNS)
            expect(bool(image and IMAGE.fullmatch(image)), f"has no image_id {where}")
            expect(bool(lesion), f"has no lesion_id {where}")
            rule = f"names the diagnosis '{diagnosis}' {where}, none of {', '.join(DIAGNOSES)}"
            expect(diagnosis in DIAGNOSES, rule)
            expect(image not in rows, f"names {image} a second time {where}")
            rows[image] = (lesion, diagnosis)
        expect(bool(rows), "names no picture")
    require_named(str(table), "lesion", [lesion for lesion, _ in rows.values()])
    return rows
