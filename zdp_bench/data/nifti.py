"""NIfTI volumes: read whole or header only, turned to RAS+ axes, with their spacing; everything broken is refused by name.

A file says in its affine which way each axis runs. Here the first axis always runs to the patient's Right, the second to the
Anterior, the third to the Superior side, so that `data[:, :, k]` is an axial slice whatever scanner wrote the file. Turning is
a permutation and flips of voxels: nothing is interpolated.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zdp_bench.errors import UserError

MOST_VOXELS = 2**31  # a header that announces more is damaged, or an attack on the memory
WHOLE = 1e-3  # how far a label may lie from a whole number, after the file's scaling


@dataclass(frozen=True)
class Header:
    """What a file announces: shape of the turned volume [X, Y, Z] or [X, Y, Z, channels], and spacing (x, y, z) in mm."""

    shape: tuple[int, ...]
    spacing: tuple[float, float, float]


@dataclass(frozen=True)
class Volume:
    """A volume on RAS+ axes: data [X, Y, Z] or [X, Y, Z, channels], spacing (x, y, z) in mm."""

    data: np.ndarray
    spacing: tuple[float, float, float]


def paths_of(folder: Path) -> list[Path]:
    """The NIfTI files directly in a folder, by name; the `._` files that macOS leaves in archives are none."""
    return sorted(p for p in folder.glob("*.nii*") if not p.name.startswith(".") and p.name.endswith((".nii", ".nii.gz")))


def name_of(path: Path) -> str:
    """'hippocampus_001.nii.gz' -> 'hippocampus_001'."""
    return path.name.removesuffix(".gz").removesuffix(".nii")


def read_header(path: Path) -> Header:
    """What a file announces; its voxels are not read.

    Raises:
        UserError: see `read`.
    """
    image = _open(path)
    return Header(tuple(image.shape), _spacing(image))


def read(path: Path) -> Volume:
    """A volume of intensities, float32.

    Raises:
        UserError: missing, no NIfTI file, not 3 or 4 dimensions, no usable affine, cut off, or with entries that are no numbers.
    """
    image = _open(path)
    data = _voxels(image, path)
    if not np.isfinite(data).all():
        raise UserError(f"{path}: holds voxels that are no numbers.")
    return Volume(data, _spacing(image))


def read_labels(path: Path) -> Volume:
    """A segmentation, uint8; every voxel must be a whole number from 0 to 255.

    Raises:
        UserError: as `read`, or the voxels are no labels.
    """
    image = _open(path)
    data = _voxels(image, path)
    whole = np.round(data)
    if not np.isfinite(data).all() or np.abs(data - whole).max() > WHOLE or whole.min() < 0 or whole.max() > 255:
        raise UserError(f"{path}: a segmentation holds whole numbers from 0 to 255, and this one holds others.")
    return Volume(whole.astype(np.uint8), _spacing(image))


def write(path: Path, data: np.ndarray, spacing: tuple[float, float, float]) -> None:
    """Write a volume on RAS+ axes; what the synthetic sets are made with."""
    import nibabel

    nibabel.save(nibabel.Nifti1Image(data, np.diag([*spacing, 1.0])), path)


def _open(path: Path) -> Any:
    """nibabel's image on RAS+ axes; voxels are still on disk."""
    import nibabel

    if not path.is_file():
        raise UserError(f"{path}: is missing; a NIfTI volume was expected there.")
    try:
        image = nibabel.load(path)
    except Exception as error:  # nibabel raises whatever its parsers trip over
        raise UserError(f"{path}: is no readable NIfTI file ({type(error).__name__}); it is damaged or something else.") from None
    if not isinstance(image, nibabel.Nifti1Image | nibabel.Nifti2Image):
        raise UserError(f"{path}: is a {type(image).__name__}, and a NIfTI file was expected.")
    if len(image.shape) not in (3, 4) or 0 in image.shape:
        raise UserError(f"{path}: has shape {list(image.shape)} where three dimensions, or four with channels, were expected.")
    if int(np.prod(image.shape, dtype=np.int64)) > MOST_VOXELS:
        raise UserError(f"{path}: announces {list(image.shape)} voxels, more than any volume of these sets has.")
    affine = np.asarray(image.affine)
    if not np.isfinite(affine).all() or abs(np.linalg.det(affine[:3, :3])) < 1e-9:
        raise UserError(f"{path}: its affine does not say how its axes lie, so left and right cannot be told.")
    return nibabel.as_closest_canonical(image)


def _voxels(image: Any, path: Path) -> np.ndarray:
    try:
        data = np.asanyarray(image.dataobj)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise UserError(f"{path}: its voxels cannot be read ({type(error).__name__}); the file is cut off or damaged.") from None
    if data.dtype.kind not in "fiub":
        raise UserError(f"{path}: its voxels are {data.dtype}, not real numbers.")
    return np.ascontiguousarray(data, dtype=np.float32)


def _spacing(image: Any) -> tuple[float, float, float]:
    """Lengths of a step along each axis, in mm, from the affine: it is what the orientation was read from."""
    x, y, z = np.sqrt((np.asarray(image.affine)[:3, :3] ** 2).sum(axis=0))
    return float(x), float(y), float(z)
