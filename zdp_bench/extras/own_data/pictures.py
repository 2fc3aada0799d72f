"""Read PNG and JPEG files as bytes of one size, and masks from PNG files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from zdp_bench.errors import UserError
from zdp_bench.extras.own_data.form import Fit, Form

SUFFIXES = (".png", ".jpg", ".jpeg")
LARGEST = 16384  # pixels along a side
TURNED = (5, 6, 7, 8)  # orientations of a camera that swap rows and columns
ORIENTATION = 274  # EXIF's number of that tag


def read_pictures(path: Path, form: Form) -> np.ndarray:
    """Return the one picture of a file as bytes [1, channels, size, size]; see `read_picture`."""
    return read_picture(path, form.size, form.channels, form.fit)[None]


def read_picture(path: Path, size: int, channels: int, fit: Fit) -> np.ndarray:
    """Return a picture as bytes [channels, size, size]: grey, or red, green and blue.

    Args:
        fit: resize (its aspect is not kept) or crop (the largest square in its middle).

    Raises:
        UserError: it is damaged, something else, or of an impossible size.
    """
    with _open(path, "PNG", "JPEG") as stored:
        image = ImageOps.exif_transpose(_in_8_bits(stored)).convert("L" if channels == 1 else "RGB")
        pixels = np.asarray(_fit(image, size, fit, Image.Resampling.BILINEAR))
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def read_picture_mask(path: Path, form: Form) -> np.ndarray:
    """Return a PNG's mask as bytes [1, size, size]: 1 where it is not black.

    Raises:
        UserError: see `read_picture`; JPEG loses the edges of a mask, so it is refused.
    """
    with _open(path, "PNG") as stored:
        marked = np.asarray(stored if stored.mode in ("P", "1") else _in_8_bits(stored, cut=False))
        if marked.ndim == 3:
            raise UserError(f"{path}: is a picture in colour; a mask is a grey PNG, 0 outside.")
        mask = Image.fromarray((marked > 0).astype(np.uint8))
        return np.asarray(_fit(mask, form.size, form.fit, Image.Resampling.NEAREST))[None]


def extent_of_picture(path: Path, form: Form) -> tuple[int, ...]:
    """Return (rows, columns) by a picture's header.

    Raises:
        UserError: see `read_picture`.
    """
    with _open(path, "PNG", "JPEG") as image:
        columns, rows = image.size
        return (columns, rows) if image.getexif().get(ORIENTATION) in TURNED else (rows, columns)


def _in_8_bits(image: Image.Image, cut: bool = True) -> Image.Image:
    """Return a picture of 16 bits in 8 of them, which PIL would cut off at 255."""
    if not image.mode.startswith("I"):
        return image
    deep = np.asarray(image)
    return Image.fromarray((deep >> 8 if cut else deep > 0).astype(np.uint8))


def _fit(image: Image.Image, size: int, fit: Fit, how: Image.Resampling) -> Image.Image:
    if fit == "crop":
        return ImageOps.fit(image, (size, size), how)
    return image if image.size == (size, size) else image.resize((size, size), how)


@contextmanager
def _open(path: Path, *formats: str) -> Iterator[Image.Image]:
    """Open a picture; whatever goes wrong with it while it is open becomes one sentence."""
    try:
        with Image.open(path, formats=list(formats)) as stored:
            if max(stored.size) > LARGEST:
                raise UserError(f"{path}: has {stored.size[0]}×{stored.size[1]} pixels, too many.")
            yield stored
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
        raise UserError(
            f"{path}: is no readable {' or '.join(formats)} ({type(error).__name__}); it is "
            "damaged or something else."
        ) from None
