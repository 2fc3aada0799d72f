"""MNIST and Fashion-MNIST from their idx files, in torchvision's layout (`MNIST/raw/*.gz`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch

from zdp_bench.data import Dataset, DatasetInfo, Examples, Provenance, Splits
from zdp_bench.data.augmentation import augmentation
from zdp_bench.data.files import card, digest, fetch, missing, sha256, verify
from zdp_bench.data.formats.idx import read_idx, read_shape
from zdp_bench.errors import UserError
from zdp_bench.registry import register

CLASSES = 10
# Mean and standard deviation of a pixel in [0, 1], as published everywhere: public constants, so
# they cost no privacy.
PIXELS = {"mnist": (0.1307, 0.3081), "fashion_mnist": (0.2860, 0.3530)}


@register("dataset", "mnist")
@dataclass(frozen=True, kw_only=True)
class Mnist(Dataset):
    """MNIST: 60,000 / 10,000 digits as float32 [28, 28].

    Missing files are fetched. Without `check` any idx files are read, and are 'derived'.
    """

    card_name: ClassVar[str] = "mnist"

    normalise: Literal["standard", "unit"] = "standard"
    check: bool = True
    mirror: str | None = None

    def load(self, root: Path) -> Splits:
        images, labels, files, provenance = self.read(root)
        train, test = (
            Examples(x, torch.from_numpy(y)) for x, y in zip(images, labels, strict=True)
        )
        shape = tuple(train.inputs.shape[1:])
        return Splits(train, test, shape, CLASSES, provenance, files, unit="image")

    def info(self, root: Path) -> DatasetInfo:
        """Count the images by the files' headers, or as in the release."""
        of = card(self.card_name)
        found = not missing(root, of)
        shapes: list[tuple[int, ...]] = [(60_000, 28, 28), (10_000, 28, 28)]
        if found:
            shapes = [read_shape(root / of.files[index].path, dims=3) for index in (0, 2)]
        train, test = shapes
        return DatasetInfo(
            train=train[0],
            test=test[0],
            input_shape=train[1:],
            outputs=CLASSES,
            found=found,
            unit="image",
        )

    def read(self, root: Path) -> tuple[list[torch.Tensor], list[np.ndarray], str, Provenance]:
        """Read the files, and fetch them before where they are missing.

        Returns:
            Images float32 [n, 28, 28] and labels [n], each of train and test; the files' digest.

        Raises:
            UserError: a file cannot be fetched, is damaged, not the released one, or disagrees
                with its partner.
        """
        of = card(self.card_name)
        fetch(root, of, self.mirror)
        paths = [root / file.path for file in of.files]  # images, labels; train first, then test
        if self.check:  # before a byte is unpacked
            for path, file in zip(paths, of.files, strict=True):
                verify(path, file, of.name)
        arrays = [read_idx(path, dims=3 if "images" in path.name else 1) for path in paths]
        for first in (0, 2):
            _check_pair(arrays[first], arrays[first + 1], paths[first], paths[first + 1])
        return (
            [self.to_float(array) for array in arrays[::2]],
            [array.astype(np.int64) for array in arrays[1::2]],
            digest("".join(sha256(path) for path in paths)),
            "official" if self.check else "derived",
        )

    def to_float(self, images: np.ndarray) -> torch.Tensor:
        """Convert bytes to float32 in [0, 1], or standardised by the published constants."""
        pixels = torch.from_numpy(images.astype(np.float32) / 255.0)
        mean, deviation = (0.0, 1.0) if self.normalise == "unit" else PIXELS[self.card_name]
        return (pixels - mean) / deviation


@register("dataset", "fashion_mnist")
@dataclass(frozen=True, kw_only=True)
class FashionMnist(Mnist):
    """Fashion-MNIST: 60,000 / 10,000 pieces of clothing as float32 [28, 28], in MNIST's format."""

    card_name: ClassVar[str] = "fashion_mnist"

    augment: str | None = None

    def load(self, root: Path) -> Splits:
        black = float(self.to_float(np.zeros(1, np.uint8)))
        augment = augmentation(self.augment, black)
        return replace(super().load(root), augment=augment)


def _check_pair(images: np.ndarray, labels: np.ndarray, image_path: Path, label_path: Path) -> None:
    if len(images) != len(labels):
        raise UserError(
            f"{image_path} holds {len(images):,} images, but {label_path} holds {len(labels):,} "
            "labels."
        )
    if len(labels) == 0:
        raise UserError(f"{label_path}: holds no records.")
    if labels.max() >= CLASSES:
        raise UserError(
            f"{label_path}: holds label {labels.max()}, but there are only {CLASSES} classes "
            f"(0 to {CLASSES - 1})."
        )
