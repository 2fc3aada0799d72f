"""Kermany's paediatric chest films, labelled pneumonia or normal (Ziller et al. 2021, deepee).

    chest_xray/train|test/NORMAL|PNEUMONIA/*.jpeg

The release is split by film, not by patient. File names contain the patient:
`person12_bacteria_45.jpeg`, `IM-0115-0001.jpeg`, `NORMAL2-IM-0587-0001-0002.jpeg`. The training
films of a patient whose number also occurs in the test part are dropped. The two parts may number
their patients separately, so this may drop films of different patients, but never keeps films of
the same one. The notes count both. Of a patient's training films with equal content, one is kept,
and none that is also a validation or test film. Whether a film is kept never depends on those of
other patients to train on, so that ε holds for one patient more or less. The test part is as
released.

Validation films are those of whole patients of the train part. They steer the learning rate, and no
ε covers them.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

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
from zdp_bench.data.owners import hold_out_owners, warn_of_shared_files
from zdp_bench.data.pictures import describe_size, load_pictures
from zdp_bench.errors import UserError, require
from zdp_bench.registry import register

FOLDER = Path("chest_xray")
PARTS = ("train", "test")
CLASSES = ("NORMAL", "PNEUMONIA")
SUFFIXES = (".jpeg", ".jpg")
OFFICIAL = (5216, 624)  # number of training and test films of the release
# Counts of the release without copies and without the training films of patients who are in both
# parts: films to train or validate on, their patients, and the largest number of one patient.
SPLIT = {"train": 4737, "test": 624, "patients": 2676, "max_per_patient": 18}
PATIENT = re.compile(r"(?:(person\d+)_(?:bacteria|virus)_|((?:NORMAL2-)?IM-\d+)-)")
# Mean and standard deviation that normalise pixels in [0, 1]: public constants, not estimates.
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
    """A file with its part of the release, its label and its patient."""

    path: Path
    part: str
    label: int
    patient: str


@dataclass(frozen=True)
class Split:
    """The films of each part, and what was dropped.

    Attributes:
        train, validation, test: films of each part.
        crossing: dropped train films of patients who are also in the test part.
        copies: number of dropped train films with the content of another one of the patient, or of
            a validation or test film.
        over_bound: number of dropped train films beyond `max_per_patient`.
    """

    train: list[Film]
    validation: list[Film]
    test: list[Film]
    crossing: list[Film]
    copies: int
    over_bound: int


@register("dataset", "chest_xray")
@dataclass(frozen=True, kw_only=True)
class ChestXray(Dataset):
    """Films, float32 [1, size, size], stored as bytes; label 1 is pneumonia.

    Args:
        size: rows and columns of an example.
        validation_share: fraction of the train part's films to validate on, as whole patients.
        max_per_patient: maximum number of training films per patient, the first by name, which
            bounds the contribution of a patient. Default: all.
        augment: augment training films with random affine maps.
        split_seed: seed that draws the validation patients.
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
        """Keep the release's test part, and split the train part by patient.

        Args:
            films: all films of the release.
            digests: digest of each film's content, by which copies are dropped.

        Raises:
            UserError: No film is left to train or to test on.
        """
        test = [film for film in films if film.part == "test"]
        test_patients = {film.patient for film in test}
        digest_of = dict(zip(films, digests, strict=True))
        public_digests = {digest_of[film] for film in test}
        seen: set[tuple[str, str]] = set()  # (patient, digest)
        rest: list[Film] = []
        crossing: list[Film] = []
        copies = 0
        for film in films:
            content = film.patient, digest_of[film]
            if film.part == "test":
                continue
            if film.patient in test_patients:
                crossing.append(film)
            elif digest_of[film] in public_digests or content in seen:
                copies += 1
            else:
                seen.add(content)
                rest.append(film)
        patients = [film.patient for film in rest]
        is_held = hold_out_owners(patients, self.validation_share, self.split_seed)
        validation = [film for film, held in zip(rest, is_held, strict=True) if held]
        public_digests |= {digest_of[film] for film in validation}
        others = [film for film, held in zip(rest, is_held, strict=True) if not held]
        remaining = [film for film in others if digest_of[film] not in public_digests]
        copies += len(others) - len(remaining)
        train = self._bound_patients(remaining)
        rule = f"leaves {len(train)} films to train and {len(test)} to test"
        fits = bool(train and test)
        require(fits, "dataset.validation_share", self.validation_share, rule)
        over_bound = len(remaining) - len(train)
        return Split(train, validation, test, crossing, copies, over_bound)

    def _bound_patients(self, films: list[Film]) -> list[Film]:
        """Return the first `max_per_patient` films of each patient."""
        bound = self.max_per_patient or len(films)
        counts = Counter[str]()
        kept = []
        for film in films:
            counts[film.patient] += 1
            if counts[film.patient] <= bound:
                kept.append(film)
        return kept

    def load(self, root: Path) -> Splits:
        """Load the films; 'official' if each part has as many as in the release.

        The release has no checksums. Other counts mean other parts, and scores on another test part
        do not compare with the paper's.
        """
        folder = root / FOLDER
        size = self.size
        films = find_films(folder)
        digests = [sha256(film.path) for film in films]
        row_of = {film: row for row, film in enumerate(films)}
        split = self.split(films, digests)
        crossing = set(split.crossing)
        others = [film for film in films if film.part == "train" and film not in crossing]
        has_shared = warn_of_shared_files(
            [film.path for film in others],
            [film.patient for film in others],
            [digests[row_of[film]] for film in others],
            "remove one",
        )
        contents = [
            f"{film.path.relative_to(folder)}:{content}"
            for film, content in zip(films, digests, strict=True)
        ]
        files = digest(f"{size}:{''.join(contents)}")
        pixels = load_pictures("films", files, [film.path for film in films], size, channels=1)
        names, groups = np.unique([film.patient for film in films], return_inverse=True)
        labels = torch.tensor([film.label for film in films])
        whole = Examples(pixels, labels, torch.from_numpy(groups), PIXELS)

        def take(part: list[Film]) -> Part:
            return Part(whole, torch.tensor([row_of[film] for film in part]))

        parts = Counter(film.part for film in films)
        is_whole = (parts["train"], parts["test"]) == OFFICIAL
        notes = _notes(split, size)
        if not is_whole:
            notes.insert(
                0,
                f"not the release's parts: {parts['train']:,} + {parts['test']:,} films to train + "
                f"test, where it has {OFFICIAL[0]:,} + {OFFICIAL[1]:,}",
            )
        options: tuple[Any, ...] = (
            size,
            self.validation_share,
            self.split_seed,
            self.max_per_patient,
            self.augment,
            PIXELS,
        )
        if has_shared:  # one of them was dropped before, so the digests of other records hold
            options = (*options, "copies of other patients kept")
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

    def published_info(self, root: Path) -> DatasetInfo | None:
        if holds_any(root / FOLDER):
            return None
        train_fraction = 1 - self.validation_share
        train = round(train_fraction * SPLIT["train"])
        max_per_patient = SPLIT["max_per_patient"]
        return DatasetInfo(
            train=train,
            test=SPLIT["test"],
            validation=SPLIT["train"] - train,
            input_shape=(1, self.size, self.size),
            outputs=1,
            examples_per_patient=min(max_per_patient, self.max_per_patient or max_per_patient),
            owners=round(train_fraction * SPLIT["patients"]),
        )


