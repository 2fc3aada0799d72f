"""Generated pictures: blobs in the layout of Kermany's films, and patterns of any shape.

`chest_xray_synthetic` needs no download and is read as Kermany's films are. `synthetic_images` are
ten classes of real or complex patterns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from annotated_types import Ge, MinLen
from PIL import Image

from zdp_bench.data import Dataset, Examples, Pixels, Splits
from zdp_bench.data.chest_xray import CLASSES, Films, find_films
from zdp_bench.data.files import digest
from zdp_bench.errors import require
from zdp_bench.extras.standins.drawing import draw_blobs, find_or_write, require_modest
from zdp_bench.registry import register

FILM = 48  # pixels along a side of a film


def plan_films(count: int, test_share: float, seed: int) -> Iterator[tuple[Path, int]]:
    """Yield the path in the set and the person of every film: a person has one to four films."""
    number = person = 0
    while number < count:
        person += 1
        draw = np.random.default_rng([seed, person])
        ill, part = bool(draw.random() < 0.74), "test" if draw.random() < test_share else "train"
        for film in range(min(int(draw.integers(1, 5)), count - number)):
            number += 1
            name = f"IM-{person:04d}-{film + 1:04d}.jpeg"
            name = f"person{person}_virus_{number}.jpeg" if ill else name
            yield Path(part) / CLASSES[ill] / name, person


def write_films(folder: Path, count: int, test_share: float, seed: int) -> None:
    """Write films, three quarters of them ill as in the release: with more blobs."""
    for number, (path, person) in enumerate(plan_films(count, test_share, seed)):
        (folder / path.parent).mkdir(parents=True, exist_ok=True)
        own, ill = np.random.default_rng([seed, person]), path.parts[1] == CLASSES[1]
        noise = np.random.default_rng([seed, person, number]).normal(0, 0.02, (FILM, FILM))
        pixels = 255 * (draw_blobs((FILM, FILM), 8 if ill else 2, own) + noise).clip(0, 1)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / path, quality=92)


@register("dataset", "chest_xray_synthetic")
@dataclass(frozen=True, kw_only=True)
class ChestXraySynthetic(Films):
    """Blobs, written once under `synthetic/` and read as Kermany's are."""

    count: Annotated[int, Ge(50)] = 800  # so that both parts hold both classes
    size: Pixels = 64
    test_share: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        require_modest("dataset.count", 2**16 * self.count)

    def load(self, root: Path) -> Splits:
        options = (self.count, self.test_share, self.seed)
        name = f"films-{self.count}-{self.test_share:g}-{self.seed}"
        folder = find_or_write(root, name, lambda to: write_films(to, *options))
        return self.load_films(folder, find_films(folder), "synthetic", self.seed)


VERSION = "synthetic images v1"


@register("dataset", "synthetic_images")
@dataclass(frozen=True, kw_only=True)
class SyntheticImages(Dataset):
    """A smooth random pattern a class, in noise: float32 [n, *shape].

    With `complex_valued` complex64; the imaginary part is another pattern.
    """

    shape: Annotated[list[Annotated[int, Ge(1)]], MinLen(1)]
    complex_valued: bool = False
    classes: Annotated[int, Ge(2)] = 10
    train: int = 600
    test: int = 200
    seed: int = 7

    def __post_init__(self) -> None:
        shape, classes = self.shape, self.classes
        rule = f"must be at least {classes}, so that each class has an example"
        for key, count in (("train", self.train), ("test", self.test)):
            require(count >= classes, f"dataset.{key}", count, rule)
        numbers = math.prod(shape) * max(self.train + self.test, classes)
        require_modest("dataset.train, test and shape", 16 * numbers)  # drawn in double precision

    def load(self, root: Path) -> Splits:
        rng = np.random.default_rng(self.seed)
        sizes = (max(1, n // 4) for n in self.shape)
        patterns = rng.standard_normal((2, self.classes, *sizes))
        for axis, n in enumerate(self.shape, start=2):  # neighbours look alike, as in a picture
            patterns = np.take(patterns, np.arange(n) * patterns.shape[axis] // n, axis=axis)

        def draw(count: int) -> Examples:
            labels = rng.permutation(np.arange(count) % self.classes)
            noise = rng.standard_normal((2, count, *self.shape))
            parts = patterns[:, labels] + 0.7 * noise
            pictures = parts[0] + 1j * parts[1] if self.complex_valued else parts[0]
            kind = np.complex64 if self.complex_valued else np.float32
            return Examples(torch.from_numpy(pictures.astype(kind)), torch.from_numpy(labels))

        options = (self.shape, self.complex_valued, self.classes, self.train, self.test, self.seed)
        return Splits(
            draw(self.train),
            draw(self.test),
            input_shape=tuple(self.shape),
            outputs=self.classes,
            provenance="synthetic",
            digest=digest(":".join(map(str, (VERSION, *options)))),
            notes=f"generated patterns of {self.classes} classes in noise, seed {self.seed}",
            unit="image",
        )
