"""Single-coil k-space made from public pictures: what a reconstruction network may start from.

CIFAR-10's pictures become grey, are mirrored at their edges up to the size of a scan, get a smooth
phase (as `kspace_from_volumes.py` gives volumes one) and are Fourier transformed. They are written
once in fastMRI's layout, many pictures to a file, and read as fastMRI is. Nobody's anatomy is in
them, so a network trained on them may start a private run: `model.init_from`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from zdp_bench.data import DatasetInfo, Splits
from zdp_bench.data.cifar10 import SHAPE, Cifar10, read
from zdp_bench.data.fastmri import KSpaceSlices
from zdp_bench.data.files import card, digest, write_whole
from zdp_bench.data.formats.kspace import to_kspace
from zdp_bench.data.formats.single_coil import FOLDERS, Volume, find_volumes, write_volume
from zdp_bench.errors import require
from zdp_bench.extras.standins.kspace_from_volumes import draw_phase
from zdp_bench.registry import register

TOGETHER = 100  # pictures in a file
LUMA = np.array([0.299, 0.587, 0.114])  # of red, green and blue: ITU-R BT.601
LARGEST = (2 * SHAPE[1] - 1, 2 * SHAPE[2] - 1)  # rows and columns that one mirroring can fill


def draw_scan(
    picture: np.ndarray, shape: tuple[int, int], random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return the k-space, complex [rows, columns], and the magnitude of a picture [3, 32, 32]."""
    grey = np.tensordot(LUMA, picture, axes=1)
    missing = [whole - side for whole, side in zip(shape, grey.shape, strict=True)]
    image = np.pad(grey, [(more // 2, more - more // 2) for more in missing], mode="reflect")
    return to_kspace(image * np.exp(1j * draw_phase(*shape, random))), image


def write_set(folder: Path, sides: list[np.ndarray], shape: tuple[int, int], seed: int) -> None:
    """Write the pictures [n, 3, 32, 32] of both sides, all or none."""
    with write_whole(folder) as partial:
        for number, (side, pictures) in enumerate(zip(FOLDERS, sides, strict=True)):
            (partial / side).mkdir()
            for first in range(0, len(pictures), TOGETHER):
                name = f"{side}_{first:06d}"
                random = np.random.default_rng([seed, number, first])
                some = pictures[first : first + TOGETHER]
                kspace, images = zip(*(draw_scan(one, shape, random) for one in some), strict=True)
                path = partial / side / f"{name}.h5"
                write_volume(path, np.stack(kspace), np.stack(images), name, "derived")


@register("dataset", "public_kspace")
@dataclass(frozen=True, kw_only=True)
class PublicKSpace(KSpaceSlices):
    """k-space of grey CIFAR-10 pictures; a picture is an example."""

    owner: ClassVar[str] = "image"

    rows: int = 35
    columns: int = 51
    train: int = 6000
    test: int = 600
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.unit == "slice", "dataset.unit", self.unit, "a picture is a slice here")
        require(self.slices is None, "dataset.slices", self.slices, "must be null: all pictures")
        sides = (("rows", self.rows, self.height), ("columns", self.columns, self.width))
        for (key, side, crop), most in zip(sides, LARGEST, strict=True):
            rule = f"must lie between {max(crop, SHAPE[1])} and {most}"
            require(max(crop, SHAPE[1]) <= side <= most, f"dataset.{key}", side, rule)
        for key, count, most in (("train", self.train, 50_000), ("test", self.test, 10_000)):
            rule = f"must lie between 1 and CIFAR-10's {most:,}"
            require(1 <= count <= most, f"dataset.{key}", count, rule)

    def load(self, root: Path) -> Splits:
        """Take CIFAR-10's first pictures of either part.

        Raises:
            UserError: CIFAR-10 is missing, damaged or has too few pictures.
        """
        files, sums, _provenance, notes = read(Cifar10().paths(root), card("cifar10"), check=True)
        settings = repr((sums, self.shape, self.train, self.test, self.seed))
        name = digest(settings)
        made = root / "derived" / f"public-kspace-{name[:16]}"
        if not made.is_dir():
            train = np.concatenate([part.images for part in files[:5]])[: self.train]
            write_set(made, [train, files[5].images[: self.test]], self.shape, self.seed)
        of = f"k-space of grey CIFAR-10 pictures{f' ({notes})' if notes else ''}, public"
        return self.read_splits(find_volumes(made), "derived", of)

    def info(self, root: Path) -> DatasetInfo:
        """Return shapes and counts, which follow from the options."""
        sides = [
            [
                Volume.announce(f"{side}{first}", (min(TOGETHER, count - first), *self.shape))
                for first in range(0, count, TOGETHER)
            ]
            for side, count in (("train", self.train), ("test", self.test))
        ]
        return self.describe((sides[0], sides[1]), Cifar10().info(root).found)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of k-space."""
        return self.rows, self.columns
