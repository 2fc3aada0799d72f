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
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from zdp_bench.data import Dataset, DatasetInfo, Examples, Most, Part, Pixels, PublicShare, Splits
from zdp_bench.data.augmentation import Affine
from zdp_bench.data.cache import load_or_make
from zdp_bench.data.files import absent, digest, holds_any, require_inside, sha256, visible_files
from zdp_bench.data.owners import hold_out_owners
from zdp_bench.data.pictures import open_picture, read_picture
from zdp_bench.errors import UserError, require
from zdp_bench.foreign_files import expect, reading
from zdp_bench.registry import register

FOLDER = Path("chest_xray")
PARTS = ("train", "test")
CLASSES = ("NORMAL", "PNEUMONIA")
SUFFIXES = (".jpeg", ".jpg")
OFFICIAL = (5216, 624)  # films to train and to test on
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


@register("dataset", "chest_xray")
@dataclass(frozen=True, kw_only=True)
class ChestXray(Dataset):
    """Films as float32 [1, size, size], in bytes until they are drawn; label 1 is pneumonia.

    max_per_patient: at most so many training films of a patient, the first by name: bounds what a
        patient contributes.
    """

    size: Pixels = 224
    validation_share: PublicShare = 0.15
    max_per_patient: Most = None
    augment: bool = True
    split_seed: int = 0

    def split(self, found: list[Film], digests: list[str]) -> Split:
        """Take the release's test part as it is; cut the rest by patient.

        Args:
            digests: the same for films of the same bytes only, so that copies are dropped.
        """
        each = list(zip(found, digests, strict=True))
        test = [film for film in found if film.part == "test"]
        tested = {film.patient for film in test}
        seen = {digest for film, digest in each if film.part == "test"}
        rest, crossing, copies = list[Film](), list[Film](), 0
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
        owners = [film.patient for film in rest]
        testing = hold_out_owners(owners, self.validation_share, self.split_seed)
        used, train = Counter[str](), list[Film]()
        for film, held in zip(rest, testing, strict=True):
            used[film.patient] += not held
            if not held and used[film.patient] <= (self.max_per_patient or len(rest)):
                train.append(film)
        rule = f"leaves {len(train)} films to train and {len(test)} to test"
        fits = bool(train and test)
        require(fits, "dataset.validation_share", self.validation_share, rule)
        validation = [film for film, held in zip(rest, testing, strict=True) if held]
        return Split(train, validation, test, crossing, copies, used.total() - len(train))

    def load(self, root: Path) -> Splits:
        """The release has no checksum for a folder: with other counts it is 'derived'.

        Other counts mean other parts: numbers on such a test part are not the paper's.
        """
        size, found = self.size, find_films(root / FOLDER)
        digests = [sha256(film.path) for film in found]
        split = self.split(found, digests)
        each = zip(found, digests, strict=True)
        contents = "".join(f"{film.path.relative_to(root / FOLDER)}:{of}" for film, of in each)
        files, shape = digest(f"{size}:{contents}"), (len(found), 1, size, size)
        films = (read_film(film.path, size)[None, None] for film in found)
        pixels = torch.from_numpy(load_or_make("films", files, shape, np.uint8, films))
        names, groups = np.unique([film.patient for film in found], return_inverse=True)
        labels = torch.tensor([film.label for film in found])
        everything = Examples(pixels, labels, torch.from_numpy(groups), PIXELS)
        row_of = {film: row for row, film in enumerate(found)}

        def take(films: list[Film]) -> Part:
            return Part(everything, torch.tensor([row_of[film] for film in films]))

        share, bound = self.validation_share, self.max_per_patient
        options = (size, share, self.split_seed, bound, self.augment, PIXELS)
        train, test = (sum(film.part == part for film in found) for part in PARTS)
        is_whole, (all_train, all_test) = (train, test) == OFFICIAL, OFFICIAL
        others = (
            f"not the release's parts: {train:,} + {test:,} films to train + test, where it "
            f"has {all_train:,} + {all_test:,}"
        )
        notes = [*([] if is_whole else [others]), *_notes(split, found[0], size)]
        return Splits(
            take(split.train),
            take(split.test),
            input_shape=(1, size, size),
            outputs=1,
            provenance="official" if is_whole else "derived",
            digest=digest(f"{files}:{options!r}"),
            notes="; ".join(notes),
            augment=AUGMENT.images if self.augment else None,
            validation=take(split.validation) if split.validation else None,
            owner_names=names.tolist(),
        )

    def released(self, root: Path) -> DatasetInfo | None:
        if holds_any(root / FOLDER):
            return None
        used, most = 1 - self.validation_share, SPLIT["most"]
        train = round(used * SPLIT["train"])
        return DatasetInfo(
            train=train,
            test=SPLIT["test"],
            validation=SPLIT["train"] - train,
            input_shape=(1, self.size, self.size),
            outputs=1,
            examples_per_patient=min(most, self.max_per_patient or most),
            owners=round(used * SPLIT["patients"]),
        )


def _notes(split: Split, first: Film, size: int) -> list[str]:
    with open_picture(first.path) as picture:
        stored = f"{picture.size[0]}×{picture.size[1]}"
    people, crossing = (len({film.patient for film in of}) for of in (split.train, split.crossing))
    notes = [
        f"films stored at {stored} (the first), read at {size}²",
        f"{len(split.train):,} films of {people:,} patients to train, "
        f"{len(split.validation):,} to validate (public), {len(split.test):,} to test",
        f"{crossing} patients stood in both parts, whose {len(split.crossing)} train films "
        "were dropped",
        f"{split.copies} copies of another film were dropped",
    ]
    if split.over_bound:
        notes.append(f"{split.over_bound:,} films beyond the bound per patient were dropped")
    return notes


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
                raise absent(here / "*.jpeg", "chest_xray")
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
