"""NIfTI volumes, and MHA and NRRD (`itk.py`), turned to RAS+ axes, with their spacing.

A file says in its affine which way each axis runs. Here the first axis always runs to the patient's
Right, the second to the Anterior, the third to the Superior side, so that `data[:, :, k]` is an
axial slice whatever scanner wrote the file. Turning is a permutation and flips of voxels: nothing
is interpolated.
"""

from __future__ import annotations

import gzip
import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from zdp_bench.data import Dataset, DatasetInfo, itk
from zdp_bench.data.files import (
    absent,
    count_held_out,
    holds_any,
    list_files,
    require_distinct,
    resolve_folder,
    visible_files,
)
from zdp_bench.errors import UserError
from zdp_bench.foreign_files import expect, reading, require_size

SUFFIXES = (".nii", ".nii.gz")
MOST_VOXELS = 2**29  # 2,048 planes of 512 by 512, as float32 2 GB
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
    """Shape of the turned volume [X, Y, Z] or [X, Y, Z, channels], and spacing (x, y, z) in mm.

    Attributes:
        affine: [4, 4], from a voxel of the turned volume to its place in mm.
    """

    shape: tuple[int, ...]
    spacing: tuple[float, float, float]
    is_complex: bool = False
    affine: tuple[tuple[float, ...], ...] = ()


def paths_of(folder: Path) -> list[Path]:
    """List the NIfTI files in a folder, by name; empty without the folder."""
    if not folder.is_dir():
        return []
    return [path for path in visible_files(folder) if path.name.endswith(SUFFIXES)]


def find_volumes(
    folder: Path,
    dataset: str,
    channels: int | None = None,
) -> dict[Path, Header]:
    """Find every volume of a folder, by name, and read its header.

    Args:
        dataset: whose card says where they come from.
        channels: how many each volume must have; None: it has three dimensions.
    """
    if not folder.is_dir():
        raise absent(folder, dataset)
    paths = list_files(
        folder,
        folder,
        lambda path: path.name.endswith(SUFFIXES),
        "is not a .nii or .nii.gz file; only those belong here",
    )
    if not paths:
        raise UserError(f"{folder}: contains no .nii or .nii.gz file.")
    require_distinct(paths, name_of, "volume")
    volumes = {}
    for path in paths:
        header = read_header(path)
        expected = (channels,) if channels else ()
        rule = (
            f"has shape {list(header.shape)} where three dimensions and {channels or 'no'} "
            "channels were expected"
        )
        with reading(path):
            expect(header.shape[3:] == expected, rule)
        volumes[path] = header
    return volumes


@dataclass(frozen=True, kw_only=True)
class OfVolumes(Dataset):
    """A data set that is made of the volumes in `folder` of the data root."""

    name: ClassVar[str]

    folder: str = HIPPOCAMPI
    test_share: float = 0.2
    split_seed: int = 0

    def find(self, root: Path) -> dict[Path, Header]:
        return find_volumes(resolve_folder(root, self.folder), self.name)

    def count_test(self, volumes: int) -> int:
        return count_held_out(volumes, self.test_share, "volumes")

    def describe(self, train: int, test: int) -> DatasetInfo:
        """Return counts and shapes of so many volumes."""
        raise NotImplementedError

    def released(self, root: Path) -> DatasetInfo | None:
        """As many volumes as the default folder has."""
        if holds_any(resolve_folder(root, self.folder)):
            return None
        held = self.count_test(N_HIPPOCAMPI)
        return self.describe(N_HIPPOCAMPI - held, held)


def name_of(path: Path) -> str:
    """'hippocampus_001.nii.gz' -> 'hippocampus_001'."""
    return path.name.removesuffix(".gz").removesuffix(".nii")


def read_header(path: Path) -> Header:
    """Read what a file announces, without its voxels; shape and spacing are by the affine."""
    from nibabel.orientations import inv_ornt_aff

    with reading(path):
        image = _open(path)
        affine = np.asarray(image.affine)
        orientation = _orientation(image)
        steps = np.sqrt((affine[:3, :3] ** 2).sum(axis=0))
        stored = np.argsort(orientation[:, 0])  # the stored axis that becomes each of R, A, S
        x, y, z = steps[stored].tolist()
        sides = [int(image.shape[axis]) for axis in stored]
        turned = affine @ inv_ornt_aff(orientation, image.shape[:3])
        return Header(
            shape=(*sides, *image.shape[3:]),
            spacing=(x, y, z),
            is_complex=image.get_data_dtype().kind == "c",
            affine=tuple(map(tuple, turned.tolist())),
        )


