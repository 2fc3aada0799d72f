"""Read NIfTI, MHA and NRRD volumes (the latter two with `itk.py`) on RAS+ axes.

A file's affine states the direction of each axis. Here the first axis always runs to the patient's
Right, the second to the Anterior and the third to the Superior side, so `data[:, :, k]` is an axial
slice whatever scanner wrote the file. Reorienting only permutes and flips axes: nothing is
interpolated.
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

from zdp_bench.data import Dataset, DatasetInfo, Fraction, itk
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
MAX_VOXELS = 2**29  # 2,048 planes of 512 by 512: 2 GB as float32
# The default folder: the decathlon's smallest task, 28 MB of single-contrast volumes
HIPPOCAMPI = "Task04_Hippocampus/imagesTr"
NUM_HIPPOCAMPI = 260
# Increment when a file that was accepted is rejected, or is read as other voxels; part of the cache
# key and of derived folders' names. Since 2, the checksum of a .gz file is verified.
READING = 2
# Code of the unit of space in a NIfTI header -> its size in mm; others are taken to be mm.
MILLIMETRES = {1: 1000.0, 2: 1.0, 3: 0.001}  # m, mm, µm
MIN_VOLUME = 1e-6  # of a voxel, divided by the product of its sides: axes must not be parallel
MAX_DEFLATE_RATIO = 1032  # no .gz file unpacks to more than this times its size
MAX_TRAILING_BYTES = 2**26  # after the voxels; read to reach the checksum at the end
LABEL_TOLERANCE = 1e-3  # maximum distance of a label from an integer, after the file's scaling


@dataclass(frozen=True)
class Header:
    """What a file's header says about the volume on RAS+ axes.

    Attributes:
        shape: [X, Y, Z] or [X, Y, Z, channels].
        spacing: distance between neighbouring voxels along x, y and z, in mm.
        is_complex: True if voxels are complex numbers.
        affine: [4, 4], maps voxel indices to a position in mm.
    """

    shape: tuple[int, ...]
    spacing: tuple[float, float, float]
    is_complex: bool = False
    affine: tuple[tuple[float, ...], ...] = ()


def paths_of(folder: Path) -> list[Path]:
    """List the NIfTI files in a folder, sorted by name; empty if the folder is missing."""
    if not folder.is_dir():
        return []
    return [path for path in visible_files(folder) if path.name.endswith(SUFFIXES)]


def find_volumes(
    folder: Path,
    dataset: str,
    channels: int | None = None,
) -> dict[Path, Header]:
    """List the volumes in a folder, sorted by name, with their headers.

    Args:
        folder: contains NIfTI files only.
        dataset: name of the data set, whose card says where the files come from.
        channels: number of channels that each volume must have. Default: volumes have three
            dimensions.

    Raises:
        UserError: The folder is missing or empty, or contains another file, the same volume twice
            or a volume of another shape.
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
    """Base class of data sets computed from any folder of volumes.

    Args:
        folder: path of the folder under the data root.
        test_share: fraction of the volumes to test on.
        split_seed: seed that draws them.
    """

    name: ClassVar[str]

    folder: str = HIPPOCAMPI
    test_share: Fraction = 0.2
    split_seed: int = 0

    def find(self, root: Path) -> dict[Path, Header]:
        return find_volumes(resolve_folder(root, self.folder), self.name)

    def count_test(self, volumes: int) -> int:
        return count_held_out(volumes, self.test_share, "volumes")

    def describe(self, train: int, test: int) -> DatasetInfo:
        """Return counts and shapes, given the number of volumes in each part."""
        raise NotImplementedError

    def published_info(self, root: Path) -> DatasetInfo | None:
        """Describe the default folder if `folder` is missing or empty."""
        if holds_any(resolve_folder(root, self.folder)):
            return None
        test = self.count_test(NUM_HIPPOCAMPI)
        return self.describe(NUM_HIPPOCAMPI - test, test)


def name_of(path: Path) -> str:
    """Return a volume's name: 'hippocampus_001' for 'hippocampus_001.nii.gz'."""
    return path.name.removesuffix(".gz").removesuffix(".nii")


