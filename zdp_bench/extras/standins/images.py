"""Generated pictures of ten classes in any shape, real or complex."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from zdp_bench.data import Dataset, DatasetInfo, Examples, Splits
from zdp_bench.data.files import digest
from zdp_bench.errors import require
from zdp_bench.extras.standins.sizes import require_modest
from zdp_bench.registry import register

VERSION = "synthetic images v1"


@register("dataset", "synthetic_images")
@dataclass(frozen=True, kw_only=True)
class SyntheticImages(Dataset):
    """A smooth random pattern a class, in noise: float32 [n, *shape].

    With `complex_valued` complex64; the imaginary part is another pattern.
    """

    shape: list[int]
    complex_valued: bool = False
    classes: int = 10
    train: int = 600
    test: int = 200
    seed: int = 7

    def __post_init__(self) -> None:
        shape, classes = self.shape, self.classes
        rule = "needs at least one size, each at least 1"
        require(len(shape) > 0 and min(shape) > 0, "dataset.shape", shape, rule)
        require(classes > 1, "dataset.classes", classes, "must be at least 2")
        rule = f"must be at least {classes}, so that each class has a record"
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

    def info(self, root: Path) -> DatasetInfo:
        return DatasetInfo(
            train=self.train,
            test=self.test,
            input_shape=tuple(self.shape),
            outputs=self.classes,
            dtype=torch.complex64 if self.complex_valued else torch.float32,
            unit="image",
        )