def require_same_place(
    path: Path,
    header: Header,
    image: Header,
) -> None:
    """Reject a mask or reference whose voxels do not lie where its image's do.

    Both are compared as they are read, on RAS+ axes: a file that is only stored along other axes
    passes. Eight corners tell of every shift, rotation, flip and scaling; a voxel's size is allowed
    for the rounding of headers.

    Args:
        path: the mask's, for the error.

    Raises:
        UserError: names what differs.
    """
    with reading(path):
        voxels = list(image.shape[:3])
        own_voxels = list(header.shape[:3])
        expect(voxels == own_voxels, f"has {own_voxels} voxels, but its image has {voxels}")
        is_close = np.allclose(header.spacing, image.spacing, rtol=1e-2)
        rule = f"has voxels of {header.spacing} mm, but its image's measure {image.spacing} mm"
        expect(is_close, rule)
        ends = [(0, side - 1) for side in voxels]
        corners = np.array(list(itertools.product(*ends, [1])), dtype=float)
        image_affine = np.array(image.affine)
        shifts = corners @ (np.array(header.affine) - image_affine).T  # in mm, [8, 4]
        steps = shifts @ np.linalg.inv(image_affine).T  # in voxels
        distance = np.linalg.norm(shifts, axis=1).max()
        rule = f"lies {distance:.3g} mm beside its image, by the affines of both; align them"
        expect(np.abs(steps).max() <= 1, rule)


def read(path: Path) -> np.ndarray:
    """Read a volume of intensities, float32 [X, Y, Z] or [X, Y, Z, channels] on RAS+ axes."""
    return _read_voxels(path, "fiub", np.float32)


def read_complex(path: Path) -> np.ndarray:
    """Read a volume of complex intensities in the same way, as complex64."""
    return _read_voxels(path, "c", np.complex64)


def read_labels(path: Path) -> np.ndarray:
    """Read a segmentation, uint8; every voxel must be a whole number from 0 to 255."""
    data = read(path)
    with reading(path):
        rule = "is a segmentation with values other than whole numbers from 0 to 255"
        expect(data.min() > -0.5 and data.max() < 255.5, rule)
        labels = np.round(data).astype(np.uint8)
        np.subtract(data, labels, out=data)  # in place: a volume may fill the memory
        expect(np.abs(data).max() <= WHOLE, rule)
    return labels


def write(
    path: Path,
    data: np.ndarray,
    spacing: tuple[float, float, float],
    axes: str = "RAS",
) -> None:
    """Write a volume given on RAS+ axes, stored along `axes` such as LPS."""
    import nibabel
    from nibabel.orientations import axcodes2ornt, ornt_transform

    image = nibabel.Nifti1Image(data, np.diag([*spacing, 1.0]))
    turn = ornt_transform(axcodes2ornt("RAS"), axcodes2ornt(axes))
    nibabel.save(image.as_reoriented(turn), path)


def _open(path: Path) -> Any:
    """Open nibabel's image, with axes as stored; voxels are still on disk."""
    import nibabel

    image: Any = itk.open_image(path) if itk.is_itk(path) else nibabel.load(path)
    is_nifti = isinstance(image, nibabel.Nifti1Image | nibabel.Nifti2Image)
    expect(is_nifti, f"is a {type(image).__name__}, and a NIfTI file was expected")
    shape = [int(side) for side in image.shape]
    rule = f"has shape {shape} where three dimensions, or four with channels, were expected"
    expect(len(shape) in (3, 4) and min(shape) > 0, rule)
    rule = f"announces {shape} voxels, more than any volume of these sets has"
    expect(math.prod(shape) <= MOST_VOXELS, rule)
    longest, second, *_ = sorted(shape[:3], reverse=True)
    require_size(longest, second)
    affine = np.asarray(image.affine)
    is_finite = bool(np.isfinite(affine).all())
    is_usable = is_finite and abs(np.linalg.det(affine[:3, :3])) >= 1e-9
    expect(is_usable, "has no usable affine, so its orientation is unknown")
    return image


def _orientation(image: Any) -> np.ndarray:
    """Return [3, 2]: for each stored axis, the RAS+ axis it becomes, and 1 or -1 for direction."""
    from nibabel.orientations import io_orientation

    return io_orientation(image.affine)


