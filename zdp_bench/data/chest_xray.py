"""Kermany's paediatric chest films, pneumonia or not (Ziller et al. 2021, deepee).

    chest_xray/train|test/NORMAL|PNEUMONIA/*.jpeg

The release splits by film, not by patient. Its names tell the patient:
`person12_bacteria_45.jpeg`, `IM-0115-0001.jpeg`, `NORMAL2-IM-0587-0001-0002.jpeg`. A patient who is
in both parts under one number keeps only the test films here; numbers may have been given anew in
each part, so this drops more than it must, never less. Of files with the same bytes one is kept.
Both are counted in the notes.

The validation films are whole patients of the train part; they steer the learning rate, and no ε
covers them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from zdp_bench.data import (
    Dataset,
    DatasetInfo,
    Examples,
    Most,
    Part,
    Pixels,
    Provenance,
    PublicShare,
    Splits,
)
from zdp_bench.data.augmentation import Affine
from zdp_bench.data.cache import load_or_make
from zdp_bench.data.files import digest, holds_any, require_inside, sha256, try_each, visible_files
from zdp_bench.data.owners import hold_out_owners
from zdp_bench.data.pictures import open_picture, read_picture
from zdp_bench.errors import UserError
from zdp_bench.foreign_files import expect, reading
from zdp_bench.registry import register

FOLDER = Path("chest_xray")
PARTS = ("train", "test")
CLASSES = ("NORMAL", "PNEUMONIA")
SUFFIXES = (".jpeg", ".jpg")
OFFICIAL = {"train": 5216, "test": 624}
# Split by patient: films to train or validate on, how many patients' they are, the most of one.
SPLIT = {"train": 4135, "test": 1062, "patients": 2276, "most": 30}
PATIENT = re.compile(r"(?:(person\d+)_(?:bacteria|virus)_|((?:NORMAL2-)?IM-\d+)-)")
# Mean and deviation of a pixel in [0, 1]: round numbers of ours, with nothing of the films in them.
PIXELS = (0.5, 0.25)
AUGMENT = Affine(degrees=10, translate=0.05, scale=0.1, shear=5, fill=(0 - PIXELS[0]) / PIXELS[1])


@dataclass(frozen=True)
class Film:
    """One file, its part of the release, its label and its patient."""

    path: Path
    part: str
    label: int
    patient: str


@dataclass(frozen=True)
class Split:
    """The films of each part as they are used, and what was left out."""

    train: list[Film]
    validation: list[Film]
    test: list[Film]
    crossing: list[Film]  # train films of patients who are in the test part too
    copies: int
    over_bound: int

    @property
    def most_of_one(self) -> int:
        """The most training films of any one patient."""
        return max(Counter(film.patient for film in self.train).values())


@dataclass(frozen=True, kw_only=True)
class Films(Dataset):
    """Films as float32 [1, size, size], in bytes until they are drawn; label 1 is pneumonia.

    max_per_patient: at most so many training films of a patient, the first by name: bounds what a
        patient contributes.
    """

    size: Pixels = 224
    validation_share: PublicShare = 0.15
    max_per_patient: Most = None
    augment: bool = True

    def split(self, found: list[Film], digests: list[str], seed: int) -> Split:
        """Take the release's test part as it is; cut the rest by patient.

        Args:
            digests: the same for films of the same bytes only, so that copies are dropped.
        """
        test = [film for film in found if film.part == "test"]
        tested = {film.patient for film in test}
        each = list(zip(found, digests, strict=True))
        seen = {digest for film, digest in each if film.part == "test"}
        rest, copies, crossing = [], 0, []
        for film, digest_ in each:
            if film.part == "test":
                continue
            if film.patient in tested:
                crossing.append(film)
            elif digest_ in seen:
                copies += 1
            else:
                seen.add(digest_)
                rest.append(film)
        held_out = hold_out_owners([film.patient for film in rest], self.validation_share, seed)
        train, used = [], Counter[str]()
        for film, held in zip(rest, held_out, strict=True):
            if not held:
                used[film.patient] += 1
                if self.max_per_patient is None or used[film.patient] <= self.max_per_patient:
                    train.append(film)
        if not train or not test:
            raise UserError(
                f"dataset.validation_share={self.validation_share}: leaves {len(train)} films to "
                f"train and {len(test)} to test."
            )
        return Split(
            train=train,
            validation=[film for film, held in zip(rest, held_out, strict=True) if held],
            test=test,
            crossing=crossing,
            copies=copies,
            over_bound=sum(used.values()) - len(train),
        )

    def describe(self, split: Split) -> DatasetInfo:
        """Count the films of each part."""
        return DatasetInfo(
            train=len(split.train),
            test=len(split.test),
            validation=len(split.validation),
            input_shape=(1, self.size, self.size),
            outputs=1,
            examples_per_patient=split.most_of_one,
            owners=len({film.patient for film in split.train}),
        )

    def load_films(
        self, folder: Path, found: list[Film], provenance: Provenance, seed: int
    ) -> Splits:
        """Read films of a folder and split them; `groups` number the patients."""
        size = self.size
        digests = [sha256(film.path) for film in found]
        split = self.split(found, digests, seed)
        each = zip(found, digests, strict=True)
        names = "".join(f"{film.path.relative_to(folder)}:{digest_}" for film, digest_ in each)
        files = digest(f"{size}:{names}")
        shape = (len(found), 1, size, size)
        pixels = torch.from_numpy(
            load_or_make("films", files, shape, np.uint8, _read_films(found, size))
        )
        row_of = {film.path: row for row, film in enumerate(found)}
        people = sorted({film.patient for film in found})
        number_of = {name: number for number, name in enumerate(people)}

        groups = torch.tensor([number_of[film.patient] for film in found])
        labels = torch.tensor([film.label for film in found])
        everything = Examples(pixels, labels, groups, PIXELS)

        def take(films: list[Film]) -> Part:
            rows = torch.tensor([row_of[film.path] for film in films], dtype=torch.long)
            return Part(everything, rows)

        options = (size, self.validation_share, seed, self.max_per_patient, self.augment, PIXELS)
        return Splits(
            take(split.train),
            take(split.test),
            input_shape=(1, size, size),
            outputs=1,
            provenance=provenance,
            digest=digest(f"{files}:{options!r}"),
            notes=self._notes(split, found),
            augment=AUGMENT.images if self.augment else None,
            validation=take(split.validation) if split.validation else None,
        )

    def _notes(self, split: Split, found: list[Film]) -> str:
        with open_picture(found[0].path) as first:
            stored = f"{first.size[0]}×{first.size[1]}"
        people = len({film.patient for film in split.train})
        crossing = len({film.patient for film in split.crossing})
        notes = [
            f"films stored at {stored} (the first), read at {self.size}²",
            f"{len(split.train):,} films of {people:,} patients to train, "
            f"{len(split.validation):,} to validate (public), {len(split.test):,} to test",
            f"{crossing} patients stood in both parts, whose {len(split.crossing)} train films "
            "were dropped",
            f"{split.copies} copies of another film were dropped",
        ]
        if split.over_bound:
            notes.append(f"{split.over_bound:,} films beyond the bound per patient were dropped")
        return "; ".join(notes)


def _read_films(found: list[Film], size: int) -> Iterator[np.ndarray]:
    """Yield each film as bytes [1, 1, size, size]."""
    for film in found:
        yield read_film(film.path, size)[None, None]


@register("dataset", "chest_xray")
@dataclass(frozen=True, kw_only=True)
class ChestXray(Films):
    """Kermany's chest films under the data root."""

    split_seed: int = 0

    def load(self, root: Path) -> Splits:
        """The release has no checksum for a folder: with other counts it is 'derived'.

        Other counts mean other parts: numbers on such a test part are not the paper's.
        """
        films = find_films(root / FOLDER)
        counts = {part: sum(film.part == part for film in films) for part in PARTS}
        if counts == OFFICIAL:
            return self.load_films(root / FOLDER, films, "official", self.split_seed)
        splits = self.load_films(root / FOLDER, films, "derived", self.split_seed)
        released = " + ".join(f"{OFFICIAL[part]:,}" for part in PARTS)
        found = " + ".join(f"{counts[part]:,}" for part in PARTS)
        note = f"not the release's parts: {found} films to train + test, where it has {released}"
        return replace(splits, notes=f"{note}; {splits.notes}")

    def info(self, root: Path) -> DatasetInfo:
        """Count films, without copies; without films, as in the release and in proportion."""
        if not holds_any(root / FOLDER):
            used = 1 - self.validation_share
            train = round(used * SPLIT["train"])
            return DatasetInfo(
                train=train,
                test=SPLIT["test"],
                validation=SPLIT["train"] - train,
                input_shape=(1, self.size, self.size),
                outputs=1,
                examples_per_patient=min(SPLIT["most"], self.max_per_patient or SPLIT["most"]),
                owners=round(used * SPLIT["patients"]),
                found=False,
            )
        found = find_films(root / FOLDER)
        digests = [sha256(film.path) for film in found]
        return self.describe(self.split(found, digests, self.split_seed))

    def check_files(self, root: Path) -> Iterator[tuple[Path, str]]:
        """Read every film."""
        paths = [film.path for film in find_films(root / FOLDER)]
        return try_each(paths, lambda path: read_film(path, 8))


