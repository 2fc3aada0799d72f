"""NIfTI volumes, turned to RAS+ axes, with their spacing.

A file says in its affine which way each axis runs. Here the first axis always runs to the patient's
Right, the second to the Anterior, the third to the Superior side, so that `data[:, :, k]` is an
axial slice whatever scanner wrote the file. Turning is a permutation and flips of voxels: nothing
is interpolated.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zdp_bench.data.files import require_inside, try_each, visible_files
from zdp_bench.errors import UserError

MOST_VOXELS = 2**31  # a header that announces more is damaged, or an attack on the memory
# The decathlon's smallest task: volumes of one contrast, 28 MB
HIPPOCAMPI, N_HIPPOCAMPI = "Task04_Hippocampus/imagesTr", 260
# Counts up when a file that was accepted is refused, or is read as other voxels: caches and derived
# files go by it. Since 2, a .gz is held to its checksum.
READING = 2
BEST_RATIO = 1032  # of deflate: no .gz unpacks to more than so many times its size
LONGEST_REST = 2**26  # bytes behind the voxels that are still read, for the checksum after them
WHOLE = 1e-3  # how far a label may lie from a whole number, after the file's scaling


@dataclass(frozen=True)
class Header:
    """Shape of the turned volume [X, Y, Z] or [X, Y, Z, channels], and spacing (x, y, z) in mm."""

    shape: tuple[int, ...]
    spacing: tuple[float, float, float]


@dataclass(frozen=True)
class Volume:
    """A volume on RAS+ axes: data [X, Y, Z] or [X, Y, Z, channels], spacing (x, y, z) in mm."""

    data: np.ndarray
    spacing: tuple[float, float, float]


def paths_of(folder: Path) -> list[Path]:
    """List the NIfTI files in a folder, by name; none if there is no folder."""
    names = (".nii", ".nii.gz")
    found = visible_files(folder) if folder.is_dir() else []
    return [path for path in found if path.name.endswith(names)]


def find_volumes(folder: Path, dataset: str, channels: int | None = None) -> dict[Path, Header]:
    """Find every volume of a folder, by name, and read its header.

    Args:
        dataset: for the error's sentence.
        channels: how many each volume must have; None: it has three dimensions.

    Raises:
        UserError: there is no such folder, it holds something else, a volume is there twice, is a
            link that leads out, or has another shape.
    """
    if not folder.is_dir():
        raise UserError(
            f"dataset '{dataset}' expects NIfTI volumes (.nii, .nii.gz) in {folder}, which is no "
            "folder."
        )
    paths = visible_files(folder)
    if not paths:
        raise UserError(f"{folder}: holds no .nii or .nii.gz file.")
    first: dict[str, Path] = {}
    found = {}
    for path in paths:
        if not path.name.endswith((".nii", ".nii.gz")):
            raise UserError(
                f"{path}: is no .nii or .nii.gz; only NIfTI volumes belong in this folder."
            )
        if (other := first.setdefault(name_of(path), path)) != path:
            raise UserError(f"{path}: is the same volume as {other.name}; remove one of them.")
        require_inside(path, folder)
        found[path] = read_header(path)
        if (shape := found[path].shape)[3:] != ((channels,) if channels else ()):
            wanted = f"three dimensions and {channels} channels" if channels else "three dimensions"
            raise UserError(f"{path}: has shape {list(shape)} where {wanted} were expected.")
    return found


def check_files(
    folder: Path, dataset: str, channels: int | None = None
) -> Iterator[tuple[Path, str]]:
    """Read every volume of a folder; yield it and what is wrong with it, '' for nothing.

    Raises:
        UserError: see `find_volumes`.
    """
    return try_each(find_volumes(folder, dataset, channels), read)


def name_of(path: Path) -> str:
    """'hippocampus_001.nii.gz' -> 'hippocampus_001'."""
    return path.name.removesuffix(".gz").removesuffix(".nii")


def read_header(path: Path) -> Header:
    """Read what a file announces, without its voxels.

    Raises:
        UserError: see `read`.
    """
    return _header(_open(path))


def read(path: Path) -> Volume:
    """Read a volume of intensities, float32.

    Raises:
        UserError: missing, no NIfTI file, not 3 or 4 dimensions, no usable affine, cut off, or with
            entries that are no numbers.
    """
    image = _open(path)
    data = _voxels(image, path)
    if not np.isfinite(data).all():
        raise UserError(f"{path}: holds voxels that are no numbers.")
    return Volume(data, _header(image).spacing)


def read_labels(path: Path) -> Volume:
    """Read a segmentation, uint8; every voxel must be a whole number from 0 to 255.

    Raises:
        UserError: as `read`, or the voxels are no labels.
    """
    image = _open(path)
    data = _voxels(image, path)
    whole = np.round(data)
    if (
        not np.isfinite(data).all()
        or np.abs(data - whole).max() > WHOLE
        or whole.min() < 0
        or whole.max() > 255
    ):
        raise UserError(
            f"{path}: a segmentation holds whole numbers from 0 to 255, and this one holds others."
        )
    return Volume(whole.astype(np.uint8), _header(image).spacing)


def write(
    path: Path, data: np.ndarray, spacing: tuple[float, float, float], axes: str = "RAS"
) -> None:
    """Write a volume given on RAS+ axes, stored along `axes` such as LPS."""
    import nibabel
    from nibabel.orientations import axcodes2ornt, ornt_transform

    image = nibabel.Nifti1Image(data, np.diag([*spacing, 1.0]))
    nibabel.save(image.as_reoriented(ornt_transform(axcodes2ornt("RAS"), axcodes2ornt(axes))), path)


def _open(path: Path) -> Any:
    """Open nibabel's image, with axes as stored; voxels are still on disk."""
    import nibabel

    if not path.is_file():
        raise UserError(f"{path}: is missing; a NIfTI volume was expected there.")
    try:
        image = nibabel.load(path)
    except Exception as error:  # nibabel raises whatever its parsers trip over
        raise UserError(
            f"{path}: is no readable NIfTI file ({type(error).__name__}); it is damaged or "
            "something else."
        ) from None
    if not isinstance(image, nibabel.Nifti1Image | nibabel.Nifti2Image):
        raise UserError(f"{path}: is a {type(image).__name__}, and a NIfTI file was expected.")
    if len(image.shape) not in (3, 4) or min(image.shape) < 1:
        raise UserError(
            f"{path}: has shape {list(image.shape)} where three dimensions, or four with channels, "
            "were expected."
        )
    if math.prod(map(int, image.shape)) > MOST_VOXELS:
        raise UserError(
            f"{path}: announces {list(image.shape)} voxels, more than any volume of these sets has."
        )
    affine = np.asarray(image.affine)
    if not np.isfinite(affine).all() or abs(np.linalg.det(affine[:3, :3])) < 1e-9:
        raise UserError(
            f"{path}: its affine does not say how its axes lie, so left and right cannot be told."
        )
    return image


