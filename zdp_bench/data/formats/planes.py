"""Turn the planes of a scan into bytes of one size. Each depends on itself alone, never on others.

Shapes: [n, Y, X] -> [n, size, size].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

Window = tuple[float, float] | None


def to_bytes(image: Tensor, window: Window) -> Tensor:
    """Map [n, Y, X] in the file's units to 0 to 255.

    Args:
        window: (low, high); None: each plane's own 1st and 99th percentile.
    """
    if window:
        low, high = torch.tensor(window[0]), torch.tensor(window[1])
    else:
        share = torch.tensor([0.01, 0.99])
        low, high = torch.quantile(image.flatten(1), share, dim=1)[:, :, None, None]
    return ((image - low) / (high - low).clamp(min=1e-6)).clamp(0, 1) * 255


def resample(image: Tensor, target: tuple[int, int]) -> Tensor:
    """Resample planes to (rows, columns), bilinearly, without aliasing."""
    return F.interpolate(image.unsqueeze(1), target, mode="bilinear", antialias=True).squeeze(1)


def resample_mask(mask: Tensor, target: tuple[int, int]) -> Tensor:
    """Resample masks to (rows, columns) by the nearest pixel."""
    return F.interpolate(mask.unsqueeze(1), target, mode="nearest-exact").squeeze(1)


def crop_square(image: Tensor) -> Tensor:
    """Cut the largest square out of the middle of each plane."""
    rows, columns = image.shape[-2:]
    side = min(rows, columns)
    top, left = (rows - side) // 2, (columns - side) // 2
    return image[..., top : top + side, left : left + side]
