"""MNIST and Fashion-MNIST from their idx files, in torchvision's layout (`MNIST/raw/*.gz`)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from zdp_bench.data import DatasetInfo, Examples, Provenance, Splits
from zdp_bench.data.augmentation import augmentation
from zdp_bench.data.files import Card, card, fetch, missing, sha256, verify
from zdp_bench.data.formats.idx import announced, read_idx
from zdp_bench.errors import UserError
from zdp_bench.registry import register

CLASSES = 10
Normalise = Literal["standard", "unit"]


@dataclass(frozen=True)
class Digits:
    """One split: images uint8 [n, 28, 28] and labels [n]."""

    images: np.ndarray
    labels: np.ndarray


def read(
    root: Path, of: Card, *, check: bool, mirror: str | None
) -> tuple[Digits, Digits, str, Provenance]:
    """Train and test split, a digest of the files, and their provenance.

    Missing files are fetched. With `check`, a file that is not the released one is refused; without, it is read as it is and
    the provenance is 'derived'.

    Raises:
        UserError: a file is missing and cannot be fetched, is damaged, or disagrees with its partner.
    """
    fetch(root, of, mirror)
    paths = [
        root / file.path for file in of.files
    ]  # train images, train labels, test images, test labels
    arrays = [read_idx(path, dims=3 if "images" in path.name else 1) for path in paths]
    if check:
        for path, file in zip(paths, of.files, strict=True):
            verify(path, file, of.name)
    splits = []
    for images, labels, image_path, label_path in zip(
        arrays[::2], arrays[1::2], paths[::2], paths[1::2], strict=True
    ):
        if len(images) != len(labels):
            raise UserError(
                f"{image_path} holds {len(images):,} images, but {label_path} holds {len(labels):,} labels."
            )
        if len(labels) == 0:
            raise UserError(f"{label_path}: holds no records.")
        if labels.max() >= CLASSES:
            raise UserError(
                f"{label_path}: holds label {labels.max()}, but there are only {CLASSES} classes (0 to {CLASSES - 1})."
            )
        splits.append(Digits(images, labels.astype(np.int64)))
    digest = hashlib.sha256("".join(sha256(path) for path in paths).encode()).hexdigest()
    return splits[0], splits[1], digest, "official" if check else "derived"


# Mean and standard deviation of a pixel in [0, 1], as published everywhere: public constants, so they cost no privacy.
PIXELS = {"mnist": (0.1307, 0.3081), "fashion_mnist": (0.2860, 0.3530)}


def to_float(images: np.ndarray, name: str, normalise: Normalise) -> torch.Tensor:
    """uint8 [n, h, w] -> float32 [n, h, w]: in [0, 1], or standardised by the data set's published constants."""
    pixels = torch.from_numpy(images.astype(np.float32) / 255.0)
    if normalise == "unit":
        return pixels
    mean, std = PIXELS[name]
    return (pixels - mean) / std


def _splits(
    name: str,
    root: Path,
    normalise: Normalise,
    check: bool,
    mirror: str | None,
    augment: str | None = None,
) -> Splits:
    train, test, digest, provenance = read(root, card(name), check=check, mirror=mirror)
    records = [
        Examples(to_float(split.images, name, normalise), torch.from_numpy(split.labels))
        for split in (train, test)
    ]
    black = float(to_float(np.zeros(1, np.uint8), name, normalise))
    shape = tuple(train.images.shape[1:])
    return Splits(
        records[0],
        records[1],
        shape,
        CLASSES,
        provenance,
        digest,
        augment=augmentation(augment, black),
        unit="image",
    )


@register("dataset", "mnist")
def mnist(
    root: Path, *, normalise: Normalise = "standard", check: bool = True, mirror: str | None = None
) -> Splits:
    """MNIST: 60,000 / 10,000 digits as float32 [28, 28]."""
    return _splits("mnist", root, normalise, check, mirror)


@register("dataset", "fashion_mnist")
def fashion_mnist(
    root: Path,
    *,
    normalise: Normalise = "standard",
    augment: str | None = None,
    check: bool = True,
    mirror: str | None = None,
) -> Splits:
    """Fashion-MNIST: 60,000 / 10,000 pieces of clothing as float32 [28, 28]."""
    return _splits("fashion_mnist", root, normalise, check, mirror, augment)


def outlined(root: Path, of: Card, dtype: torch.dtype = torch.float32) -> DatasetInfo:
    """What `read` will make of the card's files, from their headers; the release's counts where they are not there."""
    if missing(root, of):
        return DatasetInfo(60_000, 10_000, (28, 28), CLASSES, dtype, found=False, unit="image")
    (train, *shape), (test, *_) = (
        announced(root / of.files[index].path, dims=3) for index in (0, 2)
    )
    return DatasetInfo(train, test, tuple(shape), CLASSES, dtype, unit="image")


@register("outline", "mnist")
def mnist_outline(root: Path, **_: object) -> DatasetInfo:
    """As many as the headers announce."""
    return outlined(root, card("mnist"))


@register("outline", "fashion_mnist")
def fashion_mnist_outline(root: Path, **_: object) -> DatasetInfo:
    """As many as the headers announce."""
    return outlined(root, card("fashion_mnist"))
