"""fastMRI's single-coil HDF5 files (Zbontar et al. 2018): inspect, read and write them.

Each file is one volume:
    kspace                complex64 [slices, rows, columns]
    reconstruction_esc    float32 [slices, height, width]: the fully sampled magnitude
    ismrmrd_header        XML
    attributes            acquisition, max, norm, patient_id
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zdp_bench.data.files import require_inside, visible_files
from zdp_bench.errors import UserError

FOLDERS = ("singlecoil_train", "singlecoil_val")
LARGEST = 4096  # slices, rows or columns; the release has up to 50, 768 and 416
CHUNK = 2**28  # bytes; HDF5 unpacks a whole chunk for one slice, and a few kilobytes may hold it


@dataclass(frozen=True)
class Volume:
    """One file, known but not read.

    Attributes:
        shape: slices, rows, columns of k-space.
        image: height, width of the reconstruction.
    """

    path: Path
    shape: tuple[int, int, int]
    image: tuple[int, int]
    patient: str

    @classmethod
    def announce(cls, name: str, shape: tuple[int, int, int]) -> Volume:
        """A volume without a file yet, whose k-space will have the size of its image."""
        return cls(Path(name), shape, shape[1:], name)


Sides = tuple[list[Volume], list[Volume]]  # to train on, to test on


def find_volumes(root: Path) -> Sides:
    """Find and inspect the volumes to train on and to test on.

    Raises:
        UserError: a folder or file is not what it should be, or a volume is on both sides.
    """
    train, test = ([inspect(path, root) for path in list_files(root, side)] for side in FOLDERS)
    if twice := {volume.path.name for volume in train} & {volume.path.name for volume in test}:
        raise UserError(
            f"{root}: {sorted(twice)[0]} stands in both {FOLDERS[0]} and {FOLDERS[1]}; a test "
            "volume must be unseen."
        )
    return train, test


def list_files(root: Path, folder: str) -> list[Path]:
    """List the files of one folder, by name.

    Raises:
        UserError: the folder is missing or empty, or holds something else.
    """
    here = root / folder
    if not here.is_dir():
        raise UserError(
            f"{here} is missing. fastMRI is free but not to be passed on: sign up for it (see "
            f"datasets/fastmri.yaml) and unpack {', '.join(FOLDERS)} under {root}, or use "
            "dataset=kspace_from_volumes or dataset=kspace_phantom."
        )
    paths = visible_files(here)
    if others := [path for path in paths if path.suffix != ".h5"]:
        raise UserError(f"{others[0]}: is no .h5 file; only fastMRI's HDF5 files belong here.")
    if not paths:
        raise UserError(f"{here}: holds no .h5 file.")
    return paths


def inspect(path: Path, root: Path) -> Volume:
    """Check one file without reading its arrays.

    Raises:
        UserError: it has not the format described above.
    """
    import h5py

    require_inside(path, root)
    if not path.is_file():
        raise UserError(f"{path}: is not a file; an HDF5 file was expected.")
    try:
        with h5py.File(path, "r") as file:
            for name in ("kspace", "reconstruction_esc", "ismrmrd_header"):
                _require_own_bytes(file, name, path)
            kspace, image = file["kspace"], file["reconstruction_esc"]
            header = file["ismrmrd_header"]
            if kspace.dtype.kind != "c":
                raise UserError(
                    f"{path}: its kspace is {kspace.dtype} where complex numbers were expected."
                )
            if image.dtype.kind != "f":
                raise UserError(
                    f"{path}: its reconstruction_esc is {image.dtype} where real numbers were "
                    "expected."
                )
            if kspace.ndim != 3 or image.ndim != 3 or len(kspace) != len(image):
                raise UserError(
                    f"{path}: its kspace {kspace.shape} and reconstruction_esc {image.shape} are "
                    "not [slices, rows, columns] of the same slices; multi-coil files are not read."
                )
            if 0 in (*kspace.shape, *image.shape):
                raise UserError(
                    f"{path}: its kspace {kspace.shape} or reconstruction_esc {image.shape} is "
                    "empty."
                )
            if max(*kspace.shape, *image.shape) > LARGEST:
                raise UserError(
                    f"{path}: announces kspace {kspace.shape} and reconstruction_esc "
                    f"{image.shape}; no side may exceed {LARGEST:,}."
                )
            if image.shape[1] > kspace.shape[1] or image.shape[2] > kspace.shape[2]:
                raise UserError(
                    f"{path}: its reconstruction {image.shape[1:]} is larger than its k-space "
                    f"{kspace.shape[1:]}."
                )
            if header.shape != () or header.dtype.kind not in "SO":
                raise UserError(f"{path}: its ismrmrd_header is no single piece of text.")
            patient = str(file.attrs.get("patient_id", path.stem))
            return Volume(path, kspace.shape, image.shape[1:], patient)
    except (OSError, RuntimeError, KeyError, ValueError, TypeError) as error:
        raise UserError(
            f"{path}: is no whole HDF5 file; it is cut off, damaged or something else "
            f"({_why(error)})."
        ) from None


def _require_own_bytes(file: Any, name: str, path: Path) -> None:
    """Refuse a data set of an open HDF5 file that is missing, or whose bytes are elsewhere.

    HDF5 can point to any file of the machine, which the digest would not follow.

    Raises:
        UserError: it is missing, a link, virtual, stored externally, or in huge chunks.
    """
    import h5py

    link = file.get(name, getlink=True)
    if link is None:
        raise UserError(
            f"{path}: has no data set '{name}'; fastMRI's single-coil files of train and val have "
            "it."
        )
    found = file[name] if isinstance(link, h5py.HardLink) else None
    if not isinstance(found, h5py.Dataset):
        raise UserError(
            f"{path}: its '{name}' is a link or a group, where a data set was expected; write the "
            "data into the file itself."
        )
    if found.is_virtual or found.external:
        kind = "a virtual data set" if found.is_virtual else "stored externally"
        raise UserError(
            f"{path}: its '{name}' is {kind}, so its bytes are in other files; write them into the "
            "file itself."
        )
    size = math.prod(found.chunks or ()) * found.dtype.itemsize
    if size > CHUNK:
        raise UserError(
            f"{path}: its '{name}' is stored in chunks of {size:,} bytes, of which each slice "
            "unpacks one; write it slice by slice (chunks=(1, rows, columns))."
        )


def _why(error: Exception) -> str:
    """HDF5's own words, without its addresses."""
    inside = re.search(r"\((.*)\)", str(error).replace("\n", " "))
    words = inside[1] if inside else type(error).__name__
    return re.sub(r",? ?(base_addr|stored_eof|eof|sblock->)[^,)]*", "", words)


