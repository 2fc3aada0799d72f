"""A stand-in for fastMRI: ellipsoids seen by one coil, in fastMRI's layout.

They need no download, and are read as fastMRI is. As Shepp and Logan's (1974), a head is a bright
rim around tissue with inner structures; where they are and how bright they are varies from patient
to patient. It is multiplied by a coil's smooth sensitivity and phase; complex Gaussian noise is
added to its k-space, which reaches beyond the image along the readout as fastMRI's does.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zdp_bench.data import DatasetInfo, Splits
from zdp_bench.data.fastmri import KSpaceSlices
from zdp_bench.data.files import count_held_out, write_whole
from zdp_bench.data.formats.kspace import centre_crop, to_image, to_kspace
from zdp_bench.data.formats.single_coil import FOLDERS, find_volumes, write_volume
from zdp_bench.errors import require
from zdp_bench.extras.standins.kspace_from_volumes import draw_phase
from zdp_bench.extras.standins.sizes import require_modest
from zdp_bench.registry import register

NOISE = 0.01  # standard deviation of each part of k-space, where tissue has magnitude 1


def draw_head(slices: int, rows: int, columns: int, random: np.random.Generator) -> np.ndarray:
    """Draw the magnitude [slices, rows, columns] of one patient."""
    z, y, x = np.meshgrid(
        np.linspace(-0.5, 0.5, slices),
        np.linspace(-1, 1, rows),
        np.linspace(-1, 1, columns),
        indexing="ij",
    )

    def inside(centre: np.ndarray, radii: np.ndarray, turned: float) -> np.ndarray:
        across = (y - centre[1]) * np.cos(turned) + (x - centre[2]) * np.sin(turned)
        along = (x - centre[2]) * np.cos(turned) - (y - centre[1]) * np.sin(turned)
        return ((z - centre[0]) / radii[0]) ** 2 + (across / radii[1]) ** 2 + (
            along / radii[2]
        ) ** 2 < 1

    skull = np.array([1.0, *random.uniform(0.75, 0.9, 2)])
    nowhere = np.zeros(3)
    image = 0.9 * inside(nowhere, skull, 0.0) - 0.5 * inside(
        nowhere, skull - np.array([0, 0.1, 0.1]), 0.0
    )
    for _ in range(10):
        centre = random.uniform(-0.5, 0.5, 3) * np.array([0.6, 1, 1])
        radii = np.array([random.uniform(0.3, 0.6), *random.uniform(0.08, 0.3, 2)])
        image = image + random.uniform(-0.2, 0.3) * inside(centre, radii, random.uniform(0, np.pi))
    return image.clip(0, None)


def scan(
    slices: int, height: int, width: int, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Scan one patient.

    Returns:
        k-space [slices, 2·height, width + 4]; the reconstruction's magnitude [slices, height,
        width].
    """
    rows, columns = 2 * height, width + 4
    image = np.zeros((slices, rows, columns))
    image[:, height // 2 : height // 2 + height, 2 : 2 + width] = draw_head(
        slices, height, width, random
    )
    y, x = np.meshgrid(np.linspace(-1, 1, rows), np.linspace(-1, 1, columns), indexing="ij")
    coil = np.exp(
        -((y - random.uniform(-0.3, 0.3)) ** 2 + (x - random.uniform(-0.5, 0.5)) ** 2) / 4
    )
    kspace = to_kspace(image * coil * np.exp(1j * draw_phase(rows, columns, random)))
    kspace = kspace + NOISE * (
        random.normal(size=kspace.shape) + 1j * random.normal(size=kspace.shape)
    )
    return kspace, np.abs(centre_crop(to_image(kspace), height, width))


def write_set(
    folder: Path, patients: int, slices: int, height: int, width: int, seed: int, testing: int
) -> None:
    """Write volumes, the last `testing` of them to test on, all or none."""
    with write_whole(folder) as partial:
        for side in FOLDERS:
            (partial / side).mkdir()
        for number in range(patients):
            kspace, magnitude = scan(slices, height, width, np.random.default_rng([seed, number]))
            name, side = f"phantom{number:04d}", FOLDERS[int(number >= patients - testing)]
            write_volume(partial / side / f"{name}.h5", kspace, magnitude, name, "synthetic")


@register("dataset", "kspace_phantom")
@dataclass(frozen=True, kw_only=True)
class KSpacePhantom(KSpaceSlices):
    """Drawn volumes, written once under `synthetic/` and read as fastMRI is."""

    patients: int = 10
    seed: int = 0
    slices: int = 2
    test_share: float = 0.2

    def __post_init__(self) -> None:
        require(self.patients > 1, "dataset.patients", self.patients, "must be at least 2")
        require(self.slices > 0, "dataset.slices", self.slices, "must be at least 1")
        super().__post_init__()
        voxels = self.patients * self.slices * self.height * self.width
        keys = "dataset.patients, slices, height and width"
        require_modest(keys, 12 * voxels)  # k-space and magnitude
        self.count_test()

    def count_test(self) -> int:
        return count_held_out(self.patients, self.test_share, "patients")

    def load(self, root: Path) -> Splits:
        shape = (self.slices, self.height, self.width)
        size = f"{self.slices}-{self.height}x{self.width}"
        name = f"kspace-{self.patients}-{size}-{self.test_share}-{self.seed}"
        made = root / "synthetic" / name
        if not made.is_dir():
            write_set(made, self.patients, *shape, self.seed, self.count_test())
        notes = "ellipsoids seen by one coil, with noise"
        return self.read_splits(find_volumes(made), "synthetic", notes)

    def info(self, root: Path) -> DatasetInfo:
        drawn, train = self.announce(self.patients), self.patients - self.count_test()
        return self.describe((drawn[:train], drawn[train:]))
