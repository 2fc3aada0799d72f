"""Random changes of images, each decided by its example's row of uniforms.

Each time an example is drawn it is changed anew, inside the private step: its gradient is clipped
like any other, and every draw is counted. Flips and crops are ours, affine changes torchvision's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from zdp_bench.data import Augment
from zdp_bench.errors import require, unknown

PADDING = 4  # pixels on every side before a crop (He et al. 2016, section 4.2)
AUGMENTATIONS = ("flip", "crop_flip")


def augmentation(name: str | None, black: float | Tensor) -> Augment | None:
    """Look up an augmentation; None for none.

    Args:
        name: flip (left to right with probability ½), or crop_flip (a crop of the image padded by 4
            pixels, then flip).
        black: a black pixel after normalisation, for padding: a number, or one a channel [C, 1, 1].
    """
    if name is None:
        return None
    if name not in AUGMENTATIONS:
        raise unknown("dataset.augment", name, [*AUGMENTATIONS, "null"])
    return flip if name == "flip" else partial(crop_and_flip, black=black)


def flip(images: Tensor, uniforms: Tensor) -> Tensor:
    """Mirror each image [B, *, H, W] left to right if uniforms[:, 0] < ½."""
    mirrored = (uniforms[:, 0] < 0.5).to(images.device)
    per_image = mirrored.view(-1, *[1] * (images.dim() - 1))
    return torch.where(per_image, images.flip(-1), images)


def crop(
    images: Tensor,
    uniforms: Tensor,
    black: float | Tensor,
) -> Tensor:
    """Move each image [B, *, H, W] by up to 4 pixels, and fill in black.

    uniforms[:, 1] say how far down, uniforms[:, 2] how far across.
    """
    height, width = images.shape[-2:]
    steps = 2 * PADDING + 1
    down, across = (uniforms[:, 1:3] * steps).long().to(images.device).T  # 0 to 8
    padded = F.pad(images - black, (PADDING,) * 4)
    crops = padded.unfold(-2, height, 1).unfold(-2, width, 1)  # [B, *, 9, 9, H, W], a view
    example = torch.arange(len(images), device=images.device)
    return crops.movedim((-4, -3), (1, 2))[example, down, across] + black


def crop_and_flip(
    images: Tensor,
    uniforms: Tensor,
    black: float | Tensor,
) -> Tensor:
    """`crop`, then `flip`."""
    return flip(crop(images, uniforms, black), uniforms)


@dataclass(frozen=True)
class Affine:
    """Rotation, translation, scaling, shearing and flipping, each drawn uniformly.

    Attributes:
        degrees: rotation, at most ± this.
        translate: shift along each axis, at most ± this share of it.
        scale: magnification, within 1 ± scale.
        shear: shear along each axis, at most ± this many degrees.
        flip: whether half of the images are mirrored left to right.
        noise: standard deviation of Gaussian noise added to every pixel.
        fill: the pixel outside an image.
    """

    degrees: float
    translate: float
    scale: float
    shear: float
    flip: bool = False
    noise: float = 0.0
    fill: float = 0.0

    def __post_init__(self) -> None:
        for name in ("scale", "translate"):
            is_share = 0 <= getattr(self, name) < 1
            require(is_share, "dataset.augment", self, f"`{name}` must lie in [0, 1)")

    def images(self, images: Tensor, uniforms: Tensor) -> Tensor:
        """Change images [B, C, H, W] by uniforms [B, 8], bilinearly."""
        moved = self._move(images, uniforms, nearest=False)
        if not self.noise or not len(moved):
            return moved
        noise = []
        for seed in (uniforms[:, 7] * 2**53).long().tolist():
            generator = torch.Generator().manual_seed(seed)
            noise.append(torch.randn(moved.shape[1:], generator=generator))
        return moved + self.noise * torch.stack(noise).to(moved)

    def masks(self, masks: Tensor, uniforms: Tensor) -> Tensor:
        """Move masks [B, H, W] as their images are, by the nearest pixel, with 0 outside."""
        return self._move(masks.unsqueeze(1), uniforms, nearest=True).squeeze(1)

    def _move(
        self,
        x: Tensor,
        uniforms: Tensor,
        nearest: bool,
    ) -> Tensor:
        from torchvision.transforms import InterpolationMode
        from torchvision.transforms.v2 import functional as v2

        height, width = x.shape[-2:]
        mode = InterpolationMode.NEAREST if nearest else InterpolationMode.BILINEAR
        fill = 0.0 if nearest else self.fill
        # torchvision's own `fill` leaves a seam round bilinear images; zeros outside leave none.
        if fill:
            x = x - fill
        out = torch.empty_like(x)
        for index, row in enumerate((2 * uniforms - 1).tolist()):  # each in [-1, 1)
            image = x[index]
            if self.flip and row[6] < 0:
                image = v2.horizontal_flip(image)
            across = self.translate * width * row[1]
            down = self.translate * height * row[2]
            out[index] = v2.affine(
                image,
                angle=self.degrees * row[0],
                translate=[round(across), round(down)],
                scale=1 + self.scale * row[3],
                shear=[self.shear * row[4], self.shear * row[5]],
                interpolation=mode,
            )
        return out + fill if fill else out
