"""Read pictures (PNG and JPEG with PIL) and DICOM images (with pydicom) as squares of bytes.

The brightness of a pixel depends on its own file and on the user's window, never on other pictures,
which may be private.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from zdp_bench.data.cache import load_or_make
from zdp_bench.data.nifti import Window, fit_planes
from zdp_bench.foreign_files import Unfit, expect, reading, require_size

Fit = Literal["resize", "crop"]
PIXELS_AT_ONCE = 2**20  # pixels to which a window is applied at once
MAX_BYTES = 2**28  # of a DICOM file
TURNED = (5, 6, 7, 8)  # EXIF orientations that swap rows and columns
ORIENTATION = 274  # number of the EXIF tag
OVERLAY_BIT = 0x0102  # element of a group 60xx: the bit of a pixel that contains the overlay
DEFLATED = "1.2.840.10008.1.2.1.99"  # the DICOM syntax that compresses the whole data set


@contextmanager
def open_picture(path: Path, *formats: str) -> Iterator[Image.Image]:
    """Open a picture and read its header, without its pixels."""
    # PIL warns of large pictures, but `require_size` limits them.
    ignored = warnings.catch_warnings(action="ignore")
    accepted = list(formats or ("PNG", "JPEG"))
    with reading(path), ignored, Image.open(path, formats=accepted) as stored:
        require_size(*stored.size)
        is_deep = ";16B" in str(stored.tile) and not _has_16_bits(stored)
        expect(
            not is_deep,
            "has 16 bits per colour, but PIL reads only the upper 8; save it with 8 bits, or in "
            "grey",
        )
        yield stored


def _has_16_bits(image: Image.Image) -> bool:
    return image.mode.startswith("I")


def inspect_picture(path: Path, window: Window) -> tuple[int, ...]:
    """Read a picture's (rows, columns) from its header; reject an unknown brightness scale."""
    with open_picture(path) as image:
        _require_depth(path, image, window)
        return _upright_shape(image)


def _upright_shape(image: Image.Image) -> tuple[int, int]:
    """Return the (rows, columns) of a picture turned as its EXIF data demand."""
    columns, rows = image.size
    # Only with EXIF data, because `getexif` would read the pixels of a PNG without any.
    is_turned = "exif" in image.info and image.getexif().get(ORIENTATION) in TURNED
    return (columns, rows) if is_turned else (rows, columns)


def read_picture(
    path: Path,
    size: int,
    channels: int = 1,
    fit: Fit = "resize",
    window: Window = None,
    formats: tuple[str, ...] = (),
) -> np.ndarray:
    """Read a picture as bytes [channels, size, size].

    Args:
        path: path of the file.
        size: rows and columns of the result.
        channels: 1 for grey, 3 for red, green and blue.
        fit: "resize" stretches the picture; "crop" cuts out the largest centre square first.
        window: stored values that become black and white. Default: as the file states.
        formats: formats to accept. Default: PNG and JPEG.
    """
    colours = "L" if channels == 1 else "RGB"
    with open_picture(path, *formats) as stored:
        _require_depth(path, stored, window)
        image = ImageOps.exif_transpose(stored)
        if not _has_16_bits(image):
            image = image.convert(colours)
        if window or _has_16_bits(image):
            image = _in_8_bits(path, image, window).convert(colours)
        pixels = np.asarray(_fit(image, size, fit, Image.Resampling.BILINEAR))
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def load_pictures(
    kind: str,
    digest: str,
    paths: Sequence[Path],
    size: int,
    channels: int,
) -> Tensor:
    """Load JPEG files as bytes [n, channels, size, size], memory-mapped from the cache.

    They are resized bilinearly with antialiasing; the aspect ratio is not kept.

    Args:
        kind, digest: see `load_or_make`.
        paths: paths of the files.
        size: rows and columns of a result.
        channels: 1 for grey, 3 for red, green and blue.
    """
    shape = (len(paths), channels, size, size)
    blocks = (read_picture(path, size, channels, formats=("JPEG",))[None] for path in paths)
    return torch.from_numpy(load_or_make(kind, digest, shape, np.uint8, blocks))


