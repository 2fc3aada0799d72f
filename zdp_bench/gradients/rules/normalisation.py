"""Normalisation with a trained scale and shift: y = w·x̂ + b, so a record's gradients are Σ g·x̂ (x̂ conjugated) and Σ g."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from zdp_bench.gradients.rules import NoRule, Share, kept, rule
from zdp_bench.nn.normalisation import (
    ComplexGroupNorm,
    ComplexInstanceNorm,
    ComplexLayerNorm,
    normalise,
)


@rule(nn.GroupNorm)
def group_norm(layer: nn.Module, x: Tensor, g: Tensor) -> dict[str, Share]:
    """x, g [B, C, *]."""
    assert isinstance(layer, nn.GroupNorm)
    return _by_channel(F.group_norm(x, layer.num_groups, eps=layer.eps), g)


@rule(ComplexGroupNorm, ComplexInstanceNorm, ComplexLayerNorm)
def complex_norm(layer: nn.Module, x: Tensor, g: Tensor) -> dict[str, Share]:
    """Complex x, g [B, C, *]; the whitened input is computed again rather than kept."""
    assert isinstance(layer, ComplexGroupNorm)
    return _by_channel(normalise(x, layer.groups, eps=layer.eps), g)


@rule(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
def instance_norm(layer: nn.Module, x: Tensor, g: Tensor) -> dict[str, Share]:
    """x, g [B, C, *]."""
    if layer.track_running_stats:
        raise NoRule("an instance norm that tracks running statistics, which mix records")
    return _by_channel(F.instance_norm(x, eps=float(layer.eps)), g)  # type: ignore[arg-type]


@rule(nn.LayerNorm)
def layer_norm(layer: nn.Module, x: Tensor, g: Tensor) -> dict[str, Share]:
    """x, g [B, *, *normalized_shape]."""
    assert isinstance(layer, nn.LayerNorm)
    shape = layer.normalized_shape
    return _by_position(F.layer_norm(x, shape, eps=layer.eps), g, len(shape))


@rule(nn.RMSNorm)
def rms_norm(layer: nn.Module, x: Tensor, g: Tensor) -> dict[str, Share]:
    """x, g [B, *, *normalized_shape]."""
    assert isinstance(layer, nn.RMSNorm)
    shape = layer.normalized_shape
    return {"weight": _by_position(F.rms_norm(x, shape, eps=layer.eps), g, len(shape))["weight"]}


def _by_channel(normalised: Tensor, g: Tensor) -> dict[str, Share]:
    """Scale and shift [C] of x̂, g [B, C, *]."""
    positions = tuple(range(2, g.dim()))
    weight = (g * normalised.conj()).sum(dim=positions) if positions else g * normalised.conj()
    return {"weight": kept(weight), "bias": kept(g.sum(dim=positions) if positions else g)}


def _by_position(normalised: Tensor, g: Tensor, trailing: int) -> dict[str, Share]:
    """Scale and shift [*normalized_shape], the last `trailing` dimensions of x̂, g."""
    between = tuple(range(1, g.dim() - trailing))
    weight = (g * normalised).sum(dim=between) if between else g * normalised
    return {"weight": kept(weight), "bias": kept(g.sum(dim=between) if between else g)}
