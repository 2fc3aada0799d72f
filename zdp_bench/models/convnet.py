"""Plain convolutional networks: stages of convolutions and pooling, then fully connected layers.

These are the networks of GReDP, Tables II, IV and V. The paper states the widths of LeNet-5; the
other widths are ours. `linear: circulant` makes the fully connected layers block-circulant, as in
Spectral-DP and GReDP, with 8×8 blocks; the last layer's blocks have one row per class.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from zdp_bench.errors import UserError, require
from zdp_bench.models import Width
from zdp_bench.nn.activations import activation as make_activation
from zdp_bench.nn.circulant import CirculantLinear
from zdp_bench.registry import register

Linear = Literal["dense", "circulant"]
BLOCK = 8


class ConvNet(nn.Module):
    """Stages of convolutions and max-pooling, then fully connected layers.

    Shapes: [B, C, H, W], or [B, H, W] with one channel, -> [B, outputs].

    Args:
        stages: widths of the convolutions in each stage, which ends in a 2×2 max-pooling.
        kernel, padding: kernel size and padding of each convolution.
        hidden: widths of the fully connected layers, except the last.
        linear: kind of the fully connected layers.
        activation: registered name of the activation.
    """

    def __init__(
        self,
        input_shape: tuple[int, ...],
        outputs: int,
        stages: list[list[int]],
        kernel: int,
        padding: int,
        hidden: list[int],
        linear: Linear,
        activation: str,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = (1, *input_shape)[-3]
        for stage in stages:
            for width in stage:
                layers += [
                    nn.Conv2d(channels, width, kernel, padding=padding),
                    make_activation(activation, width, torch.float32),
                ]
                channels = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        size = _size(input_shape, stages, kernel, padding)
        widths = [channels * size[0] * size[1], *hidden, outputs]
        head: list[nn.Module] = []
        for in_features, out_features in pairwise(widths[:-1]):
            head += [
                _linear(linear, in_features, out_features, BLOCK),
                make_activation(activation, out_features, torch.float32),
            ]
        self.classifier = nn.Sequential(*head, _linear(linear, widths[-2], outputs, outputs))

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1) if x.dim() == 3 else x
        return self.classifier(self.features(x).flatten(1))


def _size(
    input_shape: tuple[int, ...],
    stages: list[list[int]],
    kernel: int,
    padding: int,
) -> tuple[int, int]:
    """Return the (height, width) of the last map."""
    rule = "this network needs images, [channels, height, width]"
    require(len(input_shape) in (2, 3), "model", str(input_shape), rule)
    height, width = input_shape[-2:]
    image_size = f"{height}×{width}"
    for stage in stages:
        shrink = len(stage) * (kernel - 1 - 2 * padding)
        height, width = (height - shrink) // 2, (width - shrink) // 2
    if min(height, width) < 1:
        raise UserError(
            f"images of {image_size} are too small for the network, which halves them "
            f"{len(stages)} times: use larger ones (dataset.size), or a network with fewer stages."
        )
    return height, width


def _linear(
    kind: Linear,
    in_features: int,
    out_features: int,
    block: int,
) -> nn.Module:
    if kind == "circulant":
        return CirculantLinear(in_features, out_features, block)
    return nn.Linear(in_features, out_features)


@register("model", "lenet5")
def lenet5(
    input_shape: tuple[int, ...],
    outputs: int,
    *,
    linear: Linear = "dense",
    activation: str = "relu",
    kernels: list[Width] | None = None,
) -> ConvNet:
    """LeNet-5: 5×5 convolutions, then fully connected layers of 120 and 84 units.

    Args:
        kernels: widths of the convolutions. Default: 6 and 16, as in LeCun et al. 1998; Table II of
            GReDP prints 6 and 6.
    """
    kernels = [6, 16] if kernels is None else kernels
    require(len(kernels) > 0, "model.kernels", kernels, "must list at least one width")
    stages = [[width] for width in kernels]
    return ConvNet(input_shape, outputs, stages, 5, 0, [120, 84], linear, activation)


@register("model", "model3")
def model3(
    input_shape: tuple[int, ...],
    outputs: int,
    *,
    linear: Linear = "dense",
    activation: str = "relu",
) -> ConvNet:
    """Model-3 of Spectral-DP (Table IV): three stages of two 3×3 convolutions, then 120 units.

    The widths 32, 64, 128 are ours.
    """
    return ConvNet(
        input_shape, outputs, [[32, 32], [64, 64], [128, 128]], 3, 1, [120], linear, activation
    )


@register("model", "alexnet")
def alexnet(
    input_shape: tuple[int, ...],
    outputs: int,
    *,
    linear: Linear = "dense",
    activation: str = "relu",
) -> ConvNet:
    """AlexNet for 32×32 images (Table V): five pooled 3×3 convolutions, then 120 and 84 units.

    The widths are ours.
    """
    stages = [[64], [128], [256], [256], [256]]
    return ConvNet(input_shape, outputs, stages, 3, 1, [120, 84], linear, activation)
