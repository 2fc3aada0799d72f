"""U-Net (Ronneberger et al. 2015), complex or real.

Channels double at each level, starting from `width`. Levels are joined by 2×2 pooling, 2×2
transposed convolutions and skip connections, and each convolution may be followed by a
normalisation per example. fastMRI's U-Net pools by average, the original by maximum.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated

import torch
import torch.nn.functional as F
from annotated_types import Ge
from torch import Tensor, nn

from zdp_bench.errors import require
from zdp_bench.models import Width, image_shape
from zdp_bench.nn.activations import activation as make_activation
from zdp_bench.nn.convolution import ComplexConv2d, ComplexConvTranspose2d
from zdp_bench.nn.normalisation import per_sample_norm
from zdp_bench.nn.pooling import ComplexAvgPool2d
from zdp_bench.registry import register

Depth = Annotated[int, Ge(0)]


class UNet(nn.Module):
    """A U-Net. Shapes: [B, C, H, W] -> [B, outputs, H, W]; complex weights return |z|.

    Odd sizes are padded by reflection on the way up, as in fastMRI's U-Net. Examples with several
    slices, [B, slices, C, H, W], are processed slice by slice.

    Args:
        width: channels of the first level.
        depth: number of poolings.
        activation: registered name of the activation.
        normalisation: see `per_sample_norm`. Default: none.
        residual: add the input to the output. The last layer then starts at zero, so that training
            starts from the input itself.
        re_im: convert a complex input to real channels, its two parts, and return |Re + i·Im|.
        pool: class of the pooling of real networks.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        outputs: int,
        width: int,
        depth: int,
        activation: str,
        dtype: torch.dtype,
        normalisation: str | None = None,
        residual: bool = False,
        re_im: bool = False,
        pool: type[nn.Module] = nn.AvgPool2d,
    ) -> None:
        super().__init__()
        kind = "complex" if dtype.is_complex else "real"
        channels, height, image_width = image_shape(f"{kind}_unet", input_shape[-3:])
        rule = f"{height}×{image_width} cannot be halved {depth} times"
        require(min(height, image_width) >= 2**depth, "model.depth", depth, rule)
        rule = f"{channels} channels in, {outputs} out"
        require(not residual or channels == outputs, "model.residual", residual, rule)
        if re_im:
            channels, outputs = 2 * channels, 2 * outputs
        conv = ComplexConv2d if dtype.is_complex else nn.Conv2d
        transposed = ComplexConvTranspose2d if dtype.is_complex else nn.ConvTranspose2d

        def block(in_channels: int, out_channels: int) -> nn.Sequential:
            layers: list[nn.Module] = []
            for conv_channels in (in_channels, out_channels):
                layers.append(conv(conv_channels, out_channels, 3, padding=1, dtype=dtype))
                layers += per_sample_norm(normalisation, out_channels, dtype)
                layers.append(make_activation(activation, out_channels, dtype))
            return nn.Sequential(*layers)

        widths = [width * 2**level for level in range(depth + 1)]
        self.down = nn.ModuleList(block(*pair) for pair in pairwise([channels, *widths]))
        self.pool = ComplexAvgPool2d(2) if dtype.is_complex else pool(2)
        self.up = nn.ModuleList()
        for level_width in widths[-2::-1]:
            self.up.append(transposed(2 * level_width, level_width, 2, 2, dtype=dtype))
        self.join = nn.ModuleList()
        for level_width in widths[-2::-1]:
            self.join.append(block(2 * level_width, level_width))
        self.last = conv(width, outputs, 1, dtype=dtype)
        self.dtype, self.residual, self.re_im = dtype, residual, re_im
        if residual:
            for parameter in self.last.parameters():
                nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 5:
            return self(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        if self.re_im:
            x = torch.view_as_real(x).movedim(-1, 2).flatten(1, 2)  # [B, 2C, H, W]
        x = y = x.to(self.dtype)
        skipped: list[Tensor] = []
        for level, block in enumerate(self.down):
            y = block(self.pool(y) if level else y)
            skipped.append(y)
        skipped.pop()
        for up, join in zip(self.up, self.join, strict=True):
            skip = skipped.pop()
            larger = pad_to(up(y), skip)
            y = join(torch.cat([larger, skip], dim=1))
        y = self.last(y)
        if self.residual:
            y = y + x
        if self.re_im:
            return torch.linalg.vector_norm(y.unflatten(1, (-1, 2)), dim=2)
        return y.abs() if y.is_complex() else y


def pad_to(x: Tensor, like: Tensor) -> Tensor:
    """Pad x [B, C, H, W] by reflection to the height and width of `like`, at most one larger."""
    below = like.shape[-2] - x.shape[-2]
    right = like.shape[-1] - x.shape[-1]
    if not below and not right:
        return x
    return F.pad(x, (0, right, 0, below), mode="reflect")


@register("model", "complex_unet")
def complex_unet(
    input_shape: tuple[int, ...],
    outputs: int,
    *,
    width: Width = 32,
    depth: Depth = 4,
    activation: str = "crelu",
    normalisation: str | None = None,
    residual: bool = False,
) -> UNet:
    """A complex U-Net; width 32 and depth 4 give 7.8 million complex parameters."""
    more = normalisation, residual
    return UNet(input_shape, outputs, width, depth, activation, torch.complex64, *more)


@register("model", "real_unet")
def real_unet(
    input_shape: tuple[int, ...],
    outputs: int,
    *,
    width: Width = 32,
    depth: Depth = 4,
    activation: str = "relu",
    normalisation: str | None = None,
    residual: bool = False,
    re_im: bool = False,
) -> UNet:
    """The U-Net with real weights."""
    more = normalisation, residual, re_im
    return UNet(input_shape, outputs, width, depth, activation, torch.float32, *more)


@register("model", "transposed_unet")
def transposed_unet(
    input_shape: tuple[int, ...],
    outputs: int,
    *,
    width: Width = 64,
    depth: Depth = 4,
) -> UNet:
    """The original U-Net with padded convolutions, as Ziller et al. 2021 (deepee) use it."""
    return UNet(input_shape, outputs, width, depth, "relu", torch.float32, pool=nn.MaxPool2d)
