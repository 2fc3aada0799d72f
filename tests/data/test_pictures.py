"""How bright a pixel is follows from its file or from the user's window, never from other pixels.

Pictures of 12 bits in 16 came out black, and a whole set of them trained in silence.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from pydicom import dcmread
from pydicom.encaps import encapsulate
from pydicom.uid import JPEGLSLossless

from tests.data.helpers import assert_refused
from tests.extras.own_data.own_data import write_dicom
from zdp_bench.data.nifti import to_bytes
from zdp_bench.data.pictures import (
    inspect_dicom,
    inspect_mask,
    inspect_picture,
    read_dicom,
    read_mask,
    read_picture,
)

GREY = np.arange(64, dtype=np.uint16).reshape(8, 8) * 64 + 1  # of 12 bits


def write_png(path: Path, pixels: np.ndarray, bits: int | None = None) -> Path:
    """Write a PNG with a chunk sBIT."""
    info = PngInfo()
    if bits:
        info.add(b"sBIT", bytes([bits]))
    Image.fromarray(pixels).save(path, pnginfo=info)
    return path


def test_sixteen_bits_need_to_say_how_many_are_used(tmp_path: Path) -> None:
    silent = write_png(tmp_path / "silent.png", GREY)
    for read in (lambda: inspect_picture(silent, None), lambda: read_picture(silent, 8)):
        assert_refused(read, "silent.png", r"no sBIT.*dataset\.window.*0, 4095.*public")
    expected = (GREY / 4095 * 255).round()
    shown = read_picture(silent, 8, window=(0, 4095))[0]
    np.testing.assert_array_equal(shown, expected)
    for name, pixels, bits in (
        ("low.png", GREY, 12),  # as some writers leave them
        ("high.png", GREY << 4, 12),  # as the standard has it
        ("full.png", GREY << 4, 16),
    ):
        read = read_picture(write_png(tmp_path / name, pixels, bits), 8)[0].astype(int)
        assert np.abs(read - expected).max() <= 1, name
    mask = read_mask(write_png(tmp_path / "mask.png", (GREY > 2000).astype(np.uint16)), 8, "resize")
    np.testing.assert_array_equal(mask, GREY > 2000)


ORGAN = np.zeros((8, 8), dtype=np.uint8)
ORGAN[2:5, 3:6] = 255


@pytest.mark.parametrize("mask", [ORGAN, 255 - ORGAN], ids=["small", "large"])
def test_a_mask_is_what_its_picture_shows_or_refused(mask: np.ndarray, tmp_path: Path) -> None:
    """PIL numbers the colours of a palette by their frequency, so that 0 may be white."""
    grey = Image.fromarray(mask)
    for mode in ("L", "1"):
        grey.convert(mode).save(tmp_path / f"{mode}.png")
        shown = read_mask(tmp_path / f"{mode}.png", 8, "resize")
        np.testing.assert_array_equal(shown > 0, mask > 0)
    grey.convert("P", palette=Image.Palette.ADAPTIVE, colors=2).save(tmp_path / "adaptive.png")
    grey.quantize(2).save(tmp_path / "quantized.png")
    for name in ("adaptive.png", "quantized.png"):
        says = "has a palette in which index 0, the background, is not black"
        assert_refused(lambda name=name: read_mask(tmp_path / name, 8, "resize"), name, says)


def test_a_palette_mask_of_labels_is_its_indices(tmp_path: Path) -> None:
    labels = np.arange(64, dtype=np.uint8).reshape(8, 8) % 4
    for number, third in enumerate(((0, 0, 128), (0, 0, 0))):
        picture = Image.fromarray(labels, mode="P")
        picture.putpalette([0, 0, 0, 128, 0, 0, 0, 128, 0, *third])
        picture.save(tmp_path / f"{number}.png")
    np.testing.assert_array_equal(read_mask(tmp_path / "0.png", 8, "resize"), labels)
    assert_refused(lambda: read_mask(tmp_path / "1.png", 8, "resize"), "1.png", "another index is")


def test_a_window_is_for_every_picture_and_follows_its_turn(tmp_path: Path) -> None:
    pixels = np.tile(np.arange(8, dtype=np.uint8) * 10, (8, 1))
    exif = Image.Exif()
    exif[274] = 6  # the camera lay on its side
    Image.fromarray(pixels).save(tmp_path / "p.png", exif=exif)
    plain, shown = (read_picture(tmp_path / "p.png", 8, window=w) for w in (None, (0, 70)))
    np.testing.assert_array_equal(shown, (plain / 70 * 255).round())
    assert plain[0, 0, 0] == plain[0, 0, 7]


@pytest.mark.parametrize("orientation", [3, 6])
def test_a_mask_turns_with_its_image(orientation: int, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[274] = orientation
    stored = np.zeros((8, 16), np.uint8)
    stored[:4, :8] = 255
    for name in ("image.png", "mask.png"):
        Image.fromarray(stored).save(tmp_path / name, exif=exif)
    image = read_picture(tmp_path / "image.png", 8)
    np.testing.assert_array_equal(read_mask(tmp_path / "mask.png", 8, "resize") > 0, image[0] > 127)
    shape = inspect_picture(tmp_path / "image.png", None)
    assert (
        inspect_mask(tmp_path / "mask.png") == shape == ((8, 16) if orientation == 3 else (16, 8))
    )


def test_bits_that_dicom_does_not_count_are_nobody_s(tmp_path: Path) -> None:
    plain = write_dicom(tmp_path / "0.dcm", 2 * 904, BitsStored=12, HighBit=11)
    dirty = write_dicom(tmp_path / "1.dcm", 2 * (904 + 4096), BitsStored=12, HighBit=11)
    says = r"pixels beyond its 12 bits \(BitsStored\), and no overlay"
    assert_refused(lambda: read_dicom(dirty, 12, "resize", None), "1.dcm", says)
    image = dcmread(dirty)
    image.add_new((0x6000, 0x0102), "US", 12)  # an overlay's bit
    image.save_as(dirty)
    for path in (plain, dirty):
        assert read_dicom(path, 12, "resize", (0, 8190))[0, 0, 11] == round(1808 / 8190 * 255)


def test_dicom_whose_pixels_mean_something_else_is_refused(tmp_path: Path) -> None:
    for changes, says in (
        ({"BitsStored": 12}, r"its 12 bits up to bit 15 \(HighBit\), not 11"),  # pixels << 4
        ({"RescaleSlope": 0}, "has RescaleSlope 0"),
    ):
        path = write_dicom(tmp_path / "0.dcm", 904 << 4, **changes)
        assert_refused(lambda path=path: inspect_dicom(path), "0.dcm", says)
    for stored in (-3, -3 & 0xFFF):  # the sign in the upper bits, or only in the 12
        pixels = np.full((10, 12), stored, dtype=np.int32).astype(np.int16).tobytes()
        signed = {"BitsStored": 12, "HighBit": 11, "PixelRepresentation": 1, "PixelData": pixels}
        path = write_dicom(tmp_path / "1.dcm", 0, **signed)
        assert (read_dicom(path, 12, "resize", (-6, 4)) == 0).all()


def test_a_codec_is_named_with_the_package_that_has_it(tmp_path: Path) -> None:
    path = write_dicom(tmp_path / "0.dcm", 9)
    image = dcmread(path)
    image.file_meta.TransferSyntaxUID = JPEGLSLossless
    image.PixelData = encapsulate([b"pixels"])
    image["PixelData"].is_undefined_length = True
    image.save_as(path)
    assert_refused(lambda: inspect_dicom(path), "0.dcm", "JPEG-LS Lossless.* needs .*pyjpegls")


@pytest.mark.parametrize("unit", [1e6, 1, 1e-6, 1e-9, 1e-30])
@pytest.mark.parametrize("window", [None, (0.0, 1.0)])
def test_bytes_do_not_depend_on_the_unit(unit: float, window: tuple[float, float] | None) -> None:
    """Planes in small units, such as diffusion in m²/s, came out black."""
    planes = torch.rand(2, 8, 8, generator=torch.Generator().manual_seed(0))
    limits = window and (window[0] * unit, window[1] * unit)
    expected = to_bytes(planes, window)
    torch.testing.assert_close(to_bytes(planes * unit, limits), expected, rtol=1e-4, atol=1e-2)


def test_a_plane_of_one_intensity_is_black() -> None:
    for value in (0.0, 1e-12, 5.0):
        assert not to_bytes(torch.full((1, 4, 4), value), None).any()


@pytest.mark.parametrize("pixels", [17, 4096, 5000 * 3])
def test_a_plane_s_percentiles_are_torch_s(pixels: int) -> None:
    planes = torch.rand(3, 1, pixels, generator=torch.Generator().manual_seed(1)) * 1000
    ends = torch.quantile(planes.flatten(1), torch.tensor([0.01, 0.99]), dim=1)
    low, high = ends[:, :, None, None]
    expected = ((planes - low) / (high - low).clamp(min=1e-6)).clamp(0, 1) * 255
    # Versions of torch interpolate with other roundings.
    torch.testing.assert_close(to_bytes(planes, None), expected, rtol=1e-6, atol=1e-3)


@pytest.mark.slow
def test_a_plane_above_torch_s_limit_is_read(tmp_path: Path) -> None:
    path = write_dicom(tmp_path / "0.dcm", 9, Rows=4200, Columns=4200, PixelData=bytes(2 * 4200**2))
    assert inspect_dicom(path) == (4200, 4200)
    assert not read_dicom(path, 8, "resize", None).any()
