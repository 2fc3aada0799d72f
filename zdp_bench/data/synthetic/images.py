"""Generated pictures of ten classes in any shape, real or complex: what stands in for MNIST and its kin where no file is."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import torch

from zdp_bench.data import DatasetInfo, Examples, Splits
from zdp_bench.errors import require
from zdp_bench.registry import register

VERSION = "synthetic images v1"


@register("dataset", "synthetic_images")
def synthetic_images(
    root: Path,
    *,
    shape: list[int],
    complex_valued: bool = False,
    classes: int = 10,
    train: int = 600,
    test: int = 200,
    seed: int = 7,
) -> Splits:
    """A smooth random pattern a class, seen through noise: float32 [n, *shape], or complex64 whose imaginary part is another's.

    Raises:
        UserError: a size that means nothing.
    """
    _check(shape, classes, train, test)
    rng = np.random.default_rng(seed)
    coarse = rng.standard_normal((2, classes, *(max(1, n // 4) for n in shape)))
    patterns = coarse
    for axis, n in enumerate(
        shape
    ):  # enlarge by repetition: neighbours look alike, as in a picture
        patterns = np.take(patterns, np.arange(n) * patterns.shape[axis + 2] // n, axis=axis + 2)

    def split(count: int) -> Examples:
        labels = rng.permutation(np.arange(count) % classes)
        parts = patterns[:, labels] + 0.7 * rng.standard_normal(
            (2, count, *shape)
        )  # [2, n, *shape]
        pictures = parts[0] + 1j * parts[1] if complex_valued else parts[0]
        kind = np.complex64 if complex_valued else np.float32
        return Examples(torch.from_numpy(pictures.astype(kind)), torch.from_numpy(labels))

    said = f"{VERSION}:{shape}:{complex_valued}:{classes}:{train}:{test}:{seed}"
    return Splits(
        split(train),
        split(test),
        input_shape=tuple(shape),
        outputs=classes,
        provenance="synthetic",
        digest=hashlib.sha256(said.encode()).hexdigest(),
        notes=f"generated patterns of {classes} classes in noise, seed {seed}",
        unit="image",
    )


def _check(shape: list[int], classes: int, train: int, test: int) -> None:
    require(
        len(shape) > 0 and min(shape) > 0,
        "dataset.shape",
        shape,
        "needs at least one size, each at least 1",
    )
    require(classes > 1, "dataset.classes", classes, "must be at least 2")
    for key, count in (("train", train), ("test", test)):
        require(
            count >= classes,
            f"dataset.{key}",
            count,
            f"must be at least {classes}, so that each class has a record",
        )


@register("outline", "synthetic_images")
def outline(
    root: Path,
    *,
    shape: list[int],
    complex_valued: bool,
    classes: int,
    train: int,
    test: int,
    **_: object,
) -> DatasetInfo:
    """As many as asked for."""
    _check(shape, classes, train, test)
    return DatasetInfo(
        train,
        test,
        tuple(shape),
        classes,
        torch.complex64 if complex_valued else torch.float32,
        unit="image",
    )