def _read_voxels(
    path: Path,
    kinds: str,
    dtype: type,
) -> np.ndarray:
    """Read all voxels on RAS+ axes, of one of numpy's `kinds` of numbers and finite."""
    from nibabel.orientations import apply_orientation

    with reading(path):
        image = _open(path)
        is_packed = path.name.endswith(".gz")
        announced = math.prod(map(int, image.shape)) * image.get_data_dtype().itemsize
        may_be_packed = is_packed or itk.is_itk(path)
        most = path.stat().st_size * (BEST_RATIO if may_be_packed else 1)
        rule = f"announces {announced:,} bytes of voxels, and has at most {most:,}; it is truncated"
        expect(announced <= most, rule)
        data = _unpack(image, path) if is_packed else np.asanyarray(image.dataobj)
        numbers = "complex" if kinds == "c" else "real"
        expect(data.dtype.kind in kinds, f"has voxels of {data.dtype}, not {numbers} numbers")
        turned = apply_orientation(data, _orientation(image))
        voxels: np.ndarray = np.ascontiguousarray(turned, dtype=dtype)
        expect(bool(np.isfinite(voxels).all()), "contains voxels that are not finite")
    return voxels


def _unpack(image: Any, path: Path) -> np.ndarray:
    """Read the voxels of a .gz, as stored, and check its checksum.

    nibabel stops at the last voxel, before the checksum. Here the stream is read to its end, where
    gzip compares it: one decompression, and no more memory than the voxels need.
    """
    from nibabel.fileholders import FileHolder

    with gzip.open(path) as stream:
        holder = FileHolder(fileobj=stream)
        data = np.asanyarray(type(image).from_file_map({"image": holder}).dataobj)
        rest = 0
        while part := stream.read(2**20):
            rest += len(part)
            expect(rest <= LONGEST_REST, "has data after its voxels")
    return data


# ---------------------------------------------------------------------------------- planes
# Each plane becomes bytes by itself alone, never by others: [n, Y, X] -> [n, size, size].

Window = tuple[float, float] | None


def to_bytes(image: Tensor, window: Window) -> Tensor:
    """Map [n, Y, X] in the file's units to 0 to 255.

    Args:
        window: (low, high); None: each plane's own 1st and 99th percentile.
    """
    if window:
        low, high = torch.tensor(window[0]), torch.tensor(window[1])
    else:
        low, high = _find_percentiles(image)
    share = (image - low) / (high - low).clamp(min=1e-6)
    return share.clamp(0, 1) * 255


def _find_percentiles(image: Tensor) -> Tensor:
    """Return the 1st and 99th percentile of each plane [n, Y, X]: [2, n, 1, 1].

    As torch.quantile, which refuses more than 2²⁴ pixels.
    """
    ordered = image.flatten(1).sort(dim=1).values
    place = torch.tensor([0.01, 0.99]) * (ordered.shape[1] - 1)
    below = ordered[:, place.floor().long()]
    above = ordered[:, place.ceil().long()]
    return torch.lerp(below, above, place - place.floor()).T[:, :, None, None]


def fit_planes(
    planes: Tensor,
    size: int,
    fit: str,
    window: Window,
) -> Tensor:
    """Turn planes into bytes between the window's ends, in a square of `size`."""
    grey = to_bytes(planes, window)
    if fit == "crop":
        grey = crop_square(grey)
    return resample(grey, (size, size)).round().clamp(0, 255).to(torch.uint8)


def fit_complex(
    planes: Tensor,
    size: int,
    fit: str,
) -> Tensor:
    """Bring complex planes into a square, in units of their own modulus' standard deviation."""
    if fit == "crop":
        planes = crop_square(planes)
    real = resample(planes.real, (size, size))
    imag = resample(planes.imag, (size, size))
    square = torch.complex(real, imag)
    deviation = square.abs().flatten(1).std(dim=1)[:, None, None]
    return square / (deviation + 1e-11)


def turn_planes(data: np.ndarray) -> Tensor:
    """Turn voxels [X, Y, Z, ...] into planes [Z, ..., Y, X], rows from anterior to posterior."""
    planes = data[:, ::-1].transpose(2, *range(3, data.ndim), 1, 0)
    return torch.from_numpy(np.ascontiguousarray(planes))


def resample(image: Tensor, target: tuple[int, int]) -> Tensor:
    """Resample planes to (rows, columns), bilinearly, without aliasing."""
    return F.interpolate(image.unsqueeze(1), target, mode="bilinear", antialias=True).squeeze(1)


def resample_mask(mask: Tensor, target: tuple[int, int]) -> Tensor:
    """Resample masks to (rows, columns) by the nearest pixel."""
    return F.interpolate(mask.unsqueeze(1), target, mode="nearest-exact").squeeze(1)


def crop_square(image: Tensor) -> Tensor:
    """Cut the largest square out of the middle of each plane."""
    rows, columns = image.shape[-2:]
    side = min(rows, columns)
    top = (rows - side) // 2
    left = (columns - side) // 2
    return image[..., top : top + side, left : left + side]