def read_header(path: Path) -> Header:
    """Read a file's header, without its voxels, and reorient it to RAS+ axes."""
    from nibabel.orientations import inv_ornt_aff

    with reading(path):
        image = _open(path)
        affine = _affine_in_mm(image)
        orientation = _orientation(image)
        spacing = np.sqrt((affine[:3, :3] ** 2).sum(axis=0))
        stored_axes = np.argsort(orientation[:, 0])  # the stored axes that become R, A and S
        x, y, z = spacing[stored_axes].tolist()
        sides = [int(image.shape[axis]) for axis in stored_axes]
        ras_affine = affine @ inv_ornt_aff(orientation, image.shape[:3])
        return Header(
            shape=(*sides, *image.shape[3:]),
            spacing=(x, y, z),
            is_complex=image.get_data_dtype().kind == "c",
            affine=tuple(map(tuple, ras_affine.tolist())),
        )


def require_same_place(
    path: Path,
    header: Header,
    image: Header,
) -> None:
    """Reject a mask or reference whose voxels are not where its image's voxels are.

    Both headers are on RAS+ axes, so files that store the same volume along different axes agree.
    Comparing the eight corners detects every shift, rotation, flip and scaling. Corners may differ
    by one voxel, because headers are rounded.

    Args:
        path: path of the mask, for the error.
        header: the mask's header.
        image: the image's header.

    Raises:
        UserError: Shapes, spacings or positions differ.
    """
    with reading(path):
        image_sides = list(image.shape[:3])
        mask_sides = list(header.shape[:3])
        expect(
            image_sides == mask_sides, f"has {mask_sides} voxels, but its image has {image_sides}"
        )
        is_close = np.allclose(header.spacing, image.spacing, rtol=1e-2)
        rule = f"has voxels of {header.spacing} mm, but its image's measure {image.spacing} mm"
        expect(is_close, rule)
        ends = [(0, side - 1) for side in image_sides]
        corners = np.array(list(itertools.product(*ends, [1])), dtype=float)
        image_affine = np.array(image.affine)
        shifts_in_mm = corners @ (np.array(header.affine) - image_affine).T  # [8, 4]
        shifts_in_voxels = shifts_in_mm @ np.linalg.inv(image_affine).T
        distance = np.linalg.norm(shifts_in_mm, axis=1).max()
        rule = f"lies {distance:.3g} mm beside its image, by the affines of both; align them"
        expect(np.abs(shifts_in_voxels).max() <= 1, rule)


def read(path: Path) -> np.ndarray:
    """Read a volume of intensities, float32 [X, Y, Z] or [X, Y, Z, channels] on RAS+ axes."""
    return _read_voxels(path, "fiub", np.float32)


def read_complex(path: Path) -> np.ndarray:
    """Read a volume of complex numbers: `read`, but complex64."""
    return _read_voxels(path, "c", np.complex64)


def read_mask_header(path: Path) -> Header:
    """Read a mask's header; reject several channels, such as one for each label."""
    header = read_header(path)
    with reading(path):
        rule = f"has shape {list(header.shape)}; a mask has three dimensions"
        expect(header.shape[3:] in ((), (1,)), rule)
    return header


def read_labels(path: Path) -> np.ndarray:
    """Read a segmentation as uint8; voxels must be integers from 0 to 255."""
    data = read(path)
    with reading(path):
        rule = "is a segmentation with values other than whole numbers from 0 to 255"
        expect(data.min() > -0.5 and data.max() < 255.5, rule)
        labels = np.round(data).astype(np.uint8)
        np.subtract(data, labels, out=data)  # in place, because volumes may be large
        expect(np.abs(data).max() <= LABEL_TOLERANCE, rule)
    return labels


def write(
    path: Path,
    data: np.ndarray,
    spacing: tuple[float, float, float],
    axes: str = "RAS",
) -> None:
    """Write a volume given on RAS+ axes, stored along other axes if `axes` says so, as "LPS"."""
    import nibabel
    from nibabel.orientations import axcodes2ornt, ornt_transform

    image = nibabel.Nifti1Image(data, np.diag([*spacing, 1.0]))
    reorientation = ornt_transform(axcodes2ornt("RAS"), axcodes2ornt(axes))
    nibabel.save(image.as_reoriented(reorientation), path)


