"""A stand-in for fastMRI that needs no download: ellipsoids seen by one coil, written in fastMRI's layout, read by its adapter.

As Shepp and Logan's (1974), a head is a bright rim around tissue with inner structures; where they lie and how bright they are
varies from patient to patient. A coil's smooth sensitivity and phase lie over it, and complex Gaussian noise over its k-space,
which reaches beyond the image along the readout as fastMRI's does.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from zdp_bench.data import DatasetInfo, Splits, fastmri
from zdp_bench.data.files import made_whole
from zdp_bench.data.formats.kspace import Undersampling, centre_crop, to_image, to_kspace
from zdp_bench.data.kspace_from_volumes import smooth_phase
from zdp_bench.errors import require
from zdp_bench.registry import register

NOISE = 0.01  # standard deviation of each part of k-space, where tissue has magnitude 1


def head(slices: int, rows: int, columns: int, random: np.random.Generator) -> np.ndarray:
    """Magnitude [slices, rows, columns] of one patient."""
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
    """One volume: k-space [slices, 2·height, width + 4], and the magnitude of its reconstruction [slices, height, width]."""
    rows, columns = 2 * height, width + 4
    image = np.zeros((slices, rows, columns))
    image[:, height // 2 : height // 2 + height, 2 : 2 + width] = head(
        slices, height, width, random
    )
    y, x = np.meshgrid(np.linspace(-1, 1, rows), np.linspace(-1, 1, columns), indexing="ij")
    coil = np.exp(
        -((y - random.uniform(-0.3, 0.3)) ** 2 + (x - random.uniform(-0.5, 0.5)) ** 2) / 4
    )
    kspace = to_kspace(image * coil * np.exp(1j * smooth_phase(rows, columns, random)))
    kspace = kspace + NOISE * (
        random.normal(size=kspace.shape) + 1j * random.normal(size=kspace.shape)
    )
    return kspace, np.abs(centre_crop(to_image(kspace), height, width))


def _held(patients: int, test_share: float) -> int:
    """How many patients are to test on.

    Raises:
        UserError: none is, or none is left.
    """
    require(patients > 1, "dataset.patients", patients, "must be at least 2")
    held = round(test_share * patients)
    rule = f"leaves {patients - held} patients to train on, {held} to test on"
    require(0 < held < patients, "dataset.test_share", test_share, rule)
    return held


def write_set(
    folder: Path, patients: int, slices: int, height: int, width: int, seed: int, test_share: float
) -> None:
    """`patients` volumes, the last `test_share` of them to test on; whole or not at all."""
    testing = _held(patients, test_share)
    with made_whole(folder) as partial:
        for side in fastmri.FOLDERS:
            (partial / side).mkdir()
        for number in range(patients):
            kspace, magnitude = scan(slices, height, width, np.random.default_rng([seed, number]))
            side = fastmri.FOLDERS[int(number >= patients - testing)]
            fastmri.write(
                partial / side / f"phantom{number:04d}.h5",
                kspace,
                magnitude,
                f"phantom{number:04d}",
                "synthetic",
            )


@register("dataset", "kspace_phantom")
def kspace_phantom(
    root: Path,
    *,
    patients: int = 10,
    seed: int = 0,
    acceleration: float = 4.0,
    center_fraction: float = 0.08,
    height: int = 32,
    width: int = 40,
    slices: int = 2,
    unit: fastmri.Unit = "slice",
    test_share: float = 0.2,
) -> Splits:
    """Synthetic volumes, written once under `synthetic/` and read as fastMRI is: complex64 [1, height, width]."""
    _held(patients, test_share)
    require(slices > 0, "dataset.slices", slices, "must be at least 1")
    how = Undersampling(acceleration, center_fraction, height, width)
    made = root / "synthetic" / f"kspace-{patients}-{slices}-{height}x{width}-{test_share}-{seed}"
    if not made.is_dir():
        write_set(made, patients, slices, height, width, seed, test_share)
    return fastmri.as_splits(
        fastmri.scan(made),
        "synthetic",
        "ellipsoids seen by one coil, with noise",
        how=how,
        unit=unit,
        slices=slices,
    )


@register("outline", "kspace_phantom")
def outline(
    root: Path,
    *,
    patients: int,
    acceleration: float,
    center_fraction: float,
    height: int,
    width: int,
    slices: int,
    unit: fastmri.Unit,
    test_share: float,
    **_: object,
) -> DatasetInfo:
    """Known before anything is drawn."""
    require(slices > 0, "dataset.slices", slices, "must be at least 1")
    how = Undersampling(acceleration, center_fraction, height, width)
    drawn = [fastmri.announced(str(number), (slices, height, width)) for number in range(patients)]
    left = patients - _held(patients, test_share)
    splits = fastmri.as_splits(
        (drawn[:left], drawn[left:]), "synthetic", "", how=how, unit=unit, slices=slices
    )
    return fastmri.outlined(splits)
