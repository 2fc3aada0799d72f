"""Read MHA and NRRD volumes with SimpleITK, as images of nibabel.

The axes of ITK run to the patient's Left and Posterior side, those of NIfTI to the Right and
Anterior. Affines here are NIfTI's, so that `nifti.py` can treat these files like NIfTI files.
"""

from __future__ import annotations

import os
import re
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from zdp_bench.foreign_files import expect

NRRD = b"NRRD000"
MHA = (b"ObjectType", b"Comment = ")
MARKS = (NRRD, *MHA)
MAX_HEADER = 2**18  # bytes
MAX_LINE = 600  # bytes of a line of a NRRD header
_FREE_TEXT = re.compile(rb"#|[^:]*:=|content:")
TO_RAS = np.diag([-1.0, -1.0, 1.0])


def is_itk(path: Path) -> bool:
    """Return True if a file begins like an MHA or NRRD file."""
    with path.open("rb") as file:
        return file.read(max(map(len, MARKS))).startswith(MARKS)


def open_image(path: Path) -> Any:
    """Open a file as nibabel's image, with axes as stored, without reading its voxels.

    Use inside `foreign_files.reading`.
    """
    import nibabel

    voxels = Voxels(path, _is_whole_nrrd(path))
    return nibabel.Nifti1Image(voxels, voxels.affine, dtype=voxels.dtype)


def _is_whole_nrrd(path: Path) -> bool:
    """Return True for NRRD, False for MHA; reject a header that refers to another file."""
    with path.open("rb") as file:
        head = file.read(MAX_HEADER)
    is_nrrd = head.startswith(NRRD)
    if is_nrrd:
        lines, blank_line, _ = head.replace(b"\r\n", b"\n").partition(b"\n\n")
        expect(bool(blank_line), f"has no blank line after a header of {MAX_HEADER:,} bytes")
        _require_short_fields(path, lines)
        is_apart = bool(re.search(rb"^data ?file:", lines, flags=re.MULTILINE | re.IGNORECASE))
    else:
        # SimpleITK ends the process if it has no room for the sides of so many dimensions.
        counts = re.findall(rb"^\s*NDims\s*=\s*(\d*)", head, flags=re.MULTILINE)
        others = [count.decode() for count in counts if count != b"3"] if counts else ["0"]
        expect(not others, f"has {''.join(others)[:12] or 'no'} dimensions; three were expected")
        is_apart = not re.search(rb"^ElementDataFile *= *LOCAL\s*$", head, flags=re.MULTILINE)
    expect(not is_apart, "keeps its voxels in another file; save it as one file, .mha or .nrrd")
    return is_nrrd


def _require_short_fields(path: Path, header: bytes) -> None:
    """Reject a NRRD header with a line, or a file with a path, that would end the process.

    SimpleITK writes a message about a damaged header, with path and line, to buffers of a thousand
    bytes, whatever their length. Comments, keys of one's own and `content` are no cause of one.
    """
    fields = [line for line in header.split(b"\n") if not _FREE_TEXT.match(line)]
    longest = max(map(len, fields))
    expect(longest <= MAX_LINE, f"has a header line of {longest:,} bytes; {MAX_LINE} are read")
    length = len(os.fsencode(path))
    expect(length <= MAX_LINE, f"has a path of {length:,} bytes; for NRRD, {MAX_LINE} are read")


class Voxels:
    """The voxels [X, Y, Z] or [X, Y, Z, channels] of a file, read when they are first used."""

    is_proxy = True

    def __init__(self, path: Path, is_nrrd: bool) -> None:
        import SimpleITK

        self._itk = SimpleITK
        reader = SimpleITK.ImageFileReader()
        reader.SetImageIO("NrrdImageIO" if is_nrrd else "MetaImageIO")
        reader.SetFileName(str(path))
        reader.ReadImageInformation()
        self._reader = reader
        sides = [int(side) for side in reader.GetSize()]
        expect(len(sides) == 3, f"has {len(sides)} dimensions; three were expected")
        channels = int(reader.GetNumberOfComponents())
        self.shape = (*sides, channels) if channels > 1 else (*sides,)
        self.ndim = len(self.shape)

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """Type of the stored numbers."""
        empty = self._itk.Image([1, 1, 1], self._reader.GetPixelIDValue())
        return self._itk.GetArrayViewFromImage(empty).dtype

    @cached_property
    def affine(self) -> np.ndarray:
        """[4, 4], maps indices of stored voxels to a position in mm on NIfTI's axes."""
        directions = np.array(self._reader.GetDirection()).reshape(3, 3)
        affine = np.eye(4)
        affine[:3, :3] = TO_RAS @ directions @ np.diag(self._reader.GetSpacing())
        affine[:3, 3] = TO_RAS @ np.array(self._reader.GetOrigin())
        return affine

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        stored = self._itk.GetArrayFromImage(self._reader.Execute())  # [Z, Y, X, ...]
        voxels = stored.transpose(2, 1, 0, *range(3, stored.ndim))
        return voxels if dtype is None else voxels.astype(dtype)
