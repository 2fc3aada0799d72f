"""Single-coil k-space made from real anatomy: any folder of NIfTI magnitude volumes.

It stands in for fastMRI, which not everyone may have. A slice's magnitude is given a smooth phase
and Fourier transformed at its native size; no noise is added, no voxel is resampled. The phase is a
polynomial of second order over the slice, fixed by the volume's name, as coil and field
inhomogeneity make one. k-space is written once in fastMRI's layout, and read as fastMRI is. The
scanner's phase is unknown, and its filters and interpolation are in the magnitudes: numbers from
here are 'derived', never fastMRI's.

ε is stated of a volume; who owns two of them (Task04, see `msd.py`) has a larger one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from zdp_bench.data import DatasetInfo, Splits
from zdp_bench.data.fastmri import KSpaceSlices
from zdp_bench.data.files import (
    count_held_out,
    digest,
    holds_any,
    resolve_folder,
    sha256,
    write_whole,
)
from zdp_bench.data.formats import nifti
from zdp_bench.data.formats.kspace import to_kspace
from zdp_bench.data.formats.single_coil import FOLDERS, Volume, find_volumes, write_volume
from zdp_bench.errors import require
from zdp_bench.registry import register


def draw_phase(rows: int, columns: int, random: np.random.Generator) -> np.ndarray:
    """Draw a phase [rows, columns] in radians.

    It is Σ a_ij·y^i·x^j, i + j ≤ 2, with y and x from -1 to 1 and the a_ij uniform in ±π/2.
    """
    y, x = np.meshgrid(np.linspace(-1, 1, rows), np.linspace(-1, 1, columns), indexing="ij")
    terms = np.stack([y**i * x**j for i in range(3) for j in range(3 - i)])  # [6, rows, columns]
    return np.tensordot(random.uniform(-np.pi / 2, np.pi / 2, len(terms)), terms, axes=1)


def write_set(folder: Path, paths: list[Path], axis: int, testing: np.ndarray) -> None:
    """Write every volume in fastMRI's layout, on its side of the split, all or none."""
    with write_whole(folder) as partial:
        for side in FOLDERS:
            (partial / side).mkdir()
        for path, held in zip(paths, testing, strict=True):
            name = nifti.name_of(path)
            image = np.moveaxis(nifti.read(path).data, axis, 0)  # [slices, rows, columns]
            random = np.random.default_rng([ord(letter) for letter in name])
            phase = draw_phase(image.shape[1], image.shape[2], random)
            made = partial / FOLDERS[int(held)] / f"{name}.h5"
            write_volume(
                made, to_kspace(image * np.exp(1j * phase)), np.abs(image), name, "derived"
            )


@register("dataset", "kspace_from_volumes")
@dataclass(frozen=True, kw_only=True)
class KSpaceFromVolumes(KSpaceSlices):
    """k-space of the volumes in `folder` of the data root."""

    owner: ClassVar[str] = "volume"

    folder: str = nifti.HIPPOCAMPI
    axis: int = 2
    slices: int | None = 3
    test_share: float = 0.2
    split_seed: int = 0

    def __post_init__(self) -> None:
        rule = "must be 0, 1 or 2: the axis that slices are counted along"
        require(self.axis in (0, 1, 2), "dataset.axis", self.axis, rule)
        super().__post_init__()

    def load(self, root: Path) -> Splits:
        paths = list(self.find(root))
        testing = self.hold_out(len(paths))
        each = zip(paths, testing, strict=True)
        files = repr(([(path.name, sha256(path), bool(test)) for path, test in each], self.axis))
        made = root / "derived" / f"kspace-{nifti.READING}-{digest(files)[:16]}"
        if not made.is_dir():
            write_set(made, paths, self.axis, testing)
        notes = f"k-space of the volumes in {self.folder} with a smooth phase added, no noise"
        return self.read_splits(find_volumes(made), "derived", notes)

    def info(self, root: Path) -> DatasetInfo:
        """Count by the volumes' headers; without volumes, as many as the default folder has."""
        known, found = self.announce(nifti.N_HIPPOCAMPI), False
        if holds_any(resolve_folder(root, self.folder)):
            known, found = [], True
            for path, header in self.find(root).items():
                rows, columns = np.delete(header.shape, self.axis).tolist()
                shape = (header.shape[self.axis], rows, columns)
                known.append(Volume.announce(nifti.name_of(path), shape))
        testing = self.hold_out(len(known))
        train = [known[index] for index in np.flatnonzero(~testing)]
        return self.describe((train, [known[index] for index in np.flatnonzero(testing)]), found)

    def check_files(self, root: Path) -> Iterator[tuple[Path, str]]:
        """Read every volume of the folder."""
        return nifti.check_files(root / self.folder, "kspace_from_volumes")

    def find(self, root: Path) -> dict[Path, nifti.Header]:
        return nifti.find_volumes(resolve_folder(root, self.folder), "kspace_from_volumes")

    def hold_out(self, count: int) -> np.ndarray:
        """Return True for the volumes to test on."""
        held = count_held_out(count, self.test_share, "volumes")
        testing = np.zeros(count, dtype=bool)
        random = np.random.default_rng(self.split_seed)
        testing[random.choice(count, held, replace=False)] = True
        return testing
