"""Single-coil k-space made from real anatomy or from public pictures.

It is written once in fastMRI's layout, and read as fastMRI is; numbers from here are 'derived'.

`kspace_from_volumes` is made of any folder of NIfTI magnitude volumes, and stands in for fastMRI,
which not everyone may have. A slice's magnitude is given a smooth phase and Fourier transformed at
its native size; no noise is added, no voxel is resampled. The phase is a polynomial of second order
over the slice, fixed by the volume's name, as coil and field inhomogeneity make one. The scanner's
phase is unknown, and its filters and interpolation are in the magnitudes. ε is stated of a volume;
who owns two of them (Task04, see `msd.py`) has a larger one.

`public_kspace` is made of CIFAR-10's pictures, many to a file: they become grey, are mirrored at
their edges up to the size of a scan, and get a phase likewise. Nobody's anatomy is in them, so a
network trained on them may start a private run: `model.init_from`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Interval

from zdp_bench.data import DatasetInfo, Most, Splits, nifti
from zdp_bench.data.cifar10 import SHAPE, Cifar10, read
from zdp_bench.data.fastmri import FOLDERS, KSpaceSlices, find_volumes, write_volume
from zdp_bench.data.files import card, digest, sha256, write_whole
from zdp_bench.data.kspace import to_kspace
from zdp_bench.errors import require
from zdp_bench.registry import register


def draw_phase(rows: int, columns: int, random: np.random.Generator) -> np.ndarray:
    """Draw a phase [rows, columns] in radians.

    It is Σ a_ij·y^i·x^j, i + j ≤ 2, with y and x from -1 to 1 and the a_ij uniform in ±π/2.
    """
    y, x = np.meshgrid(np.linspace(-1, 1, rows), np.linspace(-1, 1, columns), indexing="ij")
    terms = np.stack([y**i * x**j for i in range(3) for j in range(3 - i)])  # [6, rows, columns]
    return np.tensordot(random.uniform(-np.pi / 2, np.pi / 2, len(terms)), terms, axes=1)


def write_volumes(folder: Path, paths: list[Path], axis: int, testing: np.ndarray) -> None:
    """Write every volume in fastMRI's layout, on its side of the split, all or none."""
    with write_whole(folder) as partial:
        for side in FOLDERS:
            (partial / side).mkdir()
        for path, held in zip(paths, testing, strict=True):
            name = nifti.name_of(path)
            image = np.moveaxis(nifti.read(path), axis, 0)  # [slices, rows, columns]
            random = np.random.default_rng([ord(letter) for letter in name])
            phase = draw_phase(image.shape[1], image.shape[2], random)
            made = partial / FOLDERS[int(held)] / f"{name}.h5"
            write_volume(
                made, to_kspace(image * np.exp(1j * phase)), np.abs(image), name, "derived"
            )


@register("dataset", "kspace_from_volumes")
@dataclass(frozen=True, kw_only=True)
class KSpaceFromVolumes(KSpaceSlices, nifti.OfVolumes):
    """k-space of the volumes in `folder` of the data root."""

    name: ClassVar[str] = "kspace_from_volumes"
    owner: ClassVar[str] = "volume"

    axis: Annotated[int, Interval(ge=0, le=2)] = 2  # that slices are counted along
    slices: Most = 3

    def load(self, root: Path) -> Splits:
        paths = list(self.find(root))
        testing = self.hold_out(len(paths))
        each = zip(paths, testing, strict=True)
        files = repr(([(path.name, sha256(path), bool(test)) for path, test in each], self.axis))
        made = root / "derived" / f"kspace-{nifti.READING}-{digest(files)[:16]}"
        if not made.is_dir():
            write_volumes(made, paths, self.axis, testing)
        notes = f"k-space of the volumes in {self.folder} with a smooth phase added, no noise"
        return self.read_splits(find_volumes(made), "derived", notes)

    def hold_out(self, count: int) -> np.ndarray:
        """Return True for the volumes to test on."""
        testing, random = np.zeros(count, dtype=bool), np.random.default_rng(self.split_seed)
        testing[random.choice(count, self.count_test(count), replace=False)] = True
        return testing


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


def write_pictures(
    folder: Path, sides: list[np.ndarray], shape: tuple[int, int], seed: int
) -> None:
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
    train: Annotated[int, Interval(ge=1, le=50_000)] = 6000
    test: Annotated[int, Interval(ge=1, le=10_000)] = 600
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.slices is None, "dataset.slices", self.slices, "must be null: all pictures")
        sides = (("rows", self.rows, self.height), ("columns", self.columns, self.width))
        for (key, side, crop), most in zip(sides, LARGEST, strict=True):
            rule = f"must lie between {max(crop, SHAPE[1])} and {most}"
            require(max(crop, SHAPE[1]) <= side <= most, f"dataset.{key}", side, rule)

    def load(self, root: Path) -> Splits:
        """Take CIFAR-10's first pictures of either part."""
        files, sums, _provenance, notes = read(Cifar10().paths(root), card("cifar10"), check=True)
        settings = repr((sums, self.shape, self.train, self.test, self.seed))
        name = digest(settings)
        made = root / "derived" / f"public-kspace-{name[:16]}"
        if not made.is_dir():
            train = np.concatenate([part.images for part in files[:5]])[: self.train]
            write_pictures(made, [train, files[5].images[: self.test]], self.shape, self.seed)
        of = f"k-space of grey CIFAR-10 pictures{f' ({notes})' if notes else ''}, public"
        return self.read_splits(find_volumes(made), "derived", of)

    def released(self, root: Path) -> DatasetInfo | None:
        if Cifar10().released(root) is None:
            return None
        known = replace(self.describe(0, 0), train=self.train, test=self.test)
        return replace(known, owners=self.train, examples_per_patient=1)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of k-space."""
        return self.rows, self.columns
