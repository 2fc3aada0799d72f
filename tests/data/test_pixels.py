"""One limit of pixels for every reader of images, and no more memory than pixels need."""

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data import test_fastmri
from tests.data.helpers import assert_refused
from tests.extras.own_data.own_data import write_dicom, write_nifti, write_png
from zdp_bench import foreign_files
from zdp_bench.data import fastmri, nifti, pictures


def write_jpeg(path: Path, level: int) -> Path:
    Image.fromarray(np.full((10, 12), level, np.uint8)).save(path)
    return path


def write_complex(path: Path, level: int) -> Path:
    nifti.write(path, np.full((12, 10, 2), level * 1j, np.complex64), (1.0, 1.0, 1.0))
    return path


# Of images of 10 by 12 pixels, or 24 by 18: what writes a file, and what opens it.
READERS: dict[str, tuple[str, Callable[[Path, int], Path], Callable[[Path], object]]] = {
    "PNG": ("a.png", write_png, lambda path: pictures.read_picture(path, 8)),
    "PNG's header": ("a.png", write_png, lambda path: pictures.inspect_picture(path, None)),
    "JPEG": ("a.jpg", write_jpeg, lambda path: pictures.read_picture(path, 8)),
    "mask": ("a.png", write_png, lambda path: pictures.read_mask(path, 8, "resize")),
    "mask's header": ("a.png", write_png, pictures.inspect_mask),
    "DICOM": ("a.dcm", write_dicom, lambda path: pictures.read_dicom(path, 8, "crop", None)),
    "DICOM's header": ("a.dcm", write_dicom, pictures.inspect_dicom),
    "NIfTI": ("a.nii.gz", write_nifti, nifti.read),
    "NIfTI's header": ("a.nii", write_nifti, nifti.read_header),
    "NIfTI labels": ("a.nii", write_nifti, nifti.read_labels),
    "complex NIfTI": ("a.nii", write_complex, nifti.read_complex),
    "HDF5": ("a.h5", test_fastmri.write, lambda path: fastmri.inspect(path, path.parent)),
}


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_holds_an_image_to_one_limit(
    reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, write, read = READERS[reader]
    path = write(tmp_path / name, 9)
    pixels = 24 * 18 if reader == "HDF5" else 10 * 12
    monkeypatch.setattr(foreign_files, "MAX_PIXELS", pixels)
    read(path)
    monkeypatch.setattr(foreign_files, "MAX_PIXELS", pixels - 1)
    assert_refused(lambda: read(path), name, rf"announces \d+×\d+ pixels; 1 to {pixels - 1} are")


def test_a_slice_counts_with_all_its_coils(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    coils = test_fastmri.coils_of(0)
    path = test_fastmri.write(tmp_path / "a.h5", 0, reconstruction_esc=None, **coils)
    monkeypatch.setattr(foreign_files, "MAX_PIXELS", 3 * 24 * 18 - 1)
    assert_refused(lambda: fastmri.inspect(path, tmp_path), "a.h5", "announces 3×24×18 pixels")


def test_a_deep_picture_takes_no_more_memory_than_its_pixels(tmp_path: Path) -> None:
    """It was made float64 whole: 5.2 GB for a file of 329 kB."""
    deep = np.arange(3000, dtype=np.uint16)[None].repeat(2000, axis=0)
    Image.fromarray(deep).save(tmp_path / "deep.png")
    small = np.asarray(Image.open(tmp_path / "deep.png"))[:8, :]
    tracemalloc.start()
    made = pictures.read_picture(tmp_path / "deep.png", 3000, window=(100, 2000))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 9 * deep.size + 40 * pictures.PIXELS_AT_ONCE
    expected = ((small - 100.0) / 1900).clip(0, 1) * 255
    np.testing.assert_array_equal(made[0, 0], expected[0].round().astype(np.uint8))