def patient_of(path: Path) -> str:
    """'person12_virus_45.jpeg' -> 'person12', 'NORMAL2-IM-0587-0001.jpeg' -> 'NORMAL2-IM-0587'."""
    if not (match := PATIENT.match(path.name)):
        raise UserError(
            f"{path}: its name does not identify the patient, unlike person12_bacteria_45.jpeg or "
            "IM-0115-0001.jpeg."
        )
    return match[1] or match[2]


def find_films(folder: Path) -> list[Film]:
    """List every film of the release, by part, class and name; none is opened."""
    found = []
    for part in PARTS:
        for label, name in enumerate(CLASSES):
            here = folder / part / name
            paths = visible_files(here) if here.is_dir() else []
            if not paths:
                raise UserError(
                    f"{here}: contains no film. Unpack the archive of chest_xray there (see "
                    "datasets/chest_xray.yaml), or use dataset=chest_xray_synthetic."
                )
            for path in paths:
                require_inside(path, folder)
                with reading(path):
                    is_film = path.suffix.lower() in SUFFIXES
                    expect(is_film, "is not a JPEG file; only films belong here")
                found.append(Film(path, part, label, patient_of(path)))
    return found


def read_film(path: Path, size: int) -> np.ndarray:
    """Read one film as grey bytes [size, size].

    It is resized bilinearly over each pixel's whole support; its aspect is not kept.
    """
    return read_picture(path, size, formats=("JPEG",))[0]
