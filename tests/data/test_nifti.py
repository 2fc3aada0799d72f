"""NIfTI: axes and spacing are turned to RAS+."""

import gzip
from pathlib import Path

import nibabel
import numpy as np
import pytest

from zdp_bench.data import nifti
from zdp_bench.errors import UserError

DATA = np.arange(2 * 3 * 4, dtype=np.int16).reshape(2, 3, 4)
SPACING = (0.5, 1.5, 3.0)


def save(path: Path, data: np.ndarray) -> Path:
    nibabel.save(nibabel.Nifti1Image(data, np.diag([*SPACING, 1.0])), path)
    return path


@pytest.mark.parametrize("codes", ["RAS", "LPS", "LAS", "SPR", "AIL"])
def test_every_orientation_comes_out_the_same(tmp_path: Path, codes: str) -> None:
    nifti.write(tmp_path / "v.nii.gz", DATA, SPACING, axes=codes)
    assert "".join(nibabel.aff2axcodes(nibabel.load(tmp_path / "v.nii.gz").affine)) == codes
    volume, header = nifti.read(tmp_path / "v.nii.gz"), nifti.read_header(tmp_path / "v.nii.gz")
    np.testing.assert_array_equal(volume, DATA)
    assert header.spacing == pytest.approx(SPACING)
    assert header.shape == DATA.shape


@pytest.mark.parametrize(("unit", "size"), [("meter", 1e3), ("micron", 1e-3), ("unknown", 1)])
def test_positions_are_in_mm_whatever_unit_the_header_names(
    unit: str, size: float, tmp_path: Path
) -> None:
    """Voxels of 0.9 mm in metres were too small for a usable affine, and those of a microscope."""
    image = nibabel.Nifti1Image(DATA, np.diag([*np.divide((0.5, 0.0009, 3), size), 1.0]))
    image.header.set_xyzt_units(unit)
    nibabel.save(image, tmp_path / "v.nii.gz")
    header = nifti.read_header(tmp_path / "v.nii.gz")
    assert header.spacing == pytest.approx((0.5, 0.0009, 3))
    mask = tmp_path / "mask.nii.gz"
    nifti.write(mask, DATA % 2, (0.5, 0.0009, 3))
    nifti.require_same_place(mask, nifti.read_header(mask), header)


@pytest.mark.parametrize("size", [1e-6, 1, 1e6])
def test_an_affine_whose_axes_are_parallel_is_refused(size: float, tmp_path: Path) -> None:
    affine = np.diag([size, size, size, 1.0])
    affine[:, 1] = affine[:, 0]
    image = nibabel.Nifti1Image(DATA, None)
    image.header.set_sform(affine, code=1)
    nibabel.save(image, tmp_path / "v.nii")
    with pytest.raises(UserError, match="has no usable affine"):
        nifti.read_header(tmp_path / "v.nii")


def test_the_files_own_scaling_is_applied_and_labels_stay_whole(tmp_path: Path) -> None:
    image = nibabel.Nifti1Image(np.linspace(0, 2, 24).reshape(2, 3, 4), np.eye(4))
    image.set_data_dtype(np.uint8)  # nibabel writes slope and intercept
    nibabel.save(image, tmp_path / "v.nii")
    assert nifti.read(tmp_path / "v.nii").max() == pytest.approx(2, abs=0.01)
    labels = nifti.read_labels(save(tmp_path / "l.nii.gz", (DATA % 3).astype(np.float64)))
    assert labels.dtype == np.uint8
    np.testing.assert_array_equal(labels, DATA % 3)


def test_the_header_is_read_without_the_voxels(tmp_path: Path) -> None:
    path = save(tmp_path / "v.nii", np.zeros((8, 8, 8), dtype=np.int16))
    path.write_bytes(path.read_bytes()[:400])
    assert nifti.read_header(path).shape == (8, 8, 8)
    with pytest.raises(UserError, match="truncated"):
        nifti.read(path)


def test_files_of_a_folder_and_their_names(tmp_path: Path) -> None:
    for name in ("b_2.nii", "a_1.nii.gz", "._a_1.nii.gz", "notes.txt", "c.nii.bak"):
        (tmp_path / name).write_bytes(b"")
    assert [nifti.name_of(path) for path in nifti.paths_of(tmp_path)] == ["a_1", "b_2"]


def test_a_stream_is_unpacked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compressed bytes are read once: large sets stream."""
    path = save(tmp_path / "v.nii.gz", np.random.default_rng(0).normal(size=(60, 60, 60)))
    expected, seen = nifti.read(path), []
    rewind = gzip._GzipReader._rewind  # type: ignore[attr-defined]
    monkeypatch.setattr(gzip._GzipReader, "_rewind", lambda self: (seen.append(1), rewind(self)))  # type: ignore[attr-defined]
    np.testing.assert_array_equal(nifti.read(path), expected)
    assert not seen


def test_a_compressed_volume_is_known_by_its_content(tmp_path: Path) -> None:
    """X.NII.GZ was called truncated, and its checksum not compared."""
    path = save(tmp_path / "v.nii.gz", DATA)
    expected = nifti.read(path)
    path = path.rename(tmp_path / "V.NII.GZ")
    np.testing.assert_array_equal(nifti.read(path), expected)
    content = bytearray(path.read_bytes())
    content[-5] ^= 1  # of the checksum
    path.write_bytes(content)
    with pytest.raises(UserError, match="cannot be read"):
        nifti.read(path)
