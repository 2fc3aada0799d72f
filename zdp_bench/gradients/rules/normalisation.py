"""Normalisation with scale and shift, y = w·x̂ + b: gradients Σ g·x̂ (x̂ conjugated) and Σ g.

And PReLU, whose parameters scale channels as well.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zdp_bench.gradients.layer_gradient import LayerGradient
from zdp_bench.gradients.rules import NoRule, rule
from zdp_bench.nn.normalisation import (
    ComplexGroupNorm,
    ComplexInstanceNorm,
    ComplexLayerNorm,
    normalise,
)


@rule(nn.GroupNorm)
def group_norm(layer: nn.Module, x: Tensor, g: Tensor) -> dict[str, LayerGradient]:
    """x, g [B, C, *]."""
    assert isinstance(layer, nn.GroupNorm)
    return _by_channel(F.group_norm(x, layer.num_groups, eps=layer.eps), g)


@rule(ComplexGroupNorm, ComplexInstanceNorm, ComplexLayerNorm)
def complex_norm(layer: nn.Module, x: Tensor, g: Tensor) -> dict[str, LayerGradient]:
    """Complex x, g [B, C, *]; the whitened input is computed again rather than kept."""
    assert isinstance(layer, ComplexGroupNorm)
    return _by_channel(normalise(x, layer.groups, eps=layer.eps), g)


@rule(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
def instance_norm(layer: nn.Module, x: Tensor, g: Tensor) -> dict[str, LayerGradient]:
    """x, g [B, C, *]."""
    if layer.track_running_stats:
        raise NoRule("an instance norm with running statistics, which mix examples")
    return _by_channel(F.instance_norm(x, eps=float(layer.eps)), g)  # type: ignore[arg-type]


@rule(nn.LayerNorm)
def layer_norm(layer: nn.Module, x: Tensor, g: Tensor) -> dict[str, LayerGradient]:
    """x, g [B, *, *normalized_shape]."""
    assert isinstance(layer, nn.LayerNorm)
    shape = layer.normalized_shape
    return _by_position(F.layer_norm(x, shape, eps=layer.eps), g, len(shape))


@rule(nn.RMSNorm)
def rms_norm(layer: nn.Module, x: Tensor, g: Tensor) -> dict[str, LayerGradient]:
    """x, g [B, *, *normalized_shape]; no shift."""
    assert isinstance(layer, nn.RMSNorm)
    shape = layer.normalized_shape
    return {"weight": _by_position(F.rms_norm(x, shape, eps=layer.eps), g, len(shape))["weight"]}


def _by_channel(normalised: Tensor, g: Tensor) -> dict[str, LayerGradient]:
    """Scale and shift [C] of x̂, g [B, C, *]."""
    return _summed(normalised, g, tuple(range(2, g.dim())))


def _by_position(normalised: Tensor, g: Tensor, trailing: int) -> dict[str, LayerGradient]:
    """Scale and shift [*normalized_shape], the last `trailing` dimensions of x̂, g."""
    return _summed(normalised, g, tuple(range(1, g.dim() - trailing)))


def _summed(normalised: Tensor, g: Tensor, dims: tuple[int, ...]) -> dict[str, LayerGradient]:
    weight = g * normalised.conj()
    return {
        "weight": LayerGradient.of(weight.sum(dim=dims) if dims else weight),
        "bias": LayerGradient.of(g.sum(dim=dims) if dims else g),
    }


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
