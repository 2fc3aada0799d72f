"""Random flips and crops of training images, each decided by its example's row of uniforms."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from zdp_bench.data import Augment
from zdp_bench.errors import unknown

PADDING = 4  # pixels on every side before a crop (He et al. 2016, section 4.2)
AUGMENTATIONS = ("flip", "crop_flip")


def augmentation(name: str | None, black: float | Tensor) -> Augment | None:
    """Look up an augmentation; None for none.

    Args:
        name: flip (left to right with probability ½), or crop_flip (a crop of the image padded by 4
            pixels, then flip).
        black: a black pixel after normalisation, for padding: a number, or one a channel [C, 1, 1].

    Raises:
        UserError: no augmentation has this name.
    """
    if name is None:
        return None
    if name not in AUGMENTATIONS:
        raise unknown("dataset.augment", name, [*AUGMENTATIONS, "null"])
    return flip if name == "flip" else partial(crop_and_flip, black=black)


def flip(images: Tensor, uniforms: Tensor) -> Tensor:
    """Mirror each image [B, *, H, W] left to right if uniforms[:, 0] < ½."""
    mirrored = (uniforms[:, 0] < 0.5).view(-1, *[1] * (images.dim() - 1))
    return torch.where(mirrored.to(images.device), images.flip(-1), images)


def crop(images: Tensor, uniforms: Tensor, black: float | Tensor) -> Tensor:
    """Move each image [B, *, H, W] by up to 4 pixels, and fill in black.

    uniforms[:, 1] say how far down, uniforms[:, 2] how far across.
    """
    height, width = images.shape[-2:]
    corner = (uniforms[:, 1:3] * (2 * PADDING + 1)).long().to(images.device)  # [B, 2], 0 to 8
    rows = corner[:, :1] + torch.arange(height, device=images.device)  # [B, H]
    columns = corner[:, 1:] + torch.arange(width, device=images.device)  # [B, W]
    example = torch.arange(len(images), device=images.device).view(-1, 1, 1)
    padded = F.pad(images - black, (PADDING,) * 4).movedim((-2, -1), (1, 2))  # [B, H + 8, W + 8, *]
    return (
        padded[example, rows.unsqueeze(2), columns.unsqueeze(1)].movedim((1, 2), (-2, -1)) + black
    )


def crop_and_flip(images: Tensor, uniforms: Tensor, black: float | Tensor) -> Tensor:
    """`crop`, then `flip`."""
    return flip(crop(images, uniforms, black), uniforms)