def _open(path: Path) -> Any:
    """Open a file as nibabel's image, with axes as stored, without reading its voxels."""
    import nibabel

    image: Any = itk.open_image(path) if itk.is_itk(path) else nibabel.load(path)
    is_nifti = isinstance(image, nibabel.Nifti1Image | nibabel.Nifti2Image)
    expect(is_nifti, f"is a {type(image).__name__}, but a NIfTI file was expected")
    shape = [int(side) for side in image.shape]
    rule = f"has shape {shape} where three dimensions, or four with channels, were expected"
    expect(len(shape) in (3, 4) and min(shape) > 0, rule)
    rule = f"announces {shape} voxels, more than the {MAX_VOXELS:,} that are supported"
    expect(math.prod(shape) <= MAX_VOXELS, rule)
    longest, second, *_ = sorted(shape[:3], reverse=True)
    require_size(longest, second)
    axes = np.asarray(image.affine)[:3, :3]
    lengths = np.linalg.norm(axes, axis=0)
    is_finite = bool(np.isfinite(image.affine).all())
    # Relative to the size of a voxel, which depends on the unit.
    is_usable = is_finite and abs(np.linalg.det(axes)) > MIN_VOLUME * lengths.prod()
    expect(is_usable, "has no usable affine, so its orientation is unknown")
    return image


def _affine_in_mm(image: Any) -> np.ndarray:
    """Return the affine of an image with its positions in mm, whatever unit its header names."""
    unit = int(image.header["xyzt_units"]) & 0b111
    size = MILLIMETRES.get(unit, 1.0)
    return np.diag([size, size, size, 1.0]) @ np.asarray(image.affine)


def _orientation(image: Any) -> np.ndarray:
    """Return [3, 2]: for each stored axis, its RAS+ axis and, 1 or -1, its direction along it."""
    from nibabel.orientations import io_orientation

    return io_orientation(image.affine)


def _read_voxels(
    path: Path,
    kinds: str,
    dtype: type,
) -> np.ndarray:
    """Read all voxels on RAS+ axes, and check that they are finite.

    Args:
        kinds: the kinds of numbers to accept, as codes of `numpy.dtype.kind`.
        dtype: type of the result.
    """
    from nibabel.orientations import apply_orientation

    with reading(path):
        image = _open(path)
        is_compressed = _is_gzip(path)
        announced = math.prod(map(int, image.shape)) * image.get_data_dtype().itemsize
        max_bytes = path.stat().st_size
        if is_compressed or itk.is_itk(path):  # MHA and NRRD may be compressed too
            max_bytes *= MAX_DEFLATE_RATIO
        rule = (
            f"announces {announced:,} bytes of voxels, but has at most {max_bytes:,}; "
            "it is truncated"
        )
        expect(announced <= max_bytes, rule)
        data = _decompress(image, path) if is_compressed else np.asanyarray(image.dataobj)
        numbers = "complex" if kinds == "c" else "real"
        expect(data.dtype.kind in kinds, f"has voxels of {data.dtype}, not {numbers} numbers")
        reoriented = apply_orientation(data, _orientation(image))
        voxels: np.ndarray = np.ascontiguousarray(reoriented, dtype=dtype)
        expect(bool(np.isfinite(voxels).all()), "contains voxels that are not finite")
    return voxels


def _is_gzip(path: Path) -> bool:
    """Return True if a file is compressed, judged by its first bytes: X.NII.GZ is too."""
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


