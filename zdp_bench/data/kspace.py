"""k-space: Fourier transforms, fastMRI's random mask, and a slice's zero-filled image.

Definitions are fastMRI's (Zbontar et al. 2018, arXiv:1811.08839, section 5). Rows are the readout,
columns the phase encoding, which acceleration leaves out: a mask is one flag a column.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from zdp_bench.errors import require

EPS = 1e-11  # fastMRI's, added to a slice's standard deviation
SSIM_WINDOW = 7  # pixels; a smaller image could be trained on, but not measured


class Uniform(Protocol):
    """What a mask is drawn from: numpy's Generator, or the RandomState of fastMRI's fixed masks."""

    def uniform(self, *, size: int) -> NDArray[np.float64]: ...


@dataclass(frozen=True)
class Undersampling:
    """How k-space is thinned out, and the size images are cropped to.

    Attributes:
        acceleration: columns there are for each one that is kept, on average.
        center_fraction: the share of columns around the lowest frequency that is always kept.
        height, width: the centre crop of input and target.
    """

    acceleration: float
    center_fraction: float
    height: int
    width: int

    def __post_init__(self) -> None:
        factor, share = self.acceleration, self.center_fraction
        rule = "must lie between 0 and 1/dataset.acceleration"
        require(0 <= share <= 1 / factor, "dataset.center_fraction", share, rule)


def draw_mask(
    columns: int,
    how: Undersampling,
    random: Uniform,
) -> NDArray[np.bool_]:
    """Keep the centre, and each other column so that columns/acceleration remain on average.

    fastMRI's RandomMaskFunc, draw for draw.

    Returns:
        bool [columns]
    """
    centre = round(columns * how.center_fraction)
    rest = columns - centre
    probability = (columns / how.acceleration - centre) / rest if rest else 0.0
    mask = random.uniform(size=columns) < probability
    start = (rest + 1) // 2
    mask[start : start + centre] = True
    return mask


def fixed_mask(
    columns: int,
    how: Undersampling,
    file_name: str,
) -> NDArray[np.bool_]:
    """The mask of a file in validation: fastMRI seeds it by the file's name, suffix included."""
    seed = [ord(letter) for letter in file_name]
    return draw_mask(columns, how, np.random.RandomState(seed))


def to_image(kspace: np.ndarray) -> np.ndarray:
    """Centred, unitary inverse Fourier transform over the last two axes (fastMRI's ifft2c)."""
    corner_first = np.fft.ifftshift(kspace, axes=(-2, -1))
    image = np.fft.ifft2(corner_first, norm="ortho")
    return np.fft.fftshift(image, axes=(-2, -1))


def to_kspace(image: np.ndarray) -> np.ndarray:
    """Centred, unitary Fourier transform over the last two axes (fastMRI's fft2c)."""
    corner_first = np.fft.ifftshift(image, axes=(-2, -1))
    kspace = np.fft.fft2(corner_first, norm="ortho")
    return np.fft.fftshift(kspace, axes=(-2, -1))


def centre_crop(
    image: np.ndarray,
    height: int,
    width: int,
) -> np.ndarray:
    """The middle `height` by `width` of the last two axes; fastMRI's rounding."""
    top = (image.shape[-2] - height) // 2
    left = (image.shape[-1] - width) // 2
    return image[..., top : top + height, left : left + width]


def undersample(
    kspace: np.ndarray,
    mask: np.ndarray,
    how: Undersampling,
) -> tuple[np.ndarray, np.ndarray]:
    """Return a slice as the network gets it, and its magnitude in the scanner's units.

    fastMRI subtracts the mean of the zero-filled MAGNITUDE and divides by its standard deviation. A
    complex image keeps its phase only if nothing is subtracted, so here it is divided by that
    standard deviation and no more. The number belongs to one slice; nothing of another slice or
    patient enters.

    Args:
        kspace: complex64 [rows, columns], or [coils, rows, columns], which are combined by the root
            of their sum of squares; no phase is left of them.
        mask: bool [columns].

    Returns:
        complex64 [height, width], whose magnitude has standard deviation 1; float32 [height,
        width], before that division.
    """
    image = centre_crop(to_image(kspace * mask), how.height, how.width)
    if image.ndim == 3:
        image = np.sqrt((np.abs(image) ** 2).sum(axis=0))
    magnitude = np.abs(image)
    scaled = image / (magnitude.std(ddof=1) + EPS)
    return scaled.astype(np.complex64), magnitude.astype(np.float32)
