"""MHA and NRRD: the same voxels in the same place as NIfTI, and nothing from other files."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zdp_bench.data import nifti
from zdp_bench.errors import UserError
from zdp_bench.extras.own_data import readers

sitk = pytest.importorskip("SimpleITK")

DATA = np.arange(2 * 3 * 4, dtype=np.int16).reshape(2, 3, 4)
SPACING = (0.5, 1.5, 3.0)
SUFFIXES = [".mha", ".nrrd"]


def convert(path: Path, suffix: str, **options: Any) -> Path:
    """Write what a NIfTI file holds, by ITK's own reader and writer."""
    made = path.with_name(f"converted{suffix}")
    sitk.WriteImage(sitk.ReadImage(str(path)), str(made), **options)
    return made


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("codes", ["RAS", "LPS", "SPR", "AIL"])
def test_a_volume_lies_where_its_nifti_does(
    tmp_path: Path, codes: str, suffix: str, compressed: bool
) -> None:
    nifti.write(tmp_path / "v.nii", DATA, SPACING, axes=codes)
    made = convert(tmp_path / "v.nii", suffix, useCompression=compressed)
    np.testing.assert_array_equal(nifti.read(made), DATA)
    header, wanted = nifti.read_header(made), nifti.read_header(tmp_path / "v.nii")
    assert (header.shape, header.is_complex) == (wanted.shape, False)
    assert header.spacing == pytest.approx(SPACING)
    np.testing.assert_allclose(header.affine, wanted.affine, atol=1e-5)
    nifti.require_same_place(made, header, wanted)


def test_an_mha_may_begin_with_a_comment(tmp_path: Path) -> None:
    """MetaIO writes it before the object's type, and own data are recognised by their start."""
    nifti.write(tmp_path / "v.nii", DATA, SPACING)
    made = convert(tmp_path / "v.nii", ".mha")
    made.write_bytes(b"Comment = made by a scanner\n" + made.read_bytes())
    np.testing.assert_array_equal(nifti.read(made), DATA)
    assert readers.kind_of(made).name == "volume"


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("kind", ["uint8", "int16", "float32", "float64"])
def test_channels_and_numbers_are_kept(tmp_path: Path, suffix: str, kind: str) -> None:
    values = np.arange(4 * 3 * 2 * 2).reshape(4, 3, 2, 2).astype(kind)  # [Z, Y, X, channels]
    path = tmp_path / f"v{suffix}"
    sitk.WriteImage(sitk.GetImageFromArray(values, isVector=True), str(path))
    read = nifti.read(path)
    assert read.shape == (2, 3, 4, 2)
    assert sorted(read.ravel()) == [*range(48)]
    np.testing.assert_array_equal(read[::-1, ::-1], values.transpose(2, 1, 0, 3))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def announce(path: Path) -> None:
    """Let the header claim 2,000 voxels a side."""
    text = re.sub(rb"(DimSize = |sizes: )2 3 4", rb"\g<1>2000 2000 2000", path.read_bytes())
    path.write_bytes(text)


def point_elsewhere(path: Path) -> None:
    """Let the header name another file's bytes as the voxels."""
    text = path.read_bytes().replace(b"ElementDataFile = LOCAL", b"ElementDataFile = secret.raw")
    path.write_bytes(text.replace(b"\n\n", b"\ndata file: secret.raw\n\n", 1))


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (cut, "cannot be read|truncated"),
        (announce, "that are supported|truncated"),
        (point_elsewhere, "keeps its voxels in another file"),
    ],
)
def test_a_damaged_file_is_refused_by_name(
    tmp_path: Path, suffix: str, spoil: Any, says: str
) -> None:
    (tmp_path / "secret.raw").write_bytes(bytes(1000))
    nifti.write(tmp_path / "v.nii", DATA, SPACING)
    made = convert(tmp_path / "v.nii", suffix)
    spoil(made)
    with pytest.raises(UserError, match=says) as caught:
        nifti.read(made)
    assert made.name in str(caught.value)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_plane_is_no_volume(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"plane{suffix}"
    sitk.WriteImage(sitk.GetImageFromArray(np.zeros((4, 4), np.uint8)), str(path))
    with pytest.raises(UserError, match="has 2 dimensions; three were expected"):
        nifti.read_header(path)


@pytest.mark.parametrize("sides", ["300000000", "11", "0", "-3", "", "3\nNDims = 300000000"])
def test_an_mha_of_more_dimensions_than_there_is_room_for_is_refused(
    tmp_path: Path, sides: str
) -> None:
    path = tmp_path / "v.mha"
    sitk.WriteImage(sitk.GetImageFromArray(np.zeros((4, 3, 2), np.int16)), str(path))
    path.write_bytes(path.read_bytes().replace(b"NDims = 3", f"NDims = {sides}".encode(), 1))
    with pytest.raises(UserError, match="dimensions; three were expected"):
        nifti.read_header(path)


LONG = b"x" * 700


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (b"\n\n", b"\n" + LONG + b"\n\n", "has a header line of 700 bytes"),
        (b"type: ", b"type: " + LONG, "has a header line of 71. bytes"),
        (b"\n\n", b"\nkey: := " + LONG + b"\n\n", "has a header line of 708 bytes"),
        (b"\n\n", b"\n", "has no blank line"),
        (b"\n\n", b"\n#" + LONG + b"\nkey:=" + LONG + b"\ncontent: " + LONG + b"\n\n", ""),
    ],
)
def test_a_header_that_would_end_the_process_is_refused_and_free_text_is_read(
    tmp_path: Path, old: bytes, new: bytes, says: str
) -> None:
    """SimpleITK's message about a line of a thousand bytes overwrote its own memory."""
    path = tmp_path / "v.nrrd"
    sitk.WriteImage(sitk.GetImageFromArray(np.zeros((4, 3, 2), np.int16)), str(path))
    path.write_bytes(path.read_bytes().replace(old, new, 1))
    if says:
        with pytest.raises(UserError, match=says):
            nifti.read(path)
    else:
        assert nifti.read(path).shape == (2, 3, 4)


def test_a_path_that_would_end_the_process_is_refused(tmp_path: Path) -> None:
    folder = tmp_path.joinpath(*["y" * 200] * 3)
    folder.mkdir(parents=True)
    path = folder / "v.nrrd"
    sitk.WriteImage(sitk.GetImageFromArray(np.zeros((4, 3, 2), np.int16)), str(path))
    with pytest.raises(UserError, match=r"has a path of [67].. bytes; for NRRD, 600 are read"):
        nifti.read(path)
