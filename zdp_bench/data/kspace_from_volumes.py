"""Single-coil k-space made from real anatomy: any folder of NIfTI magnitude volumes, for who may not have fastMRI.

A slice's magnitude is given a smooth phase and Fourier transformed at its native size; no noise is added, no voxel is resampled.
The phase is a polynomial of second order over the slice, fixed by the volume's name, as coil and field inhomogeneity make one.
What is made is written once in fastMRI's layout, and read by its adapter. Nobody can say what phase the scanner had, and the
scanner's own filters and interpolation are in the magnitudes: numbers from here are 'derived', never fastMRI's.

A volume is the unit whose ε is stated; who owns two of them (Task04, see `msd.py`) has a larger one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from zdp_bench.data import DatasetInfo, Splits, fastmri
from zdp_bench.data.files import holds_any, made_whole, sha256, within
from zdp_bench.data.formats.kspace import Undersampling, to_kspace
from zdp_bench.data.formats.nifti import HIPPOCAMPI, READING, inspected, name_of, read, volumes
from zdp_bench.errors import require
from zdp_bench.registry import register

AXES = "must be 0, 1 or 2: the axis that slices are counted along"


def smooth_phase(rows: int, columns: int, random: np.random.Generator) -> np.ndarray:
    """[rows, columns] in radians: Σ a_ij·y^i·x^j, i + j ≤ 2, y and x from -1 to 1, the a_ij uniform in ±π/2."""
    y, x = np.meshgrid(np.linspace(-1, 1, rows), np.linspace(-1, 1, columns), indexing="ij")
    terms = np.stack([y**i * x**j for i in range(3) for j in range(3 - i)])  # [6, rows, columns]
    return np.tensordot(random.uniform(-np.pi / 2, np.pi / 2, len(terms)), terms, axes=1)


def write_set(folder: Path, paths: list[Path], axis: int, testing: np.ndarray) -> None:
    """Every volume in fastMRI's layout, on its side of the split; whole or not at all."""
    with made_whole(folder) as partial:
        for side in fastmri.FOLDERS:
            (partial / side).mkdir()
        for path, held in zip(paths, testing, strict=True):
            name = name_of(path)
            image = np.moveaxis(read(path).data, axis, 0)  # [slices, rows, columns]
            random = np.random.default_rng([ord(letter) for letter in name])
            kspace = to_kspace(
                image * np.exp(1j * smooth_phase(image.shape[1], image.shape[2], random))
            )
            fastmri.write(
                partial / fastmri.FOLDERS[int(held)] / f"{name}.h5",
                kspace,
                np.abs(image),
                name,
                "derived",
            )


def held_out(count: int, test_share: float, seed: int) -> np.ndarray:
    """True for the volumes to test on.

    Raises:
        UserError: the share leaves none on one side.
    """
    held = round(test_share * count)
    left = count - held
    require(
        held > 0 < left,
        "dataset.test_share",
        test_share,
        f"leaves {left} volumes to train on, {held} to test on",
    )
    testing = np.zeros(count, dtype=bool)
    testing[np.random.default_rng(seed).choice(count, held, replace=False)] = True
    return testing


@register("dataset", "kspace_from_volumes")
def kspace_from_volumes(
    root: Path,
    *,
    folder: str = HIPPOCAMPI,
    axis: int = 2,
    acceleration: float = 4.0,
    center_fraction: float = 0.08,
    height: int = 32,
    width: int = 40,
    slices: int | None = 3,
    unit: fastmri.Unit = "slice",
    test_share: float = 0.2,
    split_seed: int = 0,
) -> Splits:
    """k-space of the volumes in `folder` of the data root: complex64 [1, height, width]."""
    require(axis in (0, 1, 2), "dataset.axis", axis, AXES)
    how = Undersampling(acceleration, center_fraction, height, width)
    paths = list(volumes(within(root, folder), "kspace_from_volumes"))
    testing = held_out(len(paths), test_share, split_seed)
    files = [
        (path.name, sha256(path), bool(test)) for path, test in zip(paths, testing, strict=True)
    ]
    made = (
        root
        / "derived"
        / f"kspace-{READING}-{hashlib.sha256(repr((files, axis)).encode()).hexdigest()[:16]}"
    )
    if not made.is_dir():
        write_set(made, paths, axis, testing)
    notes = f"k-space of the volumes in {folder} with a smooth phase added, no noise"
    return replace(
        fastmri.as_splits(fastmri.scan(made), "derived", notes, how=how, unit=unit, slices=slices),
        unit="volume",
    )


@register("outline", "kspace_from_volumes")
def outline(
    root: Path,
    *,
    folder: str,
    axis: int,
    acceleration: float,
    center_fraction: float,
    height: int,
    width: int,
    slices: int | None,
    unit: fastmri.Unit,
    test_share: float,
    split_seed: int,
) -> DatasetInfo:
    """From the volumes' headers; without volumes, as many as the default folder of the release has."""
    require(axis in (0, 1, 2), "dataset.axis", axis, AXES)
    how = Undersampling(acceleration, center_fraction, height, width)
    found = holds_any(within(root, folder))
    known: list[fastmri.Volume] = []
    if found:
        for path, header in volumes(root / folder, "kspace_from_volumes").items():
            rest = [size for number, size in enumerate(header.shape) if number != axis]
            known.append(fastmri.announced(name_of(path), (header.shape[axis], rest[0], rest[1])))
    else:
        known = [
            fastmri.announced(str(number), (slices or 36, height, width)) for number in range(260)
        ]
    testing = held_out(len(known), test_share, split_seed)
    train, test = (
        [one for one, held in zip(known, testing, strict=True) if held == side]
        for side in (False, True)
    )
    splits = fastmri.as_splits((train, test), "derived", "", how=how, unit=unit, slices=slices)
    return replace(fastmri.outlined(splits, found), unit="volume")


@register("check", "kspace_from_volumes")
def check(root: Path) -> Iterator[tuple[Path, str]]:
    """Every volume of the default folder, and what is wrong with it."""
    return inspected(root / HIPPOCAMPI, "kspace_from_volumes")
