"""Single-coil k-space computed from real anatomy or from public pictures.

The k-space is written once in fastMRI's layout and then read like fastMRI. Scores are 'derived'.

`kspace_from_volumes` uses any folder of NIfTI magnitude volumes, for users without access to
fastMRI. Each slice's magnitude gets a smooth phase and is Fourier transformed at its native size,
without noise and without resampling. The phase is a random polynomial of second order over the
slice, seeded by the volume's name; it resembles that of coil and field inhomogeneities. Two things
differ from measured k-space: the scanner's own phase is lost, and the magnitudes contain its
filters and interpolation. ε is per volume; a patient with two volumes (Task04, see `msd.py`) has a
larger ε.

`public_kspace` uses CIFAR-10's pictures, several in each file. They are converted to grey, mirrored
at their edges up to the size of a scan, and given such a phase. They show nobody's anatomy, so a
network trained on them may start a private run (`model.init_from`).
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
from zdp_bench.data.files import card, digest, write_whole
from zdp_bench.data.kspace import to_kspace
from zdp_bench.data.owners import digest_files
from zdp_bench.errors import require
from zdp_bench.registry import register

POWERS = ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0))  # of y and x, in the terms of a phase


def draw_phase(
    rows: int,
    columns: int,
    random: np.random.Generator,
) -> np.ndarray:
    """Draw a phase [rows, columns] in radians.

    It is Σ a_ij · y^i · x^j over i + j ≤ 2, where y and x run from −1 to 1 and each a_ij is uniform
    in [−π/2, π/2].
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
    is_test: np.ndarray,
) -> None:
    """Write the k-space of all volumes in fastMRI's layout; on an error, write nothing.

    Args:
        folder: path of the folder to write.
        paths: paths of the volumes.
        axis: axis along which a volume is cut into slices.
        is_test: True for each volume of the test part, [n].
    """
    with write_whole(folder) as partial:
        for part_folder in FOLDERS:
            (partial / part_folder).mkdir()
        for path, held in zip(paths, is_test, strict=True):
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
    """k-space of the volumes in `folder` of the data root.

    Args:
        axis: axis along which volumes are cut into slices: 0, 1 or 2 for x, y or z.
    """

    name: ClassVar[str] = "kspace_from_volumes"
    owner: ClassVar[str] = "volume"

    axis: Annotated[int, Interval(ge=0, le=2)] = 2
    slices: MaxCount = 3

    def load(self, root: Path) -> Splits:
        paths = list(self.find(root))
        is_test = self.hold_out(len(paths))
        names = [path.name for path in paths]
        contents = digest_files(paths, names)
        files = list(zip(names, contents, map(bool, is_test), strict=True))
        name = digest(repr((files, self.axis)))[:16]
        folder = root / "derived" / f"kspace-{nifti.READING}-{name}"
        if not folder.is_dir():
            write_volumes(folder, paths, self.axis, is_test)
        notes = f"k-space of the volumes in {self.folder} with a smooth phase added, no noise"
        return self.read_splits(find_volumes(folder), "derived", notes)

    def hold_out(self, count: int) -> np.ndarray:
        """Draw the volumes to test on: return True for each of them, [count]."""
        random = np.random.default_rng(self.split_seed)
        held = random.choice(count, self.count_test(count), replace=False)
        is_test = np.zeros(count, dtype=bool)
        is_test[held] = True
        return is_test


PICTURES_PER_FILE = 100
LUMA = np.array([0.299, 0.587, 0.114])  # weights of red, green and blue: ITU-R BT.601
MAX_SIDE = 2 * SHAPE[1] - 1  # rows or columns that mirroring a square picture once can fill


def draw_scan(
    picture: np.ndarray,
    shape: tuple[int, int],
    random: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Convert a picture [3, 32, 32] to k-space, complex [rows, columns], and its magnitude image.

    Args:
        shape: (rows, columns).
    """
    grey = np.tensordot(LUMA, picture, axes=1)
    padding = []
    for target_side, side in zip(shape, grey.shape, strict=True):
        before = (target_side - side) // 2
        padding.append((before, target_side - side - before))
    image = np.pad(grey, padding, mode="reflect")
    phase = draw_phase(*shape, random)
    return to_kspace(image * np.exp(1j * phase)), image


def write_pictures(
    folder: Path,
    parts: list[np.ndarray],
    shape: tuple[int, int],
    seed: int,
) -> None:
    """Write the k-space of all pictures in fastMRI's layout; on an error, write nothing.

    Args:
        folder: path of the folder to write.
        parts: training pictures and test pictures, each [n, 3, 32, 32].
        shape: (rows, columns) of k-space.
        seed: seed of the phases.
    """
    with write_whole(folder) as partial:
        for number, (part_folder, pictures) in enumerate(zip(FOLDERS, parts, strict=True)):
            (partial / part_folder).mkdir()
            for first in range(0, len(pictures), PICTURES_PER_FILE):
                name = f"{part_folder}_{first:06d}"
                random = np.random.default_rng([seed, number, first])
                scans = [
                    draw_scan(picture, shape, random)
                    for picture in pictures[first : first + PICTURES_PER_FILE]
                ]
                kspace = np.stack([kspace for kspace, _ in scans])
                images = np.stack([image for _, image in scans])
                write_volume(partial / part_folder / f"{name}.h5", kspace, images, name, "derived")


@register("dataset", "public_kspace")
@dataclass(frozen=True, kw_only=True)
class PublicKSpace(KSpaceSlices):
    """k-space of grey CIFAR-10 pictures. Each picture is one example, and its own owner.

    Args:
        rows, columns: size of k-space; from 32, or the crop if it is larger, to 63.
        train, test: number of pictures in each part.
        seed: seed of the phases.
    """

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
        min_side = max(crop, SHAPE[1])
        rule = f"must lie between {min_side} and {MAX_SIDE}"
        require(min_side <= side <= MAX_SIDE, f"dataset.{key}", side, rule)

    def load(self, root: Path) -> Splits:
        """Convert the first pictures of each of CIFAR-10's parts."""
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

    def published_info(self, root: Path) -> DatasetInfo | None:
        if Cifar10().published_info(root) is None:
            return None
        return replace(
            self.describe(0, 0),
            train=self.train,
            test=self.test,
            owners=self.train,
            examples_per_patient=1,
            is_estimate=False,
        )
