"""Random augmentation of images, determined by each example's row of uniforms.

An example is augmented anew each time a private step draws it. This costs no additional ε: the
gradient of an augmented example is clipped like any other. Affine maps are torchvision's.
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
    """Return the augmentation of a name; None if the name is None.

    Args:
        name: "flip" (mirror left to right with probability ½) or "crop_flip" (crop the image,
            padded by 4 pixels, to its size; then flip).
        black: value of a black pixel after normalisation, for padding: a number, or one per channel
            [C, 1, 1].
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
    """Pad each image [B, *, H, W] by 4 black pixels, and crop it to its size at random.

    uniforms[:, 1] determine the first row of the crop, and uniforms[:, 2] its first column.
    """
    height, width = images.shape[-2:]
    steps = 2 * PADDING + 1
    top, left = (uniforms[:, 1:3] * steps).long().to(images.device).T  # each from 0 to 8
    padded = F.pad(images - black, (PADDING,) * 4)  # `F.pad` pads with 0, which is black here
    crops = padded.unfold(-2, height, 1).unfold(-2, width, 1)  # [B, *, 9, 9, H, W], a view
    example = torch.arange(len(images), device=images.device)
    return crops.movedim((-4, -3), (1, 2))[example, top, left] + black


def crop_and_flip(
    images: Tensor,
    uniforms: Tensor,
    black: float | Tensor,
) -> Tensor:
    """Apply `crop`, then `flip`."""
    return flip(crop(images, uniforms, black), uniforms)


@dataclass(frozen=True)
class Affine:
    """Random rotation, translation, scaling, shear, flip and noise.

    Attributes:
        degrees: maximum rotation to either side, in degrees.
        translate: maximum shift along each axis, as a fraction of the image's length.
        scale: maximum difference of the scaling factor from 1.
        shear: maximum shear along each axis to either side, in degrees.
        flip: mirror left to right with probability ½.
        noise: standard deviation of the Gaussian noise added to every pixel of an image.
        fill: value of pixels outside the image.
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
            is_fraction = 0 <= getattr(self, name) < 1
            require(is_fraction, "dataset.augment", self, f"`{name}` must lie in [0, 1)")

    def images(self, images: Tensor, uniforms: Tensor) -> Tensor:
        """Augment images [B, C, H, W] with uniforms [B, 8], interpolating bilinearly."""
        moved = self._move(images, uniforms, nearest=False)
        if not self.noise or not len(moved):
            return moved
        noise = []
        for seed in (uniforms[:, 7] * 2**53).long().tolist():
            generator = torch.Generator().manual_seed(seed)
            noise.append(torch.randn(moved.shape[1:], generator=generator))
        return moved + self.noise * torch.stack(noise).to(moved)

    def masks(self, masks: Tensor, uniforms: Tensor) -> Tensor:
        """Apply the affine map of the images to their masks [B, H, W]; pixels outside are 0."""
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
        # torchvision's `fill` leaves a seam around bilinearly interpolated images, unless it is 0.
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
