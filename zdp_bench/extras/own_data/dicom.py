"""Read single-frame, grey DICOM images by pydicom, an extra."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zdp_bench.data.formats.planes import crop_square, resample, to_bytes
from zdp_bench.errors import UserError
from zdp_bench.extras.own_data.form import Form

SUFFIXES = (".dcm",)
LARGEST = 16384  # pixels along a side
MOST_BYTES = 2**28  # of a file of one image
DEFLATED = "1.2.840.10008.1.2.1.99"  # the one syntax that unpacks a whole file before it is read


def read_dicom(path: Path, form: Form) -> np.ndarray:
    """Return bytes [1, 1, size, size]: pixels in the file's units, between the window's ends.

    Raises:
        UserError: it is damaged or something else, in colour, of several frames, or stored in a
            way that pydicom cannot read here.
    """
    from pydicom.pixels import apply_modality_lut

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of values that bend the standard
        image = _open(path)
        try:
            pixels = np.asarray(apply_modality_lut(image.pixel_array, image), dtype=np.float32)
        except Exception as error:  # pydicom and its decoders raise whatever they trip over
            raise UserError(
                f"{path}: its pixels cannot be read ({type(error).__name__}); the file is damaged, "
                "or compressed in a way that pydicom needs another package for."
            ) from None
    if pixels.shape != (image.Rows, image.Columns) or not np.isfinite(pixels).all():
        raise UserError(f"{path}: its pixels are no {image.Rows}×{image.Columns} numbers.")
    planes = to_bytes(torch.from_numpy(pixels)[None], form.window)
    planes = crop_square(planes) if form.fit == "crop" else planes
    made = resample(planes, (form.size, form.size)).round().clamp(0, 255)
    if image.PhotometricInterpretation == "MONOCHROME1":  # large values are dark
        made = 255 - made
    return made.to(torch.uint8)[None].numpy()


def extent_of_dicom(path: Path, form: Form) -> tuple[int, ...]:
    """Return (rows, columns) by the header."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image = _open(path, stop_before_pixels=True)
    return int(image.Rows), int(image.Columns)


def _open(path: Path, **options: Any) -> Any:
    """Read the data set of a file, and refuse what is no single grey image."""
    import pydicom

    if path.stat().st_size > MOST_BYTES:
        raise UserError(f"{path}: has {path.stat().st_size:,} bytes, more than an image of DICOM.")
    try:
        syntax = pydicom.filereader.read_file_meta_info(path).get("TransferSyntaxUID")
        if syntax == DEFLATED:
            raise UserError(f"{path}: is a deflated DICOM file; store it uncompressed.")
        image = pydicom.dcmread(path, **options)
        rows, columns = int(image.Rows), int(image.Columns)
        frames, colours = int(str(image.get("NumberOfFrames", 1))), image.PhotometricInterpretation
    except UserError:
        raise
    except Exception as error:  # pydicom raises whatever its parser trips over
        raise UserError(
            f"{path}: is no readable DICOM image ({type(error).__name__}); it is damaged or "
            "something else."
        ) from None
    if not (0 < rows <= LARGEST and 0 < columns <= LARGEST):
        raise UserError(f"{path}: announces {rows:,}×{columns:,} pixels.")
    if frames != 1 or colours not in ("MONOCHROME1", "MONOCHROME2"):
        raise UserError(
            f"{path}: has {frames} frames of {colours}; one grey image a file was expected."
        )
    return image
