"""Read PNG and JPEG files as bytes of one size."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np

from zdp_bench.errors import UserError

SUFFIXES = (".png", ".jpg", ".jpeg")
LARGEST = 16384  # pixels along a side
Fit = Literal["resize", "crop"]


def read_picture(path: Path, size: int, channels: int, fit: Fit) -> np.ndarray:
    """Return a picture as bytes [channels, size, size]: grey, or red, green and blue.

    Args:
        fit: resize (its aspect is not kept) or crop (the largest square in its middle).

    Raises:
        UserError: it is damaged, something else, or of an impossible size.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(path, formats=["PNG", "JPEG"]) as stored:
            if max(stored.size) > LARGEST:
                raise UserError(f"{path}: has {stored.size[0]}×{stored.size[1]} pixels, too many.")
            image: Image.Image = stored
            if stored.mode.startswith("I"):  # 16 bits, which PIL would cut off at 255
                image = Image.fromarray((np.asarray(stored) >> 8).astype(np.uint8))
            image = ImageOps.exif_transpose(image).convert("L" if channels == 1 else "RGB")
            if fit == "crop":
                image = ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)
            elif image.size != (size, size):
                image = image.resize((size, size), Image.Resampling.BILINEAR)
            pixels = np.asarray(image)
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        raise UserError(
            f"{path}: is no readable PNG or JPEG ({type(error).__name__}); it is damaged or "
            "something else."
        ) from None
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)
