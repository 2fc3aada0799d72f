"""A small CNN, complex or real: convolution, activation, average pooling, repeated; then a linear
layer.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from zdp_bench.errors import require
from zdp_bench.models.shape import at_least_one, image_shape
from zdp_bench.nn.activations import activation as make_activation
from zdp_bench.nn.convolution import ComplexConv2d
from zdp_bench.nn.map_linear import MapLinear
from zdp_bench.nn.pooling import ComplexAvgPool2d
from zdp_bench.registry import register


class CNN(nn.Module):
    """3×3 convolutions with padding, each followed by pooling to half the map.

    Shapes: [B, C, H, W] -> [B, outputs]; complex weights return |z|.
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
        images, height, width = image_shape(f"{kind}_cnn", input_shape)
        at_least_one("model.channels", widths)
        require(
            min(height, width) >= 2 ** len(widths),
            "model.channels",
            widths,
            f"{height}×{width} is too small for that depth",
        )
        conv, pool = (
            (ComplexConv2d, ComplexAvgPool2d) if dtype.is_complex else (nn.Conv2d, nn.AvgPool2d)
        )
        stages: list[nn.Module] = []
        for wide, narrow in pairwise([images, *widths]):
            stages += [
                conv(wide, narrow, 3, padding=1, dtype=dtype),
                make_activation(activation, narrow, dtype),
                pool(2),
            ]
        self.stages = nn.Sequential(*stages)
        for _ in widths:
            height, width = height // 2, width // 2
        linear = MapLinear if dtype.is_complex else nn.Linear  # Opacus supports the real one
        self.head = linear(widths[-1] * height * width, outputs, dtype=dtype)
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        y = self.stages(x.to(self.dtype))
        return self.head(y).abs() if y.is_complex() else self.head(y.flatten(1))


@register("model", "complex_cnn")
def complex_cnn(
    input_shape: tuple[int, ...], outputs: int, *, channels: list[int], activation: str = "crelu"
) -> CNN:
    """A small complex CNN."""
    return CNN(input_shape, outputs, channels, activation, torch.complex64)


@register("model", "real_cnn")
def real_cnn(
    input_shape: tuple[int, ...], outputs: int, *, channels: list[int], activation: str = "relu"
) -> CNN:
    """The same CNN with real weights."""
    return CNN(input_shape, outputs, channels, activation, torch.float32)
