"""Multilayer perceptrons, complex and real (Ziller et al. 2021, appendix A.2.1: 784-256-128-10)."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn

from zdp_bench.models import Width
from zdp_bench.nn.activations import activation as make_activation
from zdp_bench.nn.initialisation import Initialisation, initialise
from zdp_bench.registry import register


class MLP(nn.Module):
    """Linear layers with activations between them.

    Shapes: [B, *input_shape] -> [B, outputs]. With complex weights, the logits are |z|.

    Args:
        widths: number of inputs, the width of each hidden layer, and the number of outputs.
        dtype: data type of the weights, complex64 or float32.
        activation: registered name of the activation.
        init: initialisation of the layers; see `initialise`.
    """

    def __init__(
        self,
        widths: list[int],
        dtype: torch.dtype,
        activation: str,
        init: Initialisation,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for in_features, out_features in pairwise(widths):
            layers.append(initialise(nn.Linear(in_features, out_features, dtype=dtype), init))
            layers.append(make_activation(activation, out_features, dtype))
        self.net = nn.Sequential(*layers[:-1])  # no activation after the last layer
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        y = self.net(x.flatten(1).to(self.dtype))  # [B, outputs]
        return y.abs() if y.is_complex() else y


@register("model", "complex_mlp")
def complex_mlp(
    input_shape: tuple[int, ...],
    outputs: int,
    *,
    hidden: list[Width],
    activation: str = "cardioid",
    init: Initialisation = "uniform_parts",
) -> MLP:
    """An MLP with complex weights; its logits are magnitudes."""
    return MLP([math.prod(input_shape), *hidden, outputs], torch.complex64, activation, init)


@register("model", "real_mlp")
def real_mlp(
    input_shape: tuple[int, ...],
    outputs: int,
    *,
    hidden: list[Width],
    activation: str = "relu",
    init: Initialisation = "uniform_parts",
) -> MLP:
    """An MLP with real weights."""
    return MLP([math.prod(input_shape), *hidden, outputs], torch.float32, activation, init)
