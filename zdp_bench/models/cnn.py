"""Small CNNs, complex or real, with several convolutions or one.

The network with one convolution and one linear layer is that of Ziller et al. 2021, Table 7
(3 → 32, 3×3; 28800 → 1).
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from zdp_bench.errors import require
from zdp_bench.models import Width, image_shape
from zdp_bench.nn.activations import activation as make_activation
from zdp_bench.nn.convolution import ComplexConv2d
from zdp_bench.nn.memory_format import MapLinear
from zdp_bench.nn.pooling import ComplexAvgPool2d
from zdp_bench.registry import register


class CNN(nn.Module):
    """3×3 convolutions with padding, each followed by an activation and 2×2 average pooling.

    Shapes: [B, C, H, W] -> [B, outputs]; complex weights return |z|.

    Args:
        widths: number of channels of each convolution.
        activation: registered name of the activation.
        dtype: data type of the weights, complex64 or float32.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        outputs: int,
        widths: list[int],
        activation: str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        kind = "complex" if dtype.is_complex else "real"
        image_channels, height, width = image_shape(f"{kind}_cnn", input_shape)
        require(len(widths) > 0, "model.channels", widths, "must list at least one width")
        fits = min(height, width) >= 2 ** len(widths)
        require(fits, "model.channels", widths, f"{height}×{width} is too small for that depth")
        conv = ComplexConv2d if dtype.is_complex else nn.Conv2d
        pool = ComplexAvgPool2d if dtype.is_complex else nn.AvgPool2d
        stages: list[nn.Module] = []
        for in_channels, out_channels in pairwise([image_channels, *widths]):
            stages += [
                conv(in_channels, out_channels, 3, padding=1, dtype=dtype),
                make_activation(activation, out_channels, dtype),
                pool(2),
            ]
        self.stages = nn.Sequential(*stages)
        num_positions = (height >> len(widths)) * (width >> len(widths))
        linear = MapLinear if dtype.is_complex else nn.Linear  # Opacus supports the real one
        self.head = linear(widths[-1] * num_positions, outputs, dtype=dtype)
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        y = self.stages(x.to(self.dtype))
        return self.head(y).abs() if y.is_complex() else self.head(y.flatten(1))


@register("model", "complex_cnn")
def complex_cnn(
    input_shape: tuple[int, ...],
    outputs: int,
    *,
    channels: list[Width],
    activation: str = "crelu",
) -> CNN:
    """A small complex CNN; `channels` lists the width of each convolution."""
    return CNN(input_shape, outputs, channels, activation, torch.complex64)


@register("model", "real_cnn")
def real_cnn(
    input_shape: tuple[int, ...],
    outputs: int,
    *,
    channels: list[Width],
    activation: str = "relu",
) -> CNN:
    """The CNN of `complex_cnn` with real weights."""
    return CNN(input_shape, outputs, channels, activation, torch.float32)


class ConvLinear(nn.Module):
    """A 3×3 convolution without padding, followed by a linear layer.

    Shapes: [B, C, H, W] -> [B, outputs]; complex weights return |z|.

    Args:
        channels: number of channels of the convolution.
        dtype: data type of the weights, complex64 or float32.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        outputs: int,
        channels: int,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        kind = "complex" if dtype.is_complex else "real"
        image_channels, height, width = image_shape(f"{kind}_conv_linear", input_shape)
        conv = ComplexConv2d if dtype.is_complex else nn.Conv2d
        self.conv = conv(image_channels, channels, 3, dtype=dtype)
        linear = MapLinear if dtype.is_complex else nn.Linear  # Opacus supports the real one
        self.linear = linear(channels * (height - 2) * (width - 2), outputs, dtype=dtype)
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x.to(self.dtype))
        return self.linear(y).abs() if y.is_complex() else self.linear(y.flatten(1))


@register("model", "complex_conv_linear")
def complex_conv_linear(
    input_shape: tuple[int, ...],
    outputs: int,
    *,
    channels: Width = 32,
) -> ConvLinear:
    """The complex network of Table 7."""
    return ConvLinear(input_shape, outputs, channels, torch.complex64)


@register("model", "real_conv_linear")
def real_conv_linear(
    input_shape: tuple[int, ...],
    outputs: int,
    *,
    channels: Width = 32,
) -> ConvLinear:
    """The network of `complex_conv_linear` with real weights."""
    return ConvLinear(input_shape, outputs, channels, torch.float32)
