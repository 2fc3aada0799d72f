"""k-space: Fourier transforms, fastMRI's random mask, and a slice's zero-filled image.

Definitions follow fastMRI (Zbontar et al. 2018, arXiv:1811.08839, section 5). Rows are readouts and
columns are phase-encoding steps. Acceleration omits columns, so a mask is one flag per column.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from zdp_bench.errors import require

EPS = 1e-11  # added to a slice's standard deviation, as in fastMRI
SSIM_WINDOW = 7  # pixels; SSIM is not defined for a smaller image


class Uniform(Protocol):
    """Source of uniform numbers: NumPy's `Generator`, or `RandomState` as in fastMRI's masks."""

    def uniform(self, *, size: int) -> NDArray[np.float64]: ...


@dataclass(frozen=True)
class Undersampling:
    """How k-space is undersampled, and the size to which images are cropped.

    Attributes:
        acceleration: number of columns divided by the average number of kept columns.
        center_fraction: fraction of columns, around the lowest frequency, that are always kept.
        height, width: size of the centre crop of inputs and targets, in pixels.
    """

    acceleration: float
    center_fraction: float
    height: int
    width: int

    def __post_init__(self) -> None:
        fraction = self.center_fraction
        rule = "must lie between 0 and 1/dataset.acceleration"
        require(0 <= fraction <= 1 / self.acceleration, "dataset.center_fraction", fraction, rule)


def draw_mask(
    columns: int,
    undersampling: Undersampling,
    random: Uniform,
) -> NDArray[np.bool_]:
    """Draw the columns to keep: the centre, and others so that columns / acceleration are expected.

    With the same random numbers, this is the mask of fastMRI's `RandomMaskFunc`.

    Returns:
        True for each column that is kept, [columns].
    """
    centre = round(columns * undersampling.center_fraction)
    rest = columns - centre
    probability = (columns / undersampling.acceleration - centre) / rest if rest else 0.0
    mask = random.uniform(size=columns) < probability
    start = (rest + 1) // 2
    mask[start : start + centre] = True
    return mask


def fixed_mask(
    columns: int,
    undersampling: Undersampling,
    file_name: str,
) -> NDArray[np.bool_]:
    """Return fastMRI's mask for a test file, which is seeded with the file's name and suffix."""
    seed = [ord(letter) for letter in file_name]
    return draw_mask(columns, undersampling, np.random.RandomState(seed))


def to_image(kspace: np.ndarray) -> np.ndarray:
    """Apply the centred, unitary inverse Fourier transform to the last two axes, as `ifft2c`."""
    corner_first = np.fft.ifftshift(kspace, axes=(-2, -1))
    image = np.fft.ifft2(corner_first, norm="ortho")
    return np.fft.fftshift(image, axes=(-2, -1))


def to_kspace(image: np.ndarray) -> np.ndarray:
    """Apply the centred, unitary Fourier transform to the last two axes, as fastMRI's `fft2c`."""
    corner_first = np.fft.ifftshift(image, axes=(-2, -1))
    kspace = np.fft.fft2(corner_first, norm="ortho")
    return np.fft.fftshift(kspace, axes=(-2, -1))


def centre_crop(
    image: np.ndarray,
    height: int,
    width: int,
) -> np.ndarray:
    """Crop the middle [height, width] of the last two axes, rounding as fastMRI does."""
    top = (image.shape[-2] - height) // 2
    left = (image.shape[-1] - width) // 2
    return image[..., top : top + height, left : left + width]


def undersample(
    kspace: np.ndarray,
    mask: np.ndarray,
    undersampling: Undersampling,
    field_of_view: tuple[int, int],
) -> tuple[np.ndarray, np.ndarray]:
    """Reconstruct the zero-filled image of an undersampled slice, as input of a network.

    fastMRI subtracts the mean of the zero-filled MAGNITUDE and divides by its standard deviation.
    Subtracting would change the phase of a complex image, so here the image is only divided by that
    standard deviation. The result depends on this slice alone.

    Args:
        kspace: complex64 [rows, columns], or [coils, rows, columns]. Coils are combined by the root
            of their sum of squares, which loses the phase.
        mask: True for each column to keep, [columns].
        undersampling: size of the crop.
        field_of_view: (height, width) in pixels that the reference shows too. The image is cropped
            to it before the crop, as the reference was: two centre crops in a row may start one
            pixel away from a single one.

    Returns:
        The scaled image, complex64 [height, width], whose magnitude has standard deviation 1, and
        the magnitude before scaling, in the scanner's units, float32 [height, width].
    """
    whole = centre_crop(to_image(kspace * mask), *field_of_view)
    image = centre_crop(whole, undersampling.height, undersampling.width)
    if image.ndim == 3:
        image = np.sqrt((np.abs(image) ** 2).sum(axis=0))
    magnitude = np.abs(image)
    scaled = image / (magnitude.std(ddof=1) + EPS)
    return scaled.astype(np.complex64), magnitude.astype(np.float32)
