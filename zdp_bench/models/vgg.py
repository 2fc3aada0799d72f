"""VGG-11 (Simonyan & Zisserman 2015, configuration A), and a U-Net with it as encoder.

The medical classifier of Ziller et al. 2021 (deepee) is VGG-11 with BatchNorm, without running
statistics. Their framework runs one copy of the network per example, so each BatchNorm sees ONE
example and normalises it by its own maps, which is an instance norm. Here this is `norm: batch`
with `replace_batchnorm: instance`; the record of a run lists the replaced layers.

The segmentation network of the same paper follows Iglovikov & Shvets 2018. The paper does not
describe the decoder. It ran this network with Opacus, which did not support transposed
convolutions, so the decoder here upsamples: nearest-neighbour interpolation, then two convolutions,
with 4, 2, 1, ½ and ¼ times the encoder's first width, as in the segmentation-models library of that
time.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from zdp_bench.errors import require
from zdp_bench.models import Width, image_shape
from zdp_bench.registry import register

Norm = Literal["none", "batch", "group"]

# widths of the convolutions, as multiples of the first; each stage ends in a 2×2 max-pooling
STAGES = ((1,), (2,), (4, 4), (8, 8), (8, 8))
SMALLEST = 2 ** len(STAGES)


def norm_layers(
    norm: Norm,
    groups: int,
    channels: int,
) -> list[nn.Module]:
    """Return the normalisation of `channels` maps, as a list of one layer or none.

    BatchNorm has no running statistics.

    Args:
        norm: kind of the normalisation.
        groups: number of groups of a GroupNorm.
        channels: number of maps.
    """
    if norm == "group":
        rule = f"must divide the {channels} maps of every layer"
        require(channels % groups == 0, "model.groups", groups, rule)
        return [nn.GroupNorm(groups, channels)]
    if norm == "batch":
        return [nn.BatchNorm2d(channels, track_running_stats=False)]
    return []


def convolution(
    in_channels: int,
    out_channels: int,
    norm: Norm,
    groups: int,
) -> list[nn.Module]:
    """Return the layers of a 3×3 convolution, its normalisation and a ReLU.

    Shapes: [B, in_channels, H, W] -> [B, out_channels, H, W].
    """
    return [
        nn.Conv2d(in_channels, out_channels, 3, padding=1),
        *norm_layers(norm, groups, out_channels),
        nn.ReLU(),
    ]


def encoder_stages(
    image_channels: int,
    width: int,
    norm: Norm,
    groups: int,
) -> list[list[nn.Module]]:
    """Return the layers of each stage, without the pooling that follows."""
    stages = []
    channels = image_channels
    for widths in STAGES:
        layers: list[nn.Module] = []
        for multiple in widths:
            layers += convolution(channels, multiple * width, norm, groups)
            channels = multiple * width
        stages.append(layers)
    return stages


@register("model", "vgg11")
class VGG(nn.Module):
    """VGG-11.

    Shapes: [B, C, H, W], H and W at least 32, -> [B, outputs].

    Args:
        norm, groups: see `norm_layers`.
        width: number of maps in the first stage.
        pool: rows and columns to which the last map is pooled, for inputs of any size.
        hidden: width of the linear layers.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        outputs: int,
        *,
        norm: Norm = "none",
        groups: Width = 32,
        width: Width = 64,
        pool: Width = 7,
        hidden: Width = 4096,
    ) -> None:
        super().__init__()
        image_channels, height, image_width = image_shape("vgg11", input_shape)
        is_large = min(height, image_width) >= SMALLEST
        rule = f"images of at least {SMALLEST}² are needed"
        require(is_large, "model=vgg11", f"{height}×{image_width}", rule)
        stages = encoder_stages(image_channels, width, norm, groups)
        layers: list[nn.Module] = []
        for stage in stages:
            layers += [*stage, nn.MaxPool2d(2)]
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(pool)
        self.classifier = nn.Sequential(
            nn.Linear(STAGES[-1][-1] * width * pool**2, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, outputs),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.pool(self.features(x)).flatten(1))


@register("model", "vgg11_unet")
class VGGUNet(nn.Module):
    """U-Net with a VGG-11 encoder and skip connections at five scales.

    Shapes: [B, C, H, W] -> [B, outputs, H, W], H and W divisible by 32.

    Args:
        norm, groups, width: see `VGG`; groups must divide a quarter of the width.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        outputs: int,
        *,
        norm: Norm = "none",
        groups: Width = 4,
        width: Width = 64,
    ) -> None:
        super().__init__()
        image_channels, height, image_width = image_shape("vgg11_unet", input_shape)
        divides = height % SMALLEST == 0 and image_width % SMALLEST == 0
        rule = f"height and width must be divisible by {SMALLEST}"
        require(divides, "model=vgg11_unet", f"{height}×{image_width}", rule)
        rule = "must be a multiple of 4, because the last layers have a quarter of it"
        require(width % 4 == 0, "model.width", width, rule)
        self.down = nn.ModuleList(
            nn.Sequential(*stage) for stage in encoder_stages(image_channels, width, norm, groups)
        )
        self.pool = nn.MaxPool2d(2)
        encoder_widths = [stage[-1] * width for stage in STAGES]
        deepest = encoder_widths[-1]
        self.centre = nn.Sequential(
            *convolution(deepest, deepest, norm, groups),
            *convolution(deepest, deepest, norm, groups),
        )
        self.up = nn.Upsample(scale_factor=2, mode="nearest")
        decoder_widths = [4 * width, 2 * width, width, width // 2, width // 4]
        self.join = nn.ModuleList()
        channels_below = deepest
        for skipped, out_channels in zip(reversed(encoder_widths), decoder_widths, strict=True):
            first = convolution(channels_below + skipped, out_channels, norm, groups)
            second = convolution(out_channels, out_channels, norm, groups)
            self.join.append(nn.Sequential(*first, *second))
            channels_below = out_channels
        self.last = nn.Conv2d(decoder_widths[-1], outputs, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        skipped: list[Tensor] = []
        for stage in self.down:
            x = stage(x)
            skipped.append(x)
            x = self.pool(x)
        x = self.centre(x)
        for join in self.join:
            larger = self.up(x)
            x = join(torch.cat([larger, skipped.pop()], dim=1))
        return self.last(x)
