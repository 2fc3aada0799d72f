"""MNIST and Fashion-MNIST, from idx files in torchvision's layout (`MNIST/raw/*.gz`)."""

from __future__ import annotations

import gzip
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch

from zdp_bench.data import Dataset, DatasetInfo, Examples, Provenance, Splits
from zdp_bench.data.augmentation import augmentation
from zdp_bench.data.files import card, digest, fetch, missing, sha256, verify
from zdp_bench.foreign_files import expect, reading
from zdp_bench.registry import register

CLASSES = 10
# Mean and standard deviation of pixels in [0, 1]: published constants, so they cost no privacy.
PIXELS = {"mnist": (0.1307, 0.3081), "fashion_mnist": (0.2860, 0.3530)}
UNSIGNED_BYTE = 0x08
MAX_BYTES = 2**30  # of entries; MNIST has 47 million, and EMNIST's largest part 638 million


def read_idx(path: Path, dims: int) -> np.ndarray:
    """Read an idx file of unsigned bytes with `dims` dimensions (1 for labels, 3 for images).

    An idx file consists of two zero bytes, the type code, the number of dimensions, the size of
    each dimension as a big-endian uint32, and the entries. No more is decompressed than the header
    announces.
    """
    open_it = gzip.open if path.suffix == ".gz" else open
    with reading(path), open_it(path, "rb") as file:
        head = file.read(4 + 4 * dims)
        magic = head[:4].hex()
        wanted = bytes((0, 0, UNSIGNED_BYTE, dims)).hex()
        expect(magic == wanted, f"starts with 0x{magic} where 0x{wanted} was expected")
        expect(len(head) == 4 + 4 * dims, "ends inside its header")
        shape = np.frombuffer(head[4:], ">u4").tolist()
        size = prod(shape)
        announced = f"announces {size:,} bytes of data"
        expect(size <= MAX_BYTES, f"{announced}; at most {MAX_BYTES:,} are read")
        # One byte more is requested, so that gzip reaches the end and compares its checksum.
        raw = file.read(size + 1)
        count = f"{len(raw):,}" if len(raw) <= size else "more"
        expect(len(raw) == size, f"{announced}, but {count} are there")
    return np.frombuffer(raw, np.uint8).reshape(shape)


@register("dataset", "mnist")
@dataclass(frozen=True, kw_only=True)
class Mnist(Dataset):
    """MNIST: 60,000 training and 10,000 test digits, float32 [28, 28].

    Missing files are downloaded.

    Args:
        normalise: "standard" subtracts the published mean of pixels and divides by their standard
            deviation; "unit" keeps pixels in [0, 1].
        check: verify the checksums. Without it, any idx files are read, and they are 'derived'.
    """

    card_name: ClassVar[str] = "mnist"
    names_owners: ClassVar[bool] = False

    normalise: Literal["standard", "unit"] = "standard"
    check: bool = True

    def load(self, root: Path) -> Splits:
        images, labels, files, provenance = self.read(root)
        train_images, test_images = images
        train_labels, test_labels = labels
        return Splits(
            Examples(train_images, torch.from_numpy(train_labels)),
            Examples(test_images, torch.from_numpy(test_labels)),
            input_shape=tuple(train_images.shape[1:]),
            outputs=CLASSES,
            provenance=provenance,
            digest=files,
            unit="image",
        )

    def published_info(self, root: Path) -> DatasetInfo | None:
        if not missing(root, card(self.card_name)):
            return None
        return DatasetInfo(
            train=60_000,
            test=10_000,
            input_shape=(28, 28),
            outputs=CLASSES,
            unit="image",
        )

    def read(self, root: Path) -> tuple[list[torch.Tensor], list[np.ndarray], str, Provenance]:
        """Read the files, after downloading missing ones.

        Returns:
            The images of training and test part, float32 [n, 28, 28]; their labels [n]; the digest
            of the files; and the provenance.
        """
        mnist = card(self.card_name)
        fetch(root, mnist)
        paths = [root / file.path for file in mnist.files]
        if self.check:  # before anything is decompressed
            for path, file in zip(paths, mnist.files, strict=True):
                verify(path, file, mnist.name)
        images: list[torch.Tensor] = []
        labels = []
        # The card lists images and labels in turn, first those to train on, then those to test on.
        for image_path, label_path in zip(paths[::2], paths[1::2], strict=True):
            part_images = read_idx(image_path, dims=3)
            _require_size(part_images, images, image_path)
            part_labels = read_idx(label_path, dims=1)
            _check_pair(part_images, part_labels, label_path)
            images.append(self.to_float(part_images))
            labels.append(part_labels.astype(np.int64))
        digests = "".join(sha256(path) for path in paths)
        provenance: Provenance = "official" if self.check else "derived"
        return images, labels, digest(digests), provenance

    def to_float(self, images: np.ndarray) -> torch.Tensor:
        """Convert bytes to float32, normalised as `normalise` says."""
        pixels = torch.from_numpy(images.astype(np.float32) / 255.0)
        mean, deviation = (0.0, 1.0) if self.normalise == "unit" else PIXELS[self.card_name]
        return (pixels - mean) / deviation


@register("dataset", "fashion_mnist")
@dataclass(frozen=True, kw_only=True)
class FashionMnist(Mnist):
    """Fashion-MNIST: pieces of clothing in MNIST's format and numbers.

    Args:
        augment: name of an augmentation; see `augmentation`. Default: none.
    """

    card_name: ClassVar[str] = "fashion_mnist"

    augment: str | None = None

    def __post_init__(self) -> None:
        augmentation(self.augment, 0.0)

    def load(self, root: Path) -> Splits:
        black = float(self.to_float(np.zeros(1, np.uint8)))
        augment = augmentation(self.augment, black)
        return replace(super().load(root), augment=augment)


def _require_size(
    part_images: np.ndarray,
    images: list[torch.Tensor],
    path: Path,
) -> None:
    """Reject images without pixels, or of another size than those of the part before, if any."""
    height, width = part_images.shape[1:]
    with reading(path):
        content = f"holds images of {height}×{width} pixels"
        expect(height * width > 0, content)
        for other in images:
            rows, columns = other.shape[1:]
            rule = f"{content}, and the file of the training images {rows}×{columns}"
            expect((height, width) == (rows, columns), rule)


def _check_pair(
    images: np.ndarray,
    labels: np.ndarray,
    label_path: Path,
) -> None:
    with reading(label_path):
        rule = f"holds {len(labels):,} labels, and the file of its images {len(images):,} images"
        expect(len(images) == len(labels), rule)
        expect(len(labels) > 0, "holds no examples")
        expect(
            labels.max() < CLASSES, f"holds label {labels.max()}; classes are 0 to {CLASSES - 1}"
        )
