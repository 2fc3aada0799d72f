"""Activations with trained parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zdp_bench.gradients.rules import Share, kept, rule


@rule(nn.PReLU)
def prelu(layer: nn.Module, x: Tensor, g: Tensor) -> dict[str, Share]:
    """y = max(x, 0) + w·min(x, 0), w [C] or [1]; x, g [B, C, *]."""
    assert isinstance(layer, nn.PReLU)
    share = g * torch.clamp(x, max=0)
    if layer.num_parameters == 1:
        return {"weight": kept(share.flatten(1).sum(dim=1, keepdim=True))}
    positions = tuple(range(2, g.dim()))
    return {"weight": kept(share.sum(dim=positions) if positions else share)}