def _decompress(image: Any, path: Path) -> np.ndarray:
    """Read the voxels of a .gz file, as stored, and verify the file's checksum.

    nibabel stops at the last voxel, before the checksum. Reading the stream to its end makes gzip
    compare the checksum, without a second decompression and without more memory.
    """
    from nibabel.fileholders import FileHolder

    with gzip.open(path) as stream:
        holder = FileHolder(fileobj=stream)
        data = np.asanyarray(type(image).from_file_map({"image": holder}).dataobj)
        trailing_bytes = 0
        while part := stream.read(2**20):
            trailing_bytes += len(part)
            expect(trailing_bytes <= MAX_TRAILING_BYTES, "has data after its voxels")
    return data


# ---------------------------------------------------------------------------------- planes
# [n, Y, X] -> [n, size, size]. A plane's result never depends on other planes, so that no example
# depends on another.

Window = tuple[float, float] | None


def to_bytes(image: Tensor, window: Window) -> Tensor:
    """Scale intensities linearly to [0, 255], float, and clip them.

    Args:
        image: planes [n, Y, X], in the file's units.
        window: the intensities (low, high) that become 0 and 255. None: the 1st and 99th percentile
            of each plane.
    """
    if window:
        low, high = torch.tensor(window[0]), torch.tensor(window[1])
    else:
        low, high = _find_percentiles(image)
    # Only a plane of one intensity has no range: units may be small, such as m²/s.
    scaled = (image - low) / (high - low).clamp(min=torch.finfo(torch.float32).tiny)
    return scaled.clamp(0, 1) * 255


def _find_percentiles(image: Tensor) -> Tensor:
    """Return the 1st and 99th percentile of each plane [n, Y, X]: [2, n, 1, 1].

    They are interpolated as by `torch.quantile`, which accepts at most 2²⁴ elements.
    """
    ordered = image.flatten(1).sort(dim=1).values
    position = torch.tensor([0.01, 0.99]) * (ordered.shape[1] - 1)
    below = ordered[:, position.floor().long()]
    above = ordered[:, position.ceil().long()]
    return torch.lerp(below, above, position - position.floor()).T[:, :, None, None]


def fit_planes(
    planes: Tensor,
    size: int,
    fit: str,
    window: Window,
) -> Tensor:
    """Convert planes [n, Y, X] to bytes [n, size, size].

    Args:
        window: see `to_bytes`.
        fit: "crop" cuts out the largest centre square first; otherwise planes are stretched.
    """
    grey = to_bytes(planes, window)
    if fit == "crop":
        grey = crop_square(grey)
    return resample(grey, (size, size)).round().clamp(0, 255).to(torch.uint8)


def fit_complex(
    planes: Tensor,
    size: int,
    fit: str,
) -> Tensor:
    """Resample complex planes to [n, size, size]; the modulus of each gets standard deviation 1.

    Args:
        fit: see `fit_planes`.
    """
    if fit == "crop":
        planes = crop_square(planes)
    real = resample(planes.real, (size, size))
    imag = resample(planes.imag, (size, size))
    square = torch.complex(real, imag)
    deviation = square.abs().flatten(1).std(dim=1)[:, None, None]
    return square / (deviation + 1e-11)


def turn_planes(data: np.ndarray) -> Tensor:
    """Transpose voxels [X, Y, Z, ...] to planes [Z, ..., Y, X], rows from anterior to posterior."""
    planes = data[:, ::-1].transpose(2, *range(3, data.ndim), 1, 0)
    return torch.from_numpy(np.ascontiguousarray(planes))


def resample(image: Tensor, target: tuple[int, int]) -> Tensor:
    """Resample planes [n, Y, X] to (rows, columns), bilinearly with antialiasing."""
    return F.interpolate(image.unsqueeze(1), target, mode="bilinear", antialias=True).squeeze(1)


def resample_mask(mask: Tensor, target: tuple[int, int]) -> Tensor:
    """Resample masks [n, Y, X] to (rows, columns), each pixel from the nearest one."""
    return F.interpolate(mask.unsqueeze(1), target, mode="nearest-exact").squeeze(1)


def crop_square(image: Tensor) -> Tensor:
    """Crop the largest centre square of each plane."""
    rows, columns = image.shape[-2:]
    side = min(rows, columns)
    top = (rows - side) // 2
    left = (columns - side) // 2
    return image[..., top : top + side, left : left + side]
