"""Kermany's paediatric chest films, pneumonia or not (Ziller et al. 2021, deepee, Methods: classification task).

    chest_xray/train|test/NORMAL|PNEUMONIA/*.jpeg

The release splits by film, not by patient. Its names tell the patient: `person12_bacteria_45.jpeg`, `IM-0115-0001.jpeg`,
`NORMAL2-IM-0587-0001-0002.jpeg`. Whoever stands in both parts under one number keeps only the test films here; numbers may have
been given anew in each part, so this drops more than it must, never less. Of files with the same bytes one is kept. Both are
counted in the notes.

The validation films are whole patients of the train part; they steer the learning rate, and no ε covers them.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from zdp_bench.data import DatasetInfo, Examples, Provenance, Splits
from zdp_bench.data.affine import Affine
from zdp_bench.data.cache import kept
from zdp_bench.data.files import holds_any, sha256
from zdp_bench.errors import UserError, require
from zdp_bench.registry import register

FOLDER = Path("chest_xray")
PARTS = ("train", "test")
CLASSES = ("NORMAL", "PNEUMONIA")
SUFFIXES = (".jpeg", ".jpg")
OFFICIAL = {"train": 5216, "test": 624}
PATIENT = re.compile(r"(?:(person\d+)_(?:bacteria|virus)_|((?:NORMAL2-)?IM-\d+)-)")
LARGEST = 8192  # pixels along a side; the largest released film has 2,916
# A pixel's mean and deviation in [0, 1] as every film is scaled by: round numbers of ours, so nothing of the films is in them.
PIXELS = (0.5, 0.25)
AUGMENT = Affine(degrees=10, translate=0.05, scale=0.1, shear=5, fill=(0 - PIXELS[0]) / PIXELS[1])


@dataclass(frozen=True)
class Film:
    """One file: where it lies, which part of the release it belongs to, its label and its patient."""

    path: Path
    part: str
    label: int
    patient: str


def patient(path: Path) -> str:
    """'person12_bacteria_45.jpeg' -> 'person12', 'NORMAL2-IM-0587-0001.jpeg' -> 'NORMAL2-IM-0587'.

    Raises:
        UserError: the name does not tell.
    """
    if not (match := PATIENT.match(path.name)):
        raise UserError(
            f"{path}: its name does not tell the patient; person12_bacteria_45.jpeg or IM-0115-0001.jpeg would."
        )
    return match[1] or match[2]


def films(folder: Path) -> list[Film]:
    """Every film of the release, by part, class and name; none is opened.

    Raises:
        UserError: a folder is missing or empty, a file is no film, leads out of the folder, or does not tell its patient.
    """
    if not folder.is_dir():
        raise UserError(
            f"dataset 'chest_xray' expects {folder} with train/ and test/, each with NORMAL/ and PNEUMONIA/. Unpack the archive "
            "there (see datasets/chest_xray.yaml), or use dataset=chest_xray_synthetic."
        )
    found = []
    for part in PARTS:
        for label, name in enumerate(CLASSES):
            here = folder / part / name
            if not here.is_dir():
                raise UserError(
                    f"{here}: is missing; chest_xray has train/ and test/, each with NORMAL/ and PNEUMONIA/."
                )
            paths = sorted(path for path in here.iterdir() if not path.name.startswith("."))
            if not paths:
                raise UserError(f"{here}: holds no film.")
            for path in paths:
                if path.suffix.lower() not in SUFFIXES or not path.is_file():
                    raise UserError(f"{path}: is not a JPEG file; only films were expected here.")
                if not path.resolve().is_relative_to(folder.resolve()):
                    raise UserError(
                        f"{path}: is a link that leads out of {folder}; put the file itself there."
                    )
                found.append(Film(path, part, label, patient(path)))
    return found


def read_film(path: Path, size: int) -> np.ndarray:
    """One film as grey bytes [size, size]; resized bilinearly over each pixel's whole support, its aspect not kept.

    Raises:
        UserError: it is no JPEG, cut off, or of an impossible size.
    """
    from PIL import Image

    try:
        with Image.open(path, formats=["JPEG"]) as image:
            if max(image.size) > LARGEST or min(image.size) < 8:
                raise UserError(
                    f"{path}: has {image.size[0]}×{image.size[1]} pixels; no film of this set has."
                )
            grey = image.convert("L")
            return np.asarray(
                grey
                if grey.size == (size, size)
                else grey.resize((size, size), Image.Resampling.BILINEAR)
            )
    except (OSError, SyntaxError, ValueError) as error:
        raise UserError(
            f"{path}: is no readable JPEG ({type(error).__name__}); it is damaged or something else."
        ) from None


@dataclass(frozen=True)
class Cut:
    """The films of each part as they are used, and what was left out."""

    train: list[Film]
    validation: list[Film]
    test: list[Film]
    crossing_patients: int
    crossing_films: int
    copies: int
    over_bound: int

    @property
    def most_of_one(self) -> int:
        """The most training films of any one patient."""
        return max(Counter(film.patient for film in self.train).values())


def cut(
    found: list[Film],
    digests: list[str] | None,
    validation_share: float,
    seed: int,
    max_per_patient: int | None,
) -> Cut:
    """Split by patient: the release's test part as it is, the rest cut into training and validation.

    Args:
        digests: of each film's bytes, so that copies are dropped; None leaves them in (nothing was read).

    Raises:
        UserError: a share or a bound leaves a part empty.
    """
    require(
        0 <= validation_share < 1,
        "dataset.validation_share",
        validation_share,
        "must lie in [0, 1)",
    )
    require(
        max_per_patient is None or max_per_patient > 0,
        "dataset.max_per_patient",
        max_per_patient,
        "must be at least 1",
    )
    test = [film for film in found if film.part == "test"]
    tested = {film.patient for film in test}
    seen = {
        digest for film, digest in zip(found, digests or [], strict=False) if film.part == "test"
    }
    rest, copies, crossing = [], 0, []
    for index, film in enumerate(found):
        if film.part == "test":
            continue
        if film.patient in tested:
            crossing.append(film)
        elif digests and digests[index] in seen:
            copies += 1
        else:
            seen |= {digests[index]} if digests else set()
            rest.append(film)
    people = sorted({film.patient for film in rest})
    held_out: set[str] = set()
    taken, sizes = 0, Counter(film.patient for film in rest)
    for index in np.random.default_rng(seed).permutation(len(people)):
        if taken >= validation_share * len(rest):
            break
        held_out.add(people[index])
        taken += sizes[people[index]]
    train, used = [], Counter[str]()
    for film in rest:
        if film.patient not in held_out:
            used[film.patient] += 1
            if max_per_patient is None or used[film.patient] <= max_per_patient:
                train.append(film)
    if not train or not test:
        raise UserError(
            f"dataset.validation_share={validation_share}: leaves {len(train)} films to train and {len(test)} to test."
        )
    return Cut(
        train=train,
        validation=[film for film in rest if film.patient in held_out],
        test=test,
        crossing_patients=len({film.patient for film in crossing}),
        crossing_films=len(crossing),
        copies=copies,
        over_bound=sum(used.values()) - len(train),
    )


def check_size(size: int) -> None:
    """Refuse a size that means nothing, before a film is read or drawn."""
    require(8 <= size <= 1024, "dataset.size", size, "must lie between 8 and 1024 pixels")


def load(
    folder: Path,
    provenance: Provenance,
    *,
    size: int,
    validation_share: float,
    split_seed: int,
    max_per_patient: int | None,
    augment: bool,
) -> Splits:
    """Films as float32 [1, size, size], in bytes until they are drawn; label 1 is pneumonia."""
    check_size(size)
    found = films(folder)
    digests = [sha256(film.path) for film in found]
    made = cut(found, digests, validation_share, split_seed, max_per_patient)
    names = "".join(
        f"{f.path.relative_to(folder)}:{digest}" for f, digest in zip(found, digests, strict=True)
    )
    files = hashlib.sha256(f"{size}:{names}".encode()).hexdigest()

    def fill(whole: np.ndarray) -> None:
        for index, film in enumerate(found):
            whole[index, 0] = read_film(film.path, size)

    pixels = torch.from_numpy(kept("films", files, (len(found), 1, size, size), np.uint8, fill))
    at = {film.path: index for index, film in enumerate(found)}
    patients = {
        name: number for number, name in enumerate(sorted({film.patient for film in found}))
    }

    def records(chosen: list[Film]) -> Examples:
        rows = torch.tensor([at[film.path] for film in chosen], dtype=torch.long)
        groups = torch.tensor([patients[film.patient] for film in chosen], dtype=torch.long)
        return Examples(pixels[rows], torch.tensor([film.label for film in chosen]), groups, PIXELS)

    settings = repr((size, validation_share, split_seed, max_per_patient, augment, PIXELS))
    return Splits(
        records(made.train),
        records(made.test),
        input_shape=(1, size, size),
        outputs=1,
        provenance=provenance,
        digest=hashlib.sha256(f"{files}:{settings}".encode()).hexdigest(),
        notes=_notes(made, found, size),
        examples_per_patient=made.most_of_one,
        augment=AUGMENT.images if augment else None,
        validation=records(made.validation) if made.validation else None,
    )


def _notes(made: Cut, found: list[Film], size: int) -> str:
    """What a reader of a number must know of the films behind it."""
    from PIL import Image

    with Image.open(found[0].path) as first:
        stored = f"{first.size[0]}×{first.size[1]}"
    people = len({film.patient for film in made.train})
    words = [
        f"films stored at {stored} (the first), read at {size}²",
        f"{len(made.train):,} films of {people:,} patients to train, {len(made.validation):,} to validate (public), "
        f"{len(made.test):,} to test",
        f"{made.crossing_patients} patients stood in both parts, whose {made.crossing_films} train films were dropped",
        f"{made.copies} copies of another film were dropped",
    ]
    if made.over_bound:
        words.append(f"{made.over_bound:,} films beyond the bound per patient were dropped")
    return "; ".join(words)


def provenance_of(folder: Path) -> Provenance:
    """The release has no checksum a folder could be held to; with other counts than its own it is 'derived'."""
    counts = {
        part: sum(1 for s in SUFFIXES for _ in (folder / part).glob(f"*/*{s}")) for part in PARTS
    }
    return "official" if counts == OFFICIAL else "derived"


@register("dataset", "chest_xray")
def chest_xray(
    root: Path,
    *,
    size: int = 224,
    validation_share: float = 0.15,
    split_seed: int = 0,
    max_per_patient: int | None = None,
    augment: bool = True,
) -> Splits:
    """Kermany's chest films under the data root: float32 [1, size, size], label 1 is pneumonia.

    max_per_patient: at most so many training films of a patient, the first by name: bounds what a patient contributes.
    """
    return load(
        root / FOLDER,
        provenance_of(root / FOLDER),
        size=size,
        validation_share=validation_share,
        split_seed=split_seed,
        max_per_patient=max_per_patient,
        augment=augment,
    )


def _told_apart(paths: list[Path]) -> list[str]:
    """What is the same for files of the same bytes only, and quicker than their digests: most sizes occur once."""
    sizes = [path.stat().st_size for path in paths]
    often = Counter(sizes)
    return [
        sha256(path) if often[size] > 1 else str(size)
        for path, size in zip(paths, sizes, strict=True)
    ]


@register("check", "chest_xray")
def check(root: Path) -> Iterator[tuple[Path, str]]:
    """Every film, and what is wrong with it."""
    for film in films(root / FOLDER):
        try:
            read_film(film.path, 8)
            yield film.path, ""
        except UserError as error:
            yield film.path, str(error)


@register("outline", "chest_xray")
def outline(
    root: Path,
    *,
    size: int,
    validation_share: float,
    split_seed: int,
    max_per_patient: int | None,
    **_: object,
) -> DatasetInfo:
    """From names, sizes, and the bytes of films of one size: others are no copies. Without films, the release's own numbers."""
    check_size(size)
    shape = (1, size, size)
    if not holds_any(root / FOLDER):
        train = round((1 - validation_share) * OFFICIAL["train"])
        return DatasetInfo(
            train, OFFICIAL["test"], shape, 1, found=False, validation=OFFICIAL["train"] - train
        )
    found = films(root / FOLDER)
    made = cut(
        found,
        _told_apart([film.path for film in found]),
        validation_share,
        split_seed,
        max_per_patient,
    )
    each, validate = made.most_of_one, len(made.validation)
    return DatasetInfo(
        len(made.train), len(made.test), shape, 1, examples_per_patient=each, validation=validate
    )
