"""U-Net with a VGG-11 encoder: the segmentation network of Ziller et al. 2021 (deepee), after
Iglovikov & Shvets 2018.

The paper does not describe the decoder. Opacus ran this network and did not support transposed
convolutions, so it upsamples: nearest neighbour, then two convolutions, widths 4, 2, 1, ½, ¼ of the
encoder's first, as in the segmentation-models library of that time.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zdp_bench.errors import require
from zdp_bench.models.shape import image_shape
from zdp_bench.models.vgg import SMALLEST, STAGES, Norm, convolution, encoder_stages
from zdp_bench.registry import register


class VGGUNet(nn.Module):
    """Shapes: [B, C, H, W] -> [B, outputs, H, W], H and W divisible by 32.

    It has a skip connection at each of five scales.
    """

    def __init__(
        self, input_shape: tuple[int, ...], outputs: int, norm: Norm, groups: int, width: int
    ) -> None:
        super().__init__()
        images, height, wide = image_shape("vgg11_unet", input_shape)
        require(
            height % SMALLEST == 0 == wide % SMALLEST,
            "model=vgg11_unet",
            f"{height}×{wide}",
            f"images must divide by {SMALLEST}",
        )
        require(
            width % 4 == 0 and width > 0,
            "model.width",
            width,
            "must be a multiple of 4, for the last layers have a quarter",
        )
        self.down = nn.ModuleList(
            nn.Sequential(*stage) for stage in encoder_stages(images, width, norm, groups)
        )
        self.pool = nn.MaxPool2d(2)
        skipped = [stage[-1] * width for stage in STAGES]
        deepest = skipped[-1]
        self.centre = nn.Sequential(
            *convolution(deepest, deepest, norm, groups),
            *convolution(deepest, deepest, norm, groups),
        )
        self.up = nn.Upsample(scale_factor=2, mode="nearest")
        narrow = [4 * width, 2 * width, width, width // 2, width // 4]
        joined = [
            below + beside
            for below, beside in zip([deepest, *narrow[:-1]], reversed(skipped), strict=True)
        ]
        self.join = nn.ModuleList(
            nn.Sequential(
                *convolution(inside, out, norm, groups), *convolution(out, out, norm, groups)
            )
            for inside, out in zip(joined, narrow, strict=True)
        )
        self.last = nn.Conv2d(narrow[-1], outputs, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        skipped: list[Tensor] = []
        for stage in self.down:
            x = stage(x)
            skipped.append(x)
            x = self.pool(x)
        x = self.centre(x)
        for join in self.join:
            x = join(torch.cat([self.up(x), skipped.pop()], dim=1))
        return self.last(x)


@register("model", "vgg11_unet")
def vgg11_unet(
    input_shape: tuple[int, ...],
    outputs: int,
    *,
    norm: Norm = "none",
    groups: int = 4,
    width: int = 64,
) -> VGGUNet:
    """U-Net with a VGG-11 encoder.

    Args:
        norm, groups, width: as for `vgg11`; groups must divide a quarter of the width.
    """
    return VGGUNet(input_shape, outputs, norm, groups, width)
