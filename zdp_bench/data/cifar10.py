"""CIFAR-10 in its official binary layout.

    cifar-10-batches-bin/data_batch_{1..5}.bin, test_batch.bin
        one image: a byte for the label, 3,072 bytes for the pixels [3, 32, 32]

`releases` in the card lists the known releases by checksum: the official files, and the same images
in another order, for which it has a digest of the sorted images of each part. Other images, such as
a copy that was compressed with JPEG, are never called CIFAR-10. The Python layout is not read,
because it consists of pickles, which can execute code.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch

from zdp_bench.data import Dataset, DatasetInfo, Examples, Provenance, Splits
from zdp_bench.data.augmentation import augmentation
from zdp_bench.data.files import Card, card, checksum, digest, sha256, tell_source
from zdp_bench.errors import UserError
from zdp_bench.foreign_files import expect, reading
from zdp_bench.registry import register

CLASSES = 10
SHAPE = (3, 32, 32)
RECORD = 1 + 3 * 32 * 32  # bytes of one image in the binary layout
MAX_IMAGES = 10**6  # in one file; the release has 10,000
# Mean and standard deviation of each channel in [0, 1]: published constants, so they cost no
# privacy.
MEAN, DEVIATION = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)

FOLDER = "cifar-10-batches-bin"
BATCHES = (
    "data_batch_1.bin",
    "data_batch_2.bin",
    "data_batch_3.bin",
    "data_batch_4.bin",
    "data_batch_5.bin",
    "test_batch.bin",
)
NOTES = {
    "binary": "",
    "reordered": "the release's pixels, in another order",
}


@dataclass(frozen=True)
class Images:
    """The images, uint8 [n, 3, 32, 32], and labels [n] of one file."""

    images: np.ndarray
    labels: np.ndarray


@register("dataset", "cifar10")
@dataclass(frozen=True, kw_only=True)
class Cifar10(Dataset):
    """CIFAR-10: 50,000 training and 10,000 test images, float32 [3, 32, 32].

    Args:
        normalise: "standard" subtracts the published mean of each channel and divides by its
            standard deviation; "unit" keeps pixels in [0, 1].
        augment: name of an augmentation; see `augmentation`. Default: none.
        layout: both values mean the binary layout.
        check: accept known releases only. Without it, other files are read as 'derived'.
    """

    names_owners: ClassVar[bool] = False

    normalise: Literal["standard", "unit"] = "standard"
    augment: str | None = None
    layout: Literal["auto", "binary"] = "auto"
    check: bool = True

    def __post_init__(self) -> None:
        augmentation(self.augment, 0.0)

    def load(self, root: Path) -> Splits:
        advice = (
            ", or set dataset.check=false to read it as it is; its provenance is then 'derived'"
        )
        paths = self.paths(root)
        files, sums, provenance, notes = read(paths, card("cifar10"), self.check, advice)
        mean = torch.tensor(MEAN).view(3, 1, 1)
        deviation = torch.tensor(DEVIATION).view(3, 1, 1)
        if self.normalise == "unit":
            mean, deviation = torch.zeros(3, 1, 1), torch.ones(3, 1, 1)

        def join(parts: list[Images]) -> Examples:
            images = torch.from_numpy(np.concatenate([part.images for part in parts]))
            labels = torch.from_numpy(np.concatenate([part.labels for part in parts]))
            pixels = images.float().div_(255).sub_(mean).div_(deviation)
            return Examples(pixels, labels)

        return Splits(
            join(files[:5]),
            join(files[5:]),
            SHAPE,
            CLASSES,
            provenance,
            sums,
            notes,
            augment=augmentation(self.augment, -mean / deviation),
            unit="image",
        )

    def published_info(self, root: Path) -> DatasetInfo | None:
        with suppress(UserError):
            if all(path.is_file() for path in self.paths(root)):
                return None
        return DatasetInfo(
            train=50_000, test=10_000, input_shape=SHAPE, outputs=CLASSES, unit="image"
        )

    def paths(self, root: Path) -> list[Path]:
        """Return the paths of the six files, training files first."""
        if (root / FOLDER).is_dir():
            return [root / FOLDER / batch for batch in BATCHES]
        raise UserError(f"{root / FOLDER}: is missing. {tell_source(card('cifar10'))}")


def release_of(paths: list[Path], data_card: Card) -> str | None:
    """Return the release that all files belong to, by their checksums; None if it is unknown."""
    first = _release_of_file(paths[0], data_card)
    for path in paths[1:]:
        other = _release_of_file(path, data_card)
        if other != first:
            raise UserError(
                f"{path}: is of {other or 'no known release'}, but {paths[0].name} beside it is of "
                f"{first or 'no known release'}, by their checksums. Unpack one archive again."
            )
    return first


def _release_of_file(path: Path, data_card: Card) -> str | None:
    for release, checksums in data_card.releases.items():
        expected = checksums.get(path.name)
        if expected and checksum(path, expected.partition(":")[0]) == expected:
            return release
    return None


def sorted_digest(files: list[Images]) -> str:
    """Return the SHA-256 of the sorted images, each preceded by its label, as in the files."""
    rows: list[bytes] = []
    for part in files:
        labelled = zip(part.labels, part.images, strict=True)
        rows += [bytes([label]) + image.tobytes() for label, image in labelled]
    return f"sha256:{hashlib.sha256(b''.join(sorted(rows))).hexdigest()}"


def read_binary(path: Path) -> Images:
    """Read one file of the binary layout."""
    with reading(path, RECORD * MAX_IMAGES):
        raw = path.read_bytes()
        whole = len(raw) > 0 and len(raw) % RECORD == 0
        expect(whole, f"holds {len(raw):,} bytes, no whole number of {RECORD}-byte images")
        rows = np.frombuffer(raw, np.uint8).reshape(-1, RECORD)
        labels = rows[:, 0].astype(np.int64)
        wrong = labels[labels >= CLASSES].tolist()
        expect(not wrong, f"holds labels {wrong[:3]}; classes are 0 to {CLASSES - 1}")
    return Images(rows[:, 1:].reshape(-1, *SHAPE), labels)


def read(
    paths: list[Path],
    data_card: Card,
    check: bool,
    advice: str = "",
) -> tuple[list[Images], str, Provenance, str]:
    """Read the six files.

    Args:
        paths: paths of the files, training files first.
        data_card: the card, which lists the known releases.
        check: reject files of no known release.
        advice: what the error for such files adds to "Unpack the official archive".

    Returns:
        The images of each file, the digest of the files, their provenance, and the notes.
    """
    release = release_of(paths, data_card) if check else None
    files = [read_binary(path) for path in paths]
    if check and release is None:  # they may be a known release in another order
        parts = {"train": sorted_digest(files[:5]), "test": sorted_digest(files[5:])}
        release = next((name for name, sums in data_card.releases.items() if sums == parts), None)
    if check and release is None:
        raise UserError(
            f"{paths[0]}: the images in its folder are not from a known release. Unpack the "
            f"official archive{advice}."
        )
    sums = digest("".join(sha256(path) for path in paths))
    notes = NOTES.get(str(release), "files of no known release, in CIFAR-10's layout")
    return files, sums, "official" if release else "derived", notes
