"""The network for MRI sequences in k-space (Riess et al. 2024, section 5), complex or real."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from zdp_bench.errors import require
from zdp_bench.models import Width, image_shape
from zdp_bench.nn.activations import activation as make_activation
from zdp_bench.nn.convolution import ComplexConv2d
from zdp_bench.nn.normalisation import ComplexGroupNorm
from zdp_bench.nn.pooling import ComplexAvgPool2d
from zdp_bench.registry import register

WIDTHS = (32, 64, 128)


class SequenceCNN(nn.Module):
    """Three blocks of convolution, GroupNorm, activation and pooling; then mean and linear layer.

    The paper states three blocks of 32, 64 and 128 filters, GroupNorm with 16 groups, ConjMish,
    average pooling, and one linear layer of 128 units. The kernel, the number of convolutions per
    block, and the mean over the last map are ours.

    Shapes: [B, C, H, W] with H and W at least 8 -> [B, outputs]. Complex weights return |z|. The
    real network takes the real and the imaginary part of its input as channels.

    Args:
        groups: number of groups of each GroupNorm; must divide 32.
        activation: registered name of the activation.
        convolutions: number of convolutions per block.
        dtype: data type of the weights, complex64 or float32.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        outputs: int,
        groups: int,
        activation: str,
        convolutions: int,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        kind = "complex" if dtype.is_complex else "real"
        image_channels, height, width = image_shape(f"{kind}_sequence_cnn", input_shape)
        is_large = min(height, width) >= 2 ** len(WIDTHS)
        rule = f"{height}×{width} cannot be halved three times"
        require(is_large, "the input's size for model", "sequence_cnn", rule)
        divides = not any(width % groups for width in WIDTHS)
        require(divides, "model.groups", groups, "must divide the 32, 64 and 128 channels")
        conv = ComplexConv2d if dtype.is_complex else nn.Conv2d
        norm = ComplexGroupNorm if dtype.is_complex else nn.GroupNorm
        pool = ComplexAvgPool2d if dtype.is_complex else nn.AvgPool2d
        first_channels = image_channels if dtype.is_complex else 2 * image_channels
        layers: list[nn.Module] = []
        for in_channels, out_channels in pairwise([first_channels, *WIDTHS]):
            for channels in (in_channels, *[out_channels] * (convolutions - 1)):
                layers += [
                    conv(channels, out_channels, 3, padding=1, dtype=dtype),
                    norm(groups, out_channels, dtype=dtype),
                    make_activation(activation, out_channels, dtype),
                ]
            layers.append(pool(2))
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(WIDTHS[-1], outputs, dtype=dtype)
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        if not self.dtype.is_complex:  # channels: all real parts, then all imaginary parts
            x = torch.cat([x.real, x.imag if x.is_complex() else torch.zeros_like(x)], dim=1)
        y = self.head(self.blocks(x.to(self.dtype)).flatten(2).mean(dim=2))
        return y.abs() if y.is_complex() else y


@register("model", "complex_sequence_cnn")
def complex_sequence_cnn(
    input_shape: tuple[int, ...],
    outputs: int,
    *,
    groups: Width = 16,
    activation: str = "conjmish",
    convolutions: Width = 1,
) -> SequenceCNN:
    """The complex network of Riess et al. 2024."""
    return SequenceCNN(input_shape, outputs, groups, activation, convolutions, torch.complex64)


@register("model", "real_sequence_cnn")
def real_sequence_cnn(
    input_shape: tuple[int, ...],
    outputs: int,
    *,
    groups: Width = 16,
    activation: str = "mish",
    convolutions: Width = 1,
) -> SequenceCNN:
    """The network with real weights, on real and imaginary parts as channels."""
    return SequenceCNN(input_shape, outputs, groups, activation, convolutions, torch.float32)
