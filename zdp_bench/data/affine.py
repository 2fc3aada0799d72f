"""Random affine changes of images, by torchvision's v2 transforms: a record's own row of uniforms decides its own change.

Every drawn occurrence of a record is changed anew, inside the private step: its gradient is clipped like any other, and each
occurrence is counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zdp_bench.errors import require


@dataclass(frozen=True)
class Affine:
    """Rotation, translation, scaling, shearing and flipping, each drawn uniformly.

    Attributes:
        degrees: rotation lies in ±degrees.
        translate: shift along each axis lies in ± this share of it.
        scale: magnification lies in 1 ± scale.
        shear: shear along each axis lies in ± this many degrees.
        flip: whether half of the images are mirrored left to right.
        noise: standard deviation of Gaussian noise added to every pixel.
        fill: what comes in from outside an image.
    """

    degrees: float
    translate: float
    scale: float
    shear: float
    flip: bool = False
    noise: float = 0.0
    fill: float = 0.0

    def __post_init__(self) -> None:
        require(0 <= self.scale < 1, "dataset.augment", self, "the scale must lie in [0, 1)")
        require(
            0 <= self.translate < 1, "dataset.augment", self, "the translation must lie in [0, 1)"
        )

    def images(self, images: Tensor, uniforms: Tensor) -> Tensor:
        """Images [B, C, H, W] and uniforms [B, 8] -> changed images [B, C, H, W], bilinear."""
        moved = self._moved(images, uniforms, nearest=False)
        if not self.noise:
            return moved
        noise = [
            torch.randn(image.shape, generator=_generator(row))
            for image, row in zip(moved, uniforms, strict=True)
        ]
        return moved + self.noise * torch.stack(noise).to(moved) if noise else moved

    def masks(self, masks: Tensor, uniforms: Tensor) -> Tensor:
        """Masks [B, H, W] moved as their images are, by the nearest pixel; 0 comes in from outside."""
        return self._moved(masks.unsqueeze(1), uniforms, nearest=True).squeeze(1)

    def _moved(self, x: Tensor, uniforms: Tensor, nearest: bool) -> Tensor:
        from torchvision.transforms import InterpolationMode
        from torchvision.transforms.v2 import functional as v2

        height, width = x.shape[-2:]
        fill, mode = (
            (0.0, InterpolationMode.NEAREST) if nearest else (self.fill, InterpolationMode.BILINEAR)
        )
        x = (
            x - fill if fill else x
        )  # zeros come in then: torchvision's own `fill` leaves a seam round bilinear images
        out = torch.empty_like(x)
        for index, row in enumerate((2 * uniforms - 1).tolist()):  # each in [-1, 1)
            out[index] = v2.affine(
                v2.horizontal_flip(x[index]) if self.flip and row[6] < 0 else x[index],
                angle=self.degrees * row[0],
                translate=[
                    round(self.translate * width * row[1]),
                    round(self.translate * height * row[2]),
                ],
                scale=1 + self.scale * row[3],
                shear=[self.shear * row[4], self.shear * row[5]],
                interpolation=mode,
            )
        return out + fill if fill else out


def _generator(row: Tensor) -> torch.Generator:
    """The noise of one record, from the last number of its uniforms."""
    return torch.Generator().manual_seed(int(row[7] * 2**53))