def _header(image: Any) -> Header:
    """Shape and spacing on RAS+ axes, both by the affine."""
    steps = np.sqrt((np.asarray(image.affine)[:3, :3] ** 2).sum(axis=0))
    stored = np.argsort(_orientation(image)[:, 0])  # the stored axis that becomes each of R, A, S
    x, y, z = (float(steps[axis]) for axis in stored)
    shape = tuple(int(image.shape[axis]) for axis in stored) + tuple(image.shape[3:])
    return Header(shape, (x, y, z))


def _orientation(image: Any) -> np.ndarray:
    """Return [3, 2]: for each stored axis, the RAS+ axis it becomes, and 1 or -1 for direction."""
    from nibabel.orientations import io_orientation

    return io_orientation(image.affine)


def _voxels(image: Any, path: Path) -> np.ndarray:
    """Read all voxels, float32 on RAS+ axes."""
    from nibabel.orientations import apply_orientation

    gzipped = path.name.endswith(".gz")
    announced = math.prod(map(int, image.shape)) * image.get_data_dtype().itemsize
    most = path.stat().st_size * (BEST_RATIO if gzipped else 1)
    if announced > most:
        raise UserError(
            f"{path}: its voxels cannot be read: the header announces {announced:,} bytes, and the "
            f"file has {'at most ' if gzipped else ''}{most:,}; it is cut off or damaged. Unpack "
            "it anew."
        )
    try:
        data = _unpack(image, path) if gzipped else np.asanyarray(image.dataobj)
    except (OSError, EOFError, ValueError, OverflowError, zlib.error) as error:
        raise UserError(
            f"{path}: its voxels cannot be read ({type(error).__name__}); the file is cut off or "
            "damaged. Unpack it anew."
        ) from None
    if data.dtype.kind not in "fiub":
        raise UserError(f"{path}: its voxels are {data.dtype}, not real numbers.")
    return np.ascontiguousarray(apply_orientation(data, _orientation(image)), dtype=np.float32)


def _unpack(image: Any, path: Path) -> np.ndarray:
    """Read the voxels of a .gz, as stored, and check its checksum.

    nibabel stops at the last voxel, before the checksum. Here the stream is read to its end, where
    gzip compares it: one decompression, and no more memory than the voxels need.

    Raises:
        OSError, EOFError, zlib.error: the stream is damaged or cut off.
    """
    from nibabel.fileholders import FileHolder

    with gzip.open(path) as stream:
        holder = FileHolder(fileobj=stream)
        data = np.asanyarray(type(image).from_file_map({"image": holder}).dataobj)
        rest = 0
        while part := stream.read(2**20):
            rest += len(part)
            if rest > LONGEST_REST:
                raise ValueError("it goes on behind the voxels")
    return data
