"""One convolution and one linear layer, complex or real.

The network of Ziller et al. 2021, Table 7 (3 → 32, 3×3; 28800 → 1).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zdp_bench.models.shape import at_least_one, image_shape
from zdp_bench.nn.convolution import ComplexConv2d
from zdp_bench.nn.map_linear import MapLinear
from zdp_bench.registry import register


class ConvLinear(nn.Module):
    """conv (3×3, no padding) → flatten → linear.

    Shapes: [B, C, H, W] -> [B, outputs]; complex weights return |z|.
    """

    def __init__(
        self, input_shape: tuple[int, ...], outputs: int, channels: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        kind = "complex" if dtype.is_complex else "real"
        images, height, width = image_shape(f"{kind}_conv_linear", input_shape)
        at_least_one("model.channels", channels)
        conv = ComplexConv2d if dtype.is_complex else nn.Conv2d
        self.conv = conv(images, channels, 3, dtype=dtype)
        linear = MapLinear if dtype.is_complex else nn.Linear  # Opacus supports the real one
        self.linear = linear(channels * (height - 2) * (width - 2), outputs, dtype=dtype)
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x.to(self.dtype))
        return self.linear(y).abs() if y.is_complex() else self.linear(y.flatten(1))


@register("model", "complex_conv_linear")
def complex_conv_linear(
    input_shape: tuple[int, ...], outputs: int, *, channels: int = 32
) -> ConvLinear:
    """The complex network of Table 7."""
    return ConvLinear(input_shape, outputs, channels, torch.complex64)


@register("model", "real_conv_linear")
def real_conv_linear(
    input_shape: tuple[int, ...], outputs: int, *, channels: int = 32
) -> ConvLinear:
    """The same network with real weights."""
    return ConvLinear(input_shape, outputs, channels, torch.float32)
