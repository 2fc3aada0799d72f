"""The CNN of Lee & Kifer 2020, section 5.1, complex or real.

It has two blocks of a 5×5 convolution and 2×2 max-pooling, then two fully connected layers of 384
units and the output layer. This is the network of Abadi et al. 2016, trained from scratch. In the
paper, backpropagation uses ReLU, and DFA uses tanh in the convolutions and sigmoid in the fully
connected layers. The paper does not state the padding; here there is none. Max-pooling comes before
the activation: both orders give the same result for an increasing activation, and this one
evaluates it on a quarter of the map.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from zdp_bench.errors import require
from zdp_bench.models import Width
from zdp_bench.nn.activations import activation
from zdp_bench.nn.convolution import ComplexConv2d
from zdp_bench.nn.pooling import ComplexAvgPool2d
from zdp_bench.registry import register

KERNEL = 5


class DFACNN(nn.Module):
    """The network of Lee & Kifer.

    Shapes: [B, C, H, W] or [B, H, W] -> [B, outputs]; complex weights return |z|.

    Args:
        channels: widths of the convolutions.
        hidden: widths of the fully connected layers, except the last.
        activations: registered names of the activations after convolutions, and between fully
            connected layers.
        dtype: data type of the weights, complex64 or float32.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        outputs: int,
        channels: list[int],
        hidden: list[int],
        activations: tuple[str, str],
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        image_channels, height, width = (1, *input_shape)[-3:]
        stages: list[nn.Module] = []
        for in_channels, out_channels in pairwise([image_channels, *channels]):
            height, width = (height - KERNEL + 1) // 2, (width - KERNEL + 1) // 2
            active = activation(activations[0], out_channels, dtype)
            if dtype.is_complex:  # complex numbers have no maximum, so the average is used
                conv = ComplexConv2d(in_channels, out_channels, KERNEL)
                stages += [conv, active, ComplexAvgPool2d(2)]
            else:
                real_conv = nn.Conv2d(in_channels, out_channels, KERNEL)
                stages += [real_conv, nn.MaxPool2d(2), active]
        rule = f"images of {input_shape} are too small for that depth"
        require(min(height, width) > 0, "model.channels", channels, rule)
        self.convolutions = nn.Sequential(*stages)
        layers: list[nn.Module] = []
        features = [image_channels, *channels][-1] * height * width
        for in_features, out_features in pairwise([features, *hidden, outputs]):
            layers.append(nn.Linear(in_features, out_features, dtype=dtype))
            layers.append(activation(activations[1], out_features, dtype))
        self.connected = nn.Sequential(*layers[:-1])  # no activation after the last layer
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1) if x.dim() == 3 else x
        y = self.connected(self.convolutions(x.to(self.dtype)).flatten(1))
        return y.abs() if y.is_complex() else y


@register("model", "real_dfa_cnn")
def real_dfa_cnn(
    input_shape: tuple[int, ...],
    outputs: int,
    *,
    channels: list[Width],
    hidden: list[Width],
    conv_activation: str = "relu",
    fc_activation: str = "relu",
) -> DFACNN:
    """The network of the paper."""
    return DFACNN(
        input_shape, outputs, channels, hidden, (conv_activation, fc_activation), torch.float32
    )


@register("model", "complex_dfa_cnn")
def complex_dfa_cnn(
    input_shape: tuple[int, ...],
    outputs: int,
    *,
    channels: list[Width],
    hidden: list[Width],
    conv_activation: str = "crelu",
    fc_activation: str = "separable_sigmoid",
) -> DFACNN:
    """The network with complex weights; the paper has real networks only."""
    return DFACNN(
        input_shape, outputs, channels, hidden, (conv_activation, fc_activation), torch.complex64
    )
