"""NIfTI: axes and spacing are turned to RAS+, and broken files are named."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable
from pathlib import Path

import nibabel
import numpy as np
import pytest

from zdp_bench.data.formats import nifti
from zdp_bench.errors import UserError

DATA = np.arange(2 * 3 * 4, dtype=np.int16).reshape(2, 3, 4)
SPACING = (0.5, 1.5, 3.0)


def save(path: Path, data: np.ndarray = DATA, affine: np.ndarray | None = None) -> Path:
    nibabel.save(
        nibabel.Nifti1Image(data, np.diag([*SPACING, 1.0]) if affine is None else affine), path
    )
    return path


@pytest.mark.parametrize("codes", ["RAS", "LPS", "LAS", "SPR", "AIL"])
def test_every_orientation_comes_out_the_same(tmp_path: Path, codes: str) -> None:
    nifti.write(tmp_path / "v.nii.gz", DATA, SPACING, axes=codes)
    assert "".join(nibabel.aff2axcodes(nibabel.load(tmp_path / "v.nii.gz").affine)) == codes
    volume, header = nifti.read(tmp_path / "v.nii.gz"), nifti.read_header(tmp_path / "v.nii.gz")
    np.testing.assert_array_equal(volume.data, DATA)
    assert volume.spacing == header.spacing == pytest.approx(SPACING)
    assert header.shape == DATA.shape


def test_the_files_own_scaling_is_applied_and_labels_stay_whole(tmp_path: Path) -> None:
    image = nibabel.Nifti1Image(np.linspace(0, 2, 24).reshape(2, 3, 4), np.eye(4))
    image.set_data_dtype(np.uint8)  # nibabel writes slope and intercept
    nibabel.save(image, tmp_path / "v.nii")
    assert nifti.read(tmp_path / "v.nii").data.max() == pytest.approx(2, abs=0.01)
    labels = nifti.read_labels(save(tmp_path / "l.nii.gz", (DATA % 3).astype(np.float64)))
    assert labels.data.dtype == np.uint8
    np.testing.assert_array_equal(labels.data, DATA % 3)


def test_the_header_is_read_without_the_voxels(tmp_path: Path) -> None:
    path = save(tmp_path / "v.nii", np.zeros((8, 8, 8), dtype=np.int16))
    path.write_bytes(path.read_bytes()[:400])
    assert nifti.read_header(path).shape == (8, 8, 8)
    with pytest.raises(UserError, match="cut off"):
        nifti.read(path)


def test_files_of_a_folder_and_their_names(tmp_path: Path) -> None:
    for name in ("b_2.nii", "a_1.nii.gz", "._a_1.nii.gz", "notes.txt", "c.nii.bak"):
        (tmp_path / name).write_bytes(b"")
    assert [nifti.name_of(path) for path in nifti.paths_of(tmp_path)] == ["a_1", "b_2"]


def infinite(path: Path) -> None:
    save(path, np.full((2, 2, 2), np.nan))


def flat(path: Path) -> None:
    """Set the second row of the sform (bytes 296 to 312) to zero."""
    body = bytearray(save(path).read_bytes())
    body[296:312] = bytes(16)
    path.write_bytes(bytes(body))


def huge(path: Path) -> None:
    header = nibabel.Nifti1Header()
    header.set_data_shape((32767, 32767, 32767))
    header.set_data_dtype(np.int16)
    path.write_bytes(header.binaryblock + b"\0" * 4)


def announce(*shape: int) -> Callable[[Path], object]:
    """A NIfTI-2 file whose header has these 64-bit sizes, whatever voxels there are."""

    def write(path: Path) -> None:
        nibabel.Nifti2Image(DATA, np.eye(4)).to_filename(path)
        body = bytearray(path.read_bytes())
        body[16 : 16 + 8 * (len(shape) + 1)] = struct.pack(f"<{len(shape) + 1}q", 3, *shape)
        path.write_bytes(bytes(body))

    return write


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, "is missing"),
    "empty": (lambda path: path.write_bytes(b""), "no readable NIfTI"),
    "a web page": (
        lambda path: path.write_bytes(b"<html>not found</html>" * 50),
        "no readable NIfTI",
    ),
    "random bytes": (lambda path: path.write_bytes(bytes(range(256)) * 4), "no readable NIfTI"),
    "a folder": (lambda path: path.mkdir(), "is missing"),
    "two dimensions": (lambda path: save(path, np.zeros((4, 4))), "three dimensions"),
    "no voxels": (
        lambda path: save(path, np.zeros((4, 0, 4))),
        "three dimensions|no readable NIfTI",
    ),
    "not a number": (infinite, "no numbers"),
    "a flat affine": (flat, "affine"),
    "complex": (lambda path: save(path, DATA.astype(np.complex64)), "not real numbers"),
    "more than fits": (huge, "more than any volume"),
    "sizes whose product wraps to 0": (announce(2**32, 2**32, 1), "more than any volume"),
    "sizes whose product wraps to 64": (announce(2**62 + 4, 4, 4), "more than any volume"),
    "sizes below 0": (announce(-4, -4, 4), "three dimensions"),
    "two billion voxels": (announce(1290, 1290, 1290), "announces 4,293,378,000 bytes, and"),
    "cut off": (lambda path: (save(path), path.write_bytes(path.read_bytes()[:370])), "cut off"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_volume_is_refused_by_name(tmp_path: Path, how: str) -> None:
    spoil, message = BROKEN[how]
    path = tmp_path / "broken_1.nii"
    spoil(path)
    with pytest.raises(UserError, match=message) as error:
        nifti.read(path)
    assert "broken_1.nii" in str(error.value)


def test_a_cut_off_archive_and_false_labels_are_refused(tmp_path: Path) -> None:
    whole = gzip.compress(
        save(tmp_path / "v.nii", np.random.default_rng(0).normal(size=(20, 20, 20))).read_bytes()
    )
    (tmp_path / "v.nii.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="cut off"):
        nifti.read(tmp_path / "v.nii.gz")
    for values in (np.full((2, 2, 2), 0.5), np.full((2, 2, 2), -1.0), np.full((2, 2, 2), 300.0)):
        with pytest.raises(UserError, match="whole numbers"):
            nifti.read_labels(save(tmp_path / "l.nii", values))


def test_a_flipped_byte_that_still_unpacks_is_refused(tmp_path: Path) -> None:
    """Stored blocks unpack whatever their bytes are: only the checksum behind the voxels tells."""
    path = tmp_path / "flipped_1.nii.gz"
    whole = bytearray(
        gzip.compress(
            save(tmp_path / "v.nii", np.zeros((40, 40, 40), np.int16)).read_bytes(), compresslevel=0
        )
    )
    path.write_bytes(whole)
    assert not nifti.read(path).data.any()
    whole[-12] ^= 1  # of the last voxel
    path.write_bytes(whole)
    for read in (nifti.read, nifti.read_labels):
        with pytest.raises(
            UserError,
            match=r"flipped_1\.nii\.gz: its voxels cannot be read \(BadGzipFile\).*damaged",
        ):
            read(path)
    path.write_bytes(whole[:-8])  # the checksum itself is gone
    with pytest.raises(UserError, match="EOFError"):
        nifti.read(path)


def test_a_stream_that_unpacks_to_much_more_than_its_voxels_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nifti, "LONGEST_REST", 2**20)
    path = save(tmp_path / "v.nii.gz")
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()) + bytes(2**23)))
    with pytest.raises(UserError, match="its voxels cannot be read"):
        nifti.read(path)


def test_a_stream_is_unpacked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compressed bytes are read once: large sets stream."""
    path = save(tmp_path / "v.nii.gz", np.random.default_rng(0).normal(size=(60, 60, 60)))
    expected, seen = nifti.read(path).data, []
    rewind = gzip._GzipReader._rewind  # type: ignore[attr-defined]
    monkeypatch.setattr(gzip._GzipReader, "_rewind", lambda self: (seen.append(1), rewind(self)))  # type: ignore[attr-defined]
    np.testing.assert_array_equal(nifti.read(path).data, expected)
    assert not seen


@pytest.mark.real_data
def test_a_real_volume(data_root: Path) -> None:
    folder = data_root / "Task04_Hippocampus"
    images, labels = nifti.paths_of(folder / "imagesTr"), nifti.paths_of(folder / "labelsTr")
    assert len(images) == len(labels) == 260
    image, label = nifti.read(images[0]), nifti.read_labels(labels[0])
    assert image.data.shape == label.data.shape
    assert set(np.unique(label.data)) == {0, 1, 2}