def _notes(
    split: Split,
    size: int,
) -> list[str]:
    """Return the notes of the record; only names and numbers of training films enter them."""
    patients = {film.patient for film in split.train}
    crossing = {film.patient for film in split.crossing}
    notes = [
        f"films stored at {describe_size(split.test[0].path)} (the first to test), read at {size}²",
        f"{len(split.train):,} films of {len(patients):,} patients to train, "
        f"{len(split.validation):,} to validate (public), {len(split.test):,} to test",
        f"{len(crossing)} patients were in both parts, whose {len(split.crossing)} train films "
        "were dropped",
    ]
    if split.over_bound:
        notes.append(f"{split.over_bound:,} films beyond the bound per patient were dropped")
    return notes


def patient_of(path: Path) -> str:
    """Return the patient in a file's name: 'person12' for 'person12_virus_45.jpeg'."""
    match = PATIENT.match(path.name)
    if match is None:
        raise UserError(
            f"{path}: its name does not identify the patient, unlike person12_bacteria_45.jpeg or "
            "IM-0115-0001.jpeg."
        )
    return match[1] or match[2]


def find_films(folder: Path) -> list[Film]:
    """List every film, sorted by part, class and name, without opening the files."""
    films = []
    for part, (label, name) in product(PARTS, enumerate(CLASSES)):
        class_folder = folder / part / name
        if not holds_any(class_folder):
            raise absent(class_folder / "*.jpeg", "chest_xray")
        paths = list_files(
            class_folder,
            folder,
            lambda path: path.suffix.lower() in SUFFIXES,
            "is not a JPEG file; only films belong here",
        )
        films += [Film(path, part, label, patient_of(path)) for path in paths]
    return films