def describe_size(path: Path) -> str:
    """Return a picture's size as stored: '1024×768'."""
    with open_picture(path) as picture:
        columns, rows = picture.size
    return f"{columns}×{rows}"


def inspect_mask(path: Path) -> tuple[int, ...]:
    """Read the (rows, columns) of a mask, a PNG file."""
    with open_picture(path, "PNG") as image:
        return _upright_shape(image)


def read_mask(
    path: Path,
    size: int,
    fit: Fit,
) -> np.ndarray:
    """Read a mask from a PNG file as bytes [size, size]; 0 is the background.

    JPEG files are rejected, because compression changes the edges of a mask. Of a picture with a
    palette, the mask is the index of each pixel's colour; the background must be black. Like
    `read_picture`, it turns the mask as EXIF data demand, so that it stays on its image.
    """
    with open_picture(path, "PNG") as stored:
        upright = ImageOps.exif_transpose(stored)
        grey = np.asarray(upright)
        if upright.mode == "P":
            _require_black_background(upright)
        expect(grey.ndim == 2, "is a colour picture; a mask is a grey PNG with 0 for background")
        expect(int(grey.max()) <= 255, "is a mask with values above 255")
        mask = Image.fromarray(grey.astype(np.uint8))
        return np.asarray(_fit(mask, size, fit, Image.Resampling.NEAREST))


def _require_black_background(image: Image.Image) -> None:
    """Reject a palette in which index 0 is not black, or another index is."""
    colours = np.asarray(image.convert("RGB")).reshape(-1, 3)
    is_black = ~colours.any(axis=1)
    is_background = np.asarray(image).reshape(-1) == 0
    expect(
        bool((is_black == is_background).all()),
        "has a palette in which index 0, the background, is not black, or another index is; save "
        "the mask as a grey PNG with 0 for background",
    )


def _require_depth(
    path: Path,
    image: Image.Image,
    window: Window,
) -> None:
    is_known = window or not _has_16_bits(image) or _significant_bits(path)
    expect(
        bool(is_known),
        "has 16 bits per pixel and does not state how many are used (no sBIT): set "
        "dataset.window, such as [0, 4095] for 12 bits, from the scanner's manual or a public "
        "picture, not from a private one",
    )


def _significant_bits(path: Path) -> int:
    """Return the number of significant bits in a PNG's sBIT chunk; 0 if it has none."""
    with path.open("rb") as file:
        file.seek(8)
        while True:
            head = file.read(8)
            length, kind = int.from_bytes(head[:4], "big"), head[4:]
            if kind in (b"", b"IDAT"):
                return 0
            if kind == b"sBIT":
                bits = file.read(1)[0]
                return bits if 8 <= bits <= 16 else 0
            file.seek(length + 4, 1)  # skip its content and checksum


