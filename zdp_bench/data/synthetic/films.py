"""A stand-in for Kermany's films that needs no download: drawn chests as real JPEG files in its layout, read by the real adapter.

A chest is a bright body with two dark lungs, a heart and ribs; size, tilt and exposure belong to the patient. Pneumonia adds
clouds to one lung or both. A patient owns one to four films.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from scipy.ndimage import gaussian_filter

from zdp_bench.data import DatasetInfo, Splits
from zdp_bench.data.chest_xray import CLASSES, PARTS, Film, check_size, cut, load, patient
from zdp_bench.data.files import made_whole
from zdp_bench.errors import require
from zdp_bench.registry import register

FILM = 96  # pixels along a side of a drawn film


def chest(
    ill: bool, patient: np.random.Generator, film: np.random.Generator, size: int = FILM
) -> np.ndarray:
    """One film as bytes [size, size]. `patient` and `film` say what varies between people and between a person's films."""
    y, x = np.mgrid[-1 : 1 : size * 1j, -1 : 1 : size * 1j]
    wide, tall, tilt = (
        patient.uniform(0.26, 0.34),
        patient.uniform(0.5, 0.65),
        patient.uniform(-0.12, 0.12),
    )
    x, y = x + tilt * y + film.uniform(-0.05, 0.05), y + film.uniform(-0.05, 0.05)
    lungs = sum(
        np.exp(-((((x - side * 0.4) / wide) ** 2 + (y / tall) ** 2) ** 3)) for side in (-1, 1)
    )
    body = np.exp(-((x / 0.95) ** 8)) * 0.62
    ribs = 0.05 * np.sin(2 * np.pi * (6 * y + 1.5 * np.abs(x)))
    heart = 0.35 * np.exp(-((((x - 0.12) / 0.22) ** 2 + ((y - 0.25) / 0.3) ** 2) ** 2))
    clouds = np.zeros_like(x)
    if ill:
        for side in (-1, 1) if film.random() < 0.5 else (film.choice([-1, 1]),):
            spot = np.exp(
                -(((x - side * 0.4) / 0.3) ** 2 + ((y - film.uniform(-0.2, 0.4)) / 0.35) ** 2)
            )
            clouds += (
                film.uniform(0.25, 0.5)
                * spot
                * (0.6 + 0.4 * gaussian_filter(film.normal(size=x.shape), 3) * 6)
            )
    image = body * (1 - 0.75 * lungs) + (ribs + clouds) * lungs + heart * (body > 0.3)
    image = patient.uniform(0.85, 1.15) * image + film.normal(0, 0.02, x.shape)
    return (255 * image.clip(0, 1)).astype(np.uint8)


def drawn(count: int, test_share: float, seed: int) -> Iterator[tuple[Path, int, int]]:
    """(path in the set, person, which of this person's films) of every film; none is drawn yet."""
    number = person = 0
    while number < count:
        person += 1
        draw = np.random.default_rng([seed, person])
        ill, part = bool(draw.random() < 0.74), "test" if draw.random() < test_share else "train"
        for film in range(min(int(draw.integers(1, 5)), count - number)):
            number += 1
            name = (
                f"person{person}_virus_{number}.jpeg"
                if ill
                else f"IM-{person:04d}-{film + 1:04d}.jpeg"
            )
            yield Path(part) / CLASSES[ill] / name, person, film


def write_set(folder: Path, count: int, test_share: float, seed: int) -> None:
    """`count` films, three quarters of them ill as in the release; whole or not at all."""
    from PIL import Image

    with made_whole(folder) as partial:
        for part in PARTS:
            for name in CLASSES:
                (partial / part / name).mkdir(parents=True)
        for path, person, film in drawn(count, test_share, seed):
            ill = path.parts[1] == CLASSES[1]
            pixels = chest(
                ill,
                np.random.default_rng([seed, person, 0]),
                np.random.default_rng([seed, person, film + 1]),
            )
            Image.fromarray(pixels).save(partial / path, quality=92)


@register("dataset", "chest_xray_synthetic")
def chest_xray_synthetic(
    root: Path,
    *,
    count: int = 800,
    size: int = 64,
    test_share: float = 0.2,
    validation_share: float = 0.15,
    seed: int = 0,
    max_per_patient: int | None = None,
    augment: bool = True,
) -> Splits:
    """Drawn films, written once under `synthetic/` and read as Kermany's are: float32 [1, size, size]."""
    _check(count, size)
    folder = root / "synthetic" / f"films-{count}-{test_share:g}-{seed}"
    if not folder.is_dir():
        write_set(folder, count, test_share, seed)
    return load(
        folder,
        "synthetic",
        size=size,
        validation_share=validation_share,
        split_seed=seed,
        max_per_patient=max_per_patient,
        augment=augment,
    )


@register("outline", "chest_xray_synthetic")
def outline(
    root: Path,
    *,
    count: int,
    size: int,
    test_share: float,
    validation_share: float,
    seed: int,
    max_per_patient: int | None,
    **_: object,
) -> DatasetInfo:
    """Known before anything is drawn."""
    _check(count, size)
    paths = sorted(path for path, _person, _film in drawn(count, test_share, seed))
    found = [
        Film(path, path.parts[0], CLASSES.index(path.parts[1]), patient(path)) for path in paths
    ]
    made = cut(found, None, validation_share, seed, max_per_patient)
    each, validate = made.most_of_one, len(made.validation)
    return DatasetInfo(
        len(made.train),
        len(made.test),
        (1, size, size),
        1,
        examples_per_patient=each,
        validation=validate,
    )


def _check(count: int, size: int) -> None:
    check_size(size)
    require(
        count >= 50,
        "dataset.count",
        count,
        "must be at least 50, so that both parts hold both classes",
    )
