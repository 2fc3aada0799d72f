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

from zdp_bench.data import DatasetInfo, MaxCount, Splits, nifti
from zdp_bench.data.cifar10 import SHAPE, Cifar10, read
from zdp_bench.data.fastmri import FOLDERS, KSpaceSlices, find_volumes, write_volume
from zdp_bench.data.files import card, digest, sha256, write_whole
from zdp_bench.data.kspace import to_kspace
from zdp_bench.errors import require
from zdp_bench.registry import register

POWERS = ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0))  # of y and x, of second order


def draw_phase(
    rows: int,
    columns: int,
    random: np.random.Generator,
) -> np.ndarray:
    """Draw a phase [rows, columns] in radians.

    It is Σ a_ij·y^i·x^j, i + j ≤ 2, with y and x from -1 to 1 and the a_ij uniform in ±π/2.
    """
    y = np.linspace(-1, 1, rows)
    x = np.linspace(-1, 1, columns)
    y, x = np.meshgrid(y, x, indexing="ij")
    terms = np.stack([y**i * x**j for i, j in POWERS])  # [6, rows, columns]
    coefficients = random.uniform(-np.pi / 2, np.pi / 2, len(terms))
    return np.tensordot(coefficients, terms, axes=1)


def write_volumes(
    folder: Path,
    paths: list[Path],
    axis: int,
    testing: np.ndarray,
) -> None:
    """Write every volume in fastMRI's layout, on its side of the split, all or none."""
    with write_whole(folder) as partial:
        for side in FOLDERS:
            (partial / side).mkdir()
        for path, held in zip(paths, testing, strict=True):
            name = nifti.name_of(path)
            image = np.moveaxis(nifti.read(path), axis, 0)  # [slices, rows, columns]
            random = np.random.default_rng([ord(letter) for letter in name])
            phase = draw_phase(image.shape[1], image.shape[2], random)
            kspace = to_kspace(image * np.exp(1j * phase))
            file = partial / FOLDERS[int(held)] / f"{name}.h5"
            write_volume(file, kspace, np.abs(image), name, "derived")


@register("dataset", "kspace_from_volumes")
@dataclass(frozen=True, kw_only=True)
class KSpaceFromVolumes(KSpaceSlices, nifti.OfVolumes):
    """k-space of the volumes in `folder` of the data root."""

    name: ClassVar[str] = "kspace_from_volumes"
    owner: ClassVar[str] = "volume"

    axis: Annotated[int, Interval(ge=0, le=2)] = 2  # that slices are counted along
    slices: MaxCount = 3

    def load(self, root: Path) -> Splits:
        paths = list(self.find(root))
        testing = self.hold_out(len(paths))
        files = [
            (path.name, sha256(path), bool(held)) for path, held in zip(paths, testing, strict=True)
        ]
        name = digest(repr((files, self.axis)))[:16]
        folder = root / "derived" / f"kspace-{nifti.READING}-{name}"
        if not folder.is_dir():
            write_volumes(folder, paths, self.axis, testing)
        notes = f"k-space of the volumes in {self.folder} with a smooth phase added, no noise"
        return self.read_splits(find_volumes(folder), "derived", notes)

    def hold_out(self, count: int) -> np.ndarray:
        """Return True for the volumes to test on."""
        random = np.random.default_rng(self.split_seed)
        held = random.choice(count, self.count_test(count), replace=False)
        testing = np.zeros(count, dtype=bool)
        testing[held] = True
        return testing


TOGETHER = 100  # pictures in a file
LUMA = np.array([0.299, 0.587, 0.114])  # of red, green and blue: ITU-R BT.601
LARGEST = 2 * SHAPE[1] - 1  # rows or columns that one mirroring of a square picture can fill


def draw_scan(
    picture: np.ndarray,
    shape: tuple[int, int],
    random: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the k-space, complex [rows, columns], and the magnitude of a picture [3, 32, 32]."""
    grey = np.tensordot(LUMA, picture, axes=1)
    padding = []
    for whole, side in zip(shape, grey.shape, strict=True):
        before = (whole - side) // 2
        padding.append((before, whole - side - before))
    image = np.pad(grey, padding, mode="reflect")
    phase = draw_phase(*shape, random)
    return to_kspace(image * np.exp(1j * phase)), image


def write_pictures(
    folder: Path,
    sides: list[np.ndarray],
    shape: tuple[int, int],
    seed: int,
) -> None:
    """Write the pictures [n, 3, 32, 32] of both sides, all or none.

    Args:
        shape: rows and columns of k-space.
        seed: of the phases.
    """
    with write_whole(folder) as partial:
        for number, (side, pictures) in enumerate(zip(FOLDERS, sides, strict=True)):
            (partial / side).mkdir()
            for first in range(0, len(pictures), TOGETHER):
                name = f"{side}_{first:06d}"
                random = np.random.default_rng([seed, number, first])
                scans = [
                    draw_scan(picture, shape, random)
                    for picture in pictures[first : first + TOGETHER]
                ]
                kspace = np.stack([kspace for kspace, _ in scans])
                images = np.stack([image for _, image in scans])
                write_volume(partial / side / f"{name}.h5", kspace, images, name, "derived")


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
        self._require_side("rows", self.rows, self.height)
        self._require_side("columns", self.columns, self.width)

    @staticmethod
    def _require_side(
        key: str,
        side: int,
        crop: int,
    ) -> None:
        least = max(crop, SHAPE[1])
        rule = f"must lie between {least} and {LARGEST}"
        require(least <= side <= LARGEST, f"dataset.{key}", side, rule)

    def load(self, root: Path) -> Splits:
        """Take CIFAR-10's first pictures of either part."""
        paths = Cifar10().paths(root)
        files, sums, _provenance, notes = read(paths, card("cifar10"), check=True)
        shape = (self.rows, self.columns)
        name = digest(repr((sums, shape, self.train, self.test, self.seed)))[:16]
        folder = root / "derived" / f"public-kspace-{name}"
        if not folder.is_dir():
            train = np.concatenate([part.images for part in files[:5]])[: self.train]
            test = files[5].images[: self.test]
            write_pictures(folder, [train, test], shape, self.seed)
        origin = f" ({notes})" if notes else ""
        notes = f"k-space of grey CIFAR-10 pictures{origin}, public"
        return self.read_splits(find_volumes(folder), "derived", notes)

    def released(self, root: Path) -> DatasetInfo | None:
        if Cifar10().released(root) is None:
            return None
        known = replace(self.describe(0, 0), train=self.train, test=self.test)
        return replace(known, owners=self.train, examples_per_patient=1)