def _in_8_bits(
    path: Path,
    image: Image.Image,
    window: Window,
) -> Image.Image:
    """Convert 16 bits per pixel to 8, by the window or, without one, by sBIT."""
    pixels = np.asarray(image)
    if window is None:
        bits = _significant_bits(path)
        # The standard puts significant bits in the upper bits, but some writers use the lower.
        uses_lower = pixels.max(initial=0) < 2**bits and (pixels % 2 ** (16 - bits)).any()
        shift = bits - 8 if uses_lower else 8
        return Image.fromarray((pixels >> shift).astype(np.uint8))
    low, high = window
    grey = np.empty(pixels.shape, dtype=np.uint8)
    rows = max(1, PIXELS_AT_ONCE // max(1, pixels.shape[1]))
    for first in range(0, len(pixels), rows):
        part = slice(first, first + rows)
        scaled = (pixels[part].astype(np.float64) - low) / (high - low)
        grey[part] = (scaled.clip(0, 1) * 255).round()
    return Image.fromarray(grey)


def _fit(
    image: Image.Image,
    size: int,
    fit: Fit,
    resampling: Image.Resampling,
) -> Image.Image:
    square = (size, size)
    if fit == "crop":
        return ImageOps.fit(image, square, resampling)
    return image if image.size == square else image.resize(square, resampling)


# --------------------------------------------------------------------------------------- DICOM


def read_dicom(
    path: Path,
    size: int,
    fit: Fit,
    window: Window,
) -> np.ndarray:
    """Read a DICOM image as bytes [1, size, size].

    Args:
        window: see `to_bytes`, in the file's units.
    """
    from pydicom.pixels import apply_modality_lut

    with open_dicom(path) as image:
        values = apply_modality_lut(_stored_pixels(image), image)
        pixels = np.asarray(values, dtype=np.float32)
        rows, columns = image.Rows, image.Columns
        is_whole = pixels.shape == (rows, columns) and bool(np.isfinite(pixels).all())
        expect(is_whole, f"has pixels that are not {rows}×{columns} numbers")
        is_inverted = image.PhotometricInterpretation == "MONOCHROME1"  # large values are dark
    grey = fit_planes(torch.from_numpy(pixels)[None], size, fit, window).numpy()
    return 255 - grey if is_inverted else grey


def _stored_pixels(image: Any) -> np.ndarray:
    """Return the significant bits of each pixel.

    The other bits must be 0, repeat the sign, or contain an overlay.
    """
    image.pixel_array_options(correct_unused_bits=False)
    stored: np.ndarray = image.pixel_array
    if stored.dtype.kind == "f":
        return stored
    bits = 8 * stored.dtype.itemsize
    unused = max(0, bits - image.BitsStored)
    pixels = (stored << unused) >> unused
    exceeds = (stored != pixels) & (stored >> (bits - unused) != 0)
    overlays = [image.get((group, OVERLAY_BIT)) for group in range(0x6000, 0x6020, 2)]
    has_overlay = any(bit and bit.value for bit in overlays)
    rule = f"has pixels beyond its {image.BitsStored} bits (BitsStored), and no overlay in them"
    expect(has_overlay or not exceeds.any(), rule)
    return pixels


def inspect_dicom(path: Path) -> tuple[int, ...]:
    """Read an image's (rows, columns) from its header."""
    with open_dicom(path, stop_before_pixels=True) as image:
        return int(image.Rows), int(image.Columns)


@contextmanager
def open_dicom(path: Path, **options: Any) -> Iterator[Any]:
    """Open a DICOM file, which must contain a single grey image that can be decoded."""
    import pydicom

    with reading(path, MAX_BYTES), warnings.catch_warnings(action="ignore"):
        # Warnings are ignored: many files deviate slightly from the standard.
        syntax = pydicom.filereader.read_file_meta_info(path).TransferSyntaxUID
        expect(syntax != DEFLATED, "is a deflated DICOM file; store it uncompressed")
        _require_codec(syntax)
        image = pydicom.dcmread(path, **options)
        require_size(int(image.Rows), int(image.Columns))
        frames = int(str(image.get("NumberOfFrames", 1)))
        colours = image.PhotometricInterpretation
        is_grey = colours in ("MONOCHROME1", "MONOCHROME2")
        expect(
            frames == 1 and is_grey,
            f"has {frames} frames of {colours}; expected one grey image per file",
        )
        bits, high = image.get("BitsStored"), image.get("HighBit")
        if bits is not None and high is not None:
            expect(
                high == bits - 1,
                f"has its {bits} bits up to bit {high} (HighBit), not {bits - 1}; it is older "
                "than DICOM 2014: convert it",
            )
        expect(image.get("RescaleSlope") != 0, "has RescaleSlope 0, which makes all pixels equal")
        yield image


def _require_codec(syntax: Any) -> None:
    """Reject a compression that no installed package can read, and name one that can."""
    from pydicom.pixels import get_decoder

    try:
        decoder = get_decoder(syntax)
    except NotImplementedError:
        raise Unfit(f"is compressed with {syntax.name}, which pydicom does not read") from None
    packages = []
    for dependency in decoder.missing_dependencies:  # "pylibjpeg - requires numpy, pylibjpeg"
        packages.append(dependency.partition(" - requires ")[2])
    rule = f"is compressed with {syntax.name}, which needs {', or '.join(packages)}"
    expect(decoder.is_available, rule)
