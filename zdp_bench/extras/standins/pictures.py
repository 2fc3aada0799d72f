"""Generated pictures, which need no download.

`chest_xray_synthetic` and `ham10000_synthetic` are blobs in the layouts of Kermany's chest X-rays
and of HAM10000, and are read like these releases. `synthetic_images` are classes of real or complex
patterns of any shape.
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

FILM = 48  # side of a picture in pixels
COLOUR = (0.4, 0.7, 0.8)  # darkness of a lesion in red, green and blue
MAX_NUMBERS = 2 * 10**8  # in all generated pictures together; drawing one takes up to 40 bytes


@register("dataset", "chest_xray_synthetic")
@dataclass(frozen=True, kw_only=True)
class ChestXraySynthetic(StandIn, ChestXray):
    """Blobs as chest X-rays: one or two per person.

    Three quarters of the people are ill. Their pictures have more blobs.
    """

    # At least 50, so that both parts have both classes.
    count: Annotated[int, Interval(ge=50, le=10**5)] = 800
    size: Pixels = 64
    seed: int = 0

    def write(self, folder: Path) -> None:
        for number in range(self.count):
            person = 2 * number // 3
            is_ill = person % 4 > 0
            part = "train" if person % 5 else "test"
            name = f"person{person}_virus_{number}" if is_ill else f"IM-{person:04d}-{number:04d}"
            blobs = _draw_blobs_of([self.seed, person], is_ill)
            rng = np.random.default_rng([self.seed, person, number])
            noise = rng.normal(0, 0.02, (FILM, FILM))
            pixels = 255 * (blobs + noise).clip(0, 1)
            _save(pixels, folder / FOLDER / part / CLASSES[is_ill] / f"{name}.jpeg")


@register("dataset", "ham10000_synthetic")
@dataclass(frozen=True, kw_only=True)
class Ham10000Synthetic(StandIn, Ham10000):
    """Blobs as skin lesions: one or two pictures per lesion. Melanomas have more blobs."""

    # At least 40, so that each part has both classes.
    count: Annotated[int, Interval(ge=40, le=10**5)] = 600
    size: Pixels = 64
    seed: int = 0

    def write(self, folder: Path) -> None:
        rows = ["lesion_id,image_id,dx,dx_type,age,sex,localization"]
        for number in range(self.count):
            lesion = 2 * number // 3
            diagnosis = "mel" if lesion % 3 == 0 else DIAGNOSES[lesion % len(DIAGNOSES)]
            image = f"ISIC_{24306 + number:07d}"
            rows.append(f"HAM_{lesion:07d},{image},{diagnosis},histo,50,female,back")
            blobs = _draw_blobs_of([self.seed, lesion], diagnosis == "mel")
            shades = 255 * (1 - blobs[..., None] * COLOUR)
            rng = np.random.default_rng([self.seed, lesion, number])
            noise = rng.normal(0, 5, shades.shape)
            pixels = (shades + noise).clip(0, 255)
            _save(pixels, folder / LESIONS / LESION_PARTS[number % 2] / f"{image}.jpg")
        (folder / LESIONS / METADATA).write_text("\n".join(rows) + "\n", encoding="utf-8")


def _draw_blobs_of(seed: list[int], is_ill: bool) -> np.ndarray:
    """Return the blobs in all pictures of a person or lesion, [FILM, FILM] in [0, 1]."""
    count = 8 if is_ill else 2
    return draw_blobs((FILM, FILM), count, np.random.default_rng(seed))


def _save(pixels: np.ndarray, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = Image.fromarray(pixels.astype(np.uint8))
    picture.save(path, quality=92)


VERSION = "synthetic images v1"  # change when the pictures change; part of the data's digest


@register("dataset", "synthetic_images")
@dataclass(frozen=True, kw_only=True)
class SyntheticImages(Dataset):
    """One smooth random pattern per class, with noise: float32 [n, *shape].

    With `complex_valued`, the pictures are complex64, and their imaginary part is another pattern.
    """

    names_owners: ClassVar[bool] = False

    shape: Annotated[list[Annotated[int, Ge(1)]], MinLen(1)]
    complex_valued: bool = False
    classes: Annotated[int, Ge(2)] = 10
    train: int = 600
    test: int = 200
    seed: int = 7

    def __post_init__(self) -> None:
        rule = f"must be at least {self.classes}, so that each class has an example"
        require(self.train >= self.classes, "dataset.train", self.train, rule)
        require(self.test >= self.classes, "dataset.test", self.test, rule)
        numbers = math.prod(self.shape) * (self.train + self.test)
        rule = f"makes more than {MAX_NUMBERS:,} numbers"
        require(numbers <= MAX_NUMBERS, "dataset.shape", self.shape, rule)

    def load(self, root: Path) -> Splits:
        rng = np.random.default_rng(self.seed)
        coarse = [max(1, side // 4) for side in self.shape]
        patterns = rng.standard_normal((2, self.classes, *coarse))
        # Repeat the coarse pattern, because neighbouring pixels of pictures are similar.
        for axis, side in enumerate(self.shape, start=2):
            cells = np.arange(side) * patterns.shape[axis] // side
            patterns = np.take(patterns, cells, axis=axis)

        def draw(count: int) -> Examples:
            labels = rng.permutation(np.arange(count) % self.classes)
            noise = rng.standard_normal((2, count, *self.shape))
            noise *= 0.7  # in place, because there may be many
            noise += patterns[:, labels]
            real, imag = noise
            pictures = real.astype(np.float32)
            if self.complex_valued:
                pictures = (real + 1j * imag).astype(np.complex64)
            return Examples(torch.from_numpy(pictures), torch.from_numpy(labels))

        settings = (
            VERSION,
            self.shape,
            self.complex_valued,
            self.classes,
            self.train,
            self.test,
            self.seed,
        )
        return Splits(
            draw(self.train),
            draw(self.test),
            input_shape=tuple(self.shape),
            outputs=self.classes,
            provenance="synthetic",
            digest=digest(":".join(map(str, settings))),
            notes=f"generated patterns of {self.classes} classes in noise, seed {self.seed}",
            unit="image",
        )
