"""Activations with trained parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zdp_bench.gradients.layer_gradient import LayerGradient
from zdp_bench.gradients.rules import rule


@rule(nn.PReLU)
def prelu(layer: nn.Module, x: Tensor, g: Tensor) -> dict[str, LayerGradient]:
    """y = max(x, 0) + w·min(x, 0), w [C] or [1]; x, g [B, C, *]."""
    assert isinstance(layer, nn.PReLU)
    gradient = g * torch.clamp(x, max=0)
    if layer.num_parameters == 1:
        gradient = gradient.flatten(1).sum(dim=1, keepdim=True)
    elif gradient.dim() > 2:
        gradient = gradient.flatten(2).sum(dim=2)
    return {"weight": LayerGradient.of(gradient)}
