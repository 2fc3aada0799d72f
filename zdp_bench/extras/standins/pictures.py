"""Generated pictures: blobs in the layouts of Kermany's films and HAM10000, patterns of any shape.

`chest_xray_synthetic` and `ham10000_synthetic` need no download and are read as the releases are.
`synthetic_images` are ten classes of real or complex patterns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
import torch
from annotated_types import Ge, Interval, MinLen
from PIL import Image

from zdp_bench.data import Dataset, Examples, Pixels, Splits
from zdp_bench.data.chest_xray import CLASSES, FOLDER, ChestXray
from zdp_bench.data.files import digest
from zdp_bench.data.ham10000 import DIAGNOSES, METADATA, Ham10000
from zdp_bench.data.ham10000 import FOLDER as LESIONS
from zdp_bench.data.ham10000 import PARTS as LESION_PARTS
from zdp_bench.errors import require
from zdp_bench.extras.standins.drawing import StandIn, draw_blobs
from zdp_bench.registry import register

FILM = 48  # pixels along a side of a film
MOST = 10**9  # numbers of all generated pictures


@register("dataset", "chest_xray_synthetic")
@dataclass(frozen=True, kw_only=True)
class ChestXraySynthetic(StandIn, ChestXray):
    """Blobs as films of people with one or two each: three quarters are ill, with more blobs."""

    count: Annotated[int, Interval(ge=50, le=10**5)] = 800  # so that both parts hold both classes
    size: Pixels = 64
    seed: int = 0

    def write(self, folder: Path) -> None:
        for number in range(self.count):
            person = 2 * number // 3
            ill, part = person % 4 > 0, "train" if person % 5 else "test"
            name = f"person{person}_virus_{number}" if ill else f"IM-{person:04d}-{number:04d}"
            own = np.random.default_rng([self.seed, person])
            noise = np.random.default_rng([self.seed, person, number]).normal(0, 0.02, (FILM, FILM))
            pixels = 255 * (draw_blobs((FILM, FILM), 8 if ill else 2, own) + noise).clip(0, 1)
            path = folder / FOLDER / part / CLASSES[ill] / f"{name}.jpeg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.astype(np.uint8)).save(path, quality=92)


@register("dataset", "ham10000_synthetic")
@dataclass(frozen=True, kw_only=True)
class Ham10000Synthetic(StandIn, Ham10000):
    """Blobs as lesions with one or two pictures each: melanomas have more blobs."""

    count: Annotated[int, Interval(ge=40, le=10**5)] = 600  # so that each part holds both classes
    size: Pixels = 64
    seed: int = 0

    def write(self, folder: Path) -> None:
        rows = ["lesion_id,image_id,dx,dx_type,age,sex,localization"]
        for number in range(self.count):
            lesion = 2 * number // 3
            diagnosis = "mel" if lesion % 3 == 0 else DIAGNOSES[lesion % len(DIAGNOSES)]
            image = f"ISIC_{24306 + number:07d}"
            rows.append(f"HAM_{lesion:07d},{image},{diagnosis},histo,50,female,back")
            own = np.random.default_rng([self.seed, lesion])
            noise = np.random.default_rng([self.seed, lesion, number])
            blobs = draw_blobs((FILM, FILM), 8 if diagnosis == "mel" else 2, own)
            shades = 255 * (1 - blobs[..., None] * (0.4, 0.7, 0.8))
            pixels = (shades + noise.normal(0, 5, shades.shape)).clip(0, 255)
            path = folder / LESIONS / LESION_PARTS[number % 2] / f"{image}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.astype(np.uint8)).save(path, quality=92)
        (folder / LESIONS / METADATA).write_text("\n".join(rows) + "\n")


VERSION = "synthetic images v1"


@register("dataset", "synthetic_images")
@dataclass(frozen=True, kw_only=True)
class SyntheticImages(Dataset):
    """A smooth random pattern a class, in noise: float32 [n, *shape].

    With `complex_valued` complex64; the imaginary part is another pattern.
    """

    names_owners: ClassVar[bool] = False

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
        modest = math.prod(shape) * (self.train + self.test) <= MOST
        require(modest, "dataset.shape", shape, f"makes more than {MOST:,} numbers")

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
