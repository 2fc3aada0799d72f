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
from itertools import product
from pathlib import Path

import numpy as np
import torch

from zdp_bench.data import (
    Dataset,
    DatasetInfo,
    Examples,
    MaxCount,
    Part,
    Pixels,
    PublicFraction,
    Splits,
)
from zdp_bench.data.augmentation import Affine
from zdp_bench.data.files import absent, digest, holds_any, list_files, sha256
from zdp_bench.data.owners import hold_out_owners
from zdp_bench.data.pictures import describe_size, load_pictures
from zdp_bench.errors import UserError, require
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
AUGMENT = Affine(
    degrees=10,
    translate=0.05,
    scale=0.1,
    shear=5,
    fill=(0 - PIXELS[0]) / PIXELS[1],
)


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
    validation_share: PublicFraction = 0.15
    max_per_patient: MaxCount = None
    augment: bool = True
    split_seed: int = 0

    def split(
        self,
        films: list[Film],
        digests: list[str],
    ) -> Split:
        """Take the release's test part as it is; cut the rest by patient.

        Args:
            digests: the same for films of the same bytes only, so that copies are dropped.

        Raises:
            UserError: no film is left to train or to test on.
        """
        test = [film for film in films if film.part == "test"]
        tested = {film.patient for film in test}
        labelled = list(zip(films, digests, strict=True))
        seen = {content for film, content in labelled if film.part == "test"}
        rest, crossing, copies = list[Film](), list[Film](), 0
        for film, content in labelled:
            if film.part == "test":
                continue
            if film.patient in tested:
                crossing.append(film)
            elif content in seen:
                copies += 1
            else:
                seen.add(content)
                rest.append(film)
        patients = [film.patient for film in rest]
        is_held = hold_out_owners(patients, self.validation_share, self.split_seed)
        validation = [film for film, held in zip(rest, is_held, strict=True) if held]
        remaining = [film for film, held in zip(rest, is_held, strict=True) if not held]
        train = self._bound_patients(remaining)
        rule = f"leaves {len(train)} films to train and {len(test)} to test"
        fits = bool(train and test)
        require(fits, "dataset.validation_share", self.validation_share, rule)
        over_bound = len(remaining) - len(train)
        return Split(train, validation, test, crossing, copies, over_bound)

    def _bound_patients(self, films: list[Film]) -> list[Film]:
        """Return the first `max_per_patient` films of each patient."""
        bound = self.max_per_patient or len(films)
        used = Counter[str]()
        kept = []
        for film in films:
            used[film.patient] += 1
            if used[film.patient] <= bound:
                kept.append(film)
        return kept

    def load(self, root: Path) -> Splits:
        """The release has no checksum for a folder: with other counts it is 'derived'.

        Other counts mean other parts: numbers on such a test part are not the paper's.
        """
        folder, size = root / FOLDER, self.size
        films = find_films(folder)
        digests = [sha256(film.path) for film in films]
        split = self.split(films, digests)
        contents = [
            f"{film.path.relative_to(folder)}:{content}"
            for film, content in zip(films, digests, strict=True)
        ]
        files = digest(f"{size}:{''.join(contents)}")
        pixels = load_pictures("films", files, [film.path for film in films], size, channels=1)
        names, groups = np.unique([film.patient for film in films], return_inverse=True)
        labels = torch.tensor([film.label for film in films])
        whole = Examples(pixels, labels, torch.from_numpy(groups), PIXELS)
        row_of = {film: row for row, film in enumerate(films)}

        def take(part: list[Film]) -> Part:
            return Part(whole, torch.tensor([row_of[film] for film in part]))

        parts = Counter(film.part for film in films)
        is_whole = (parts["train"], parts["test"]) == OFFICIAL
        notes = _notes(split, films[0], size)
        if not is_whole:
            notes.insert(
                0,
                f"not the release's parts: {parts['train']:,} + {parts['test']:,} films to train + "
                f"test, where it has {OFFICIAL[0]:,} + {OFFICIAL[1]:,}",
            )
        options = (
            size,
            self.validation_share,
            self.split_seed,
            self.max_per_patient,
            self.augment,
            PIXELS,
        )
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


def _notes(
    split: Split,
    first: Film,
    size: int,
) -> list[str]:
    patients = {film.patient for film in split.train}
    crossing = {film.patient for film in split.crossing}
    notes = [
        f"films stored at {describe_size(first.path)} (the first), read at {size}²",
        f"{len(split.train):,} films of {len(patients):,} patients to train, "
        f"{len(split.validation):,} to validate (public), {len(split.test):,} to test",
        f"{len(crossing)} patients stood in both parts, whose {len(split.crossing)} train films "
        "were dropped",
        f"{split.copies} copies of another film were dropped",
    ]
    if split.over_bound:
        notes.append(f"{split.over_bound:,} films beyond the bound per patient were dropped")
    return notes


def patient_of(path: Path) -> str:
    """'person12_virus_45.jpeg' -> 'person12', 'NORMAL2-IM-0587-0001.jpeg' -> 'NORMAL2-IM-0587'."""
    match = PATIENT.match(path.name)
    if match is None:
        raise UserError(
            f"{path}: its name does not identify the patient, unlike person12_bacteria_45.jpeg or "
            "IM-0115-0001.jpeg."
        )
    return match[1] or match[2]


def find_films(folder: Path) -> list[Film]:
    """List every film of the release, by part, class and name; none is opened."""
    films = []
    for part, (label, name) in product(PARTS, enumerate(CLASSES)):
        here = folder / part / name
        if not holds_any(here):
            raise absent(here / "*.jpeg", "chest_xray")
        paths = list_files(
            here,
            folder,
            lambda path: path.suffix.lower() in SUFFIXES,
            "is not a JPEG file; only films belong here",
        )
        films += [Film(path, part, label, patient_of(path)) for path in paths]
    return films