def read_slices(volume: Volume, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Read some slices of a volume.

    Returns:
        k-space, complex64 [count, rows, columns]; reconstruction, float32 [count, height, width].

    Raises:
        UserError: they cannot be read, or hold what is no number.
    """
    import h5py

    try:
        with h5py.File(volume.path, "r") as file:
            kspace = np.asarray(file["kspace"][first : first + count], dtype=np.complex64)
            images = file["reconstruction_esc"][first : first + count]
            reference = np.asarray(images, dtype=np.float32)
    except (OSError, RuntimeError, KeyError, ValueError) as error:
        raise UserError(f"{volume.path}: slice {first} cannot be read ({_why(error)}).") from None
    if not (np.isfinite(kspace).all() and np.isfinite(reference).all()):
        raise UserError(f"{volume.path}: slice {first} holds samples that are no numbers.")
    return kspace, reference


HEADER = """<?xml version="1.0"?>
<ismrmrdHeader xmlns="http://www.ismrm.org/ISMRMRD"><encoding>
<encodedSpace><matrixSize><x>{rows}</x><y>{columns}</y><z>1</z></matrixSize></encodedSpace>
<reconSpace><matrixSize><x>{height}</x><y>{width}</y><z>1</z></matrixSize></reconSpace>
</encoding></ismrmrdHeader>
"""


def write_volume(
    path: Path, kspace: np.ndarray, reconstruction: np.ndarray, patient: str, acquisition: str
) -> None:
    """Write one volume in fastMRI's format, for sets that are made here."""
    import h5py

    (_, rows, columns), (_, height, width) = kspace.shape, reconstruction.shape
    with h5py.File(path, "w") as file:
        file["kspace"] = kspace.astype(np.complex64)
        file["reconstruction_esc"] = reconstruction.astype(np.float32)
        file["ismrmrd_header"] = HEADER.format(
            rows=rows, columns=columns, height=height, width=width
        )
        file.attrs["acquisition"], file.attrs["patient_id"] = acquisition, patient
        file.attrs["max"] = float(reconstruction.max())
        file.attrs["norm"] = float(np.linalg.norm(reconstruction))
