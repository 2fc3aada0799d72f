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
def group_norm(
    layer: nn.Module,
    x: Tensor,
    g: Tensor,
) -> dict[str, LayerGradient]:
    """x, g [B, C, *]."""
    assert isinstance(layer, nn.GroupNorm)
    normalised = F.group_norm(x, layer.num_groups, eps=layer.eps)
    return _by_channel(normalised, g)


@rule(ComplexGroupNorm, ComplexInstanceNorm, ComplexLayerNorm)
def complex_norm(
    layer: nn.Module,
    x: Tensor,
    g: Tensor,
) -> dict[str, LayerGradient]:
    """Complex x, g [B, C, *]; the whitened input is computed again rather than kept."""
    assert isinstance(layer, ComplexGroupNorm)
    normalised = normalise(x, layer.groups, eps=layer.eps)
    return _by_channel(normalised, g)


@rule(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
def instance_norm(
    layer: nn.Module,
    x: Tensor,
    g: Tensor,
) -> dict[str, LayerGradient]:
    """x, g [B, C, *]."""
    if layer.track_running_stats:
        raise NoRule("an instance norm with running statistics, which mix examples")
    eps: float = layer.eps  # type: ignore[assignment]
    return _by_channel(F.instance_norm(x, eps=eps), g)


@rule(nn.LayerNorm)
def layer_norm(
    layer: nn.Module,
    x: Tensor,
    g: Tensor,
) -> dict[str, LayerGradient]:
    """x, g [B, *, *normalized_shape]."""
    assert isinstance(layer, nn.LayerNorm)
    shape = layer.normalized_shape
    normalised = F.layer_norm(x, shape, eps=layer.eps)
    return _by_position(normalised, g, len(shape))


@rule(nn.RMSNorm)
def rms_norm(
    layer: nn.Module,
    x: Tensor,
    g: Tensor,
) -> dict[str, LayerGradient]:
    """x, g [B, *, *normalized_shape]; no shift."""
    assert isinstance(layer, nn.RMSNorm)
    shape = layer.normalized_shape
    normalised = F.rms_norm(x, shape, eps=layer.eps)
    gradients = _by_position(normalised, g, len(shape))
    return {"weight": gradients["weight"]}


def _by_channel(normalised: Tensor, g: Tensor) -> dict[str, LayerGradient]:
    """Scale and shift [C] of x̂, g [B, C, *]."""
    positions = range(2, g.dim())
    return _summed(normalised, g, tuple(positions))


def _by_position(
    normalised: Tensor,
    g: Tensor,
    trailing: int,
) -> dict[str, LayerGradient]:
    """Scale and shift [*normalized_shape], the last `trailing` dimensions of x̂, g."""
    positions = range(1, g.dim() - trailing)
    return _summed(normalised, g, tuple(positions))


def _summed(
    normalised: Tensor,
    g: Tensor,
    dims: tuple[int, ...],
) -> dict[str, LayerGradient]:
    weight = g * normalised.conj()
    if dims:
        weight = weight.sum(dim=dims)
        g = g.sum(dim=dims)
    return {"weight": LayerGradient.from_gradients(weight), "bias": LayerGradient.from_gradients(g)}


@rule(nn.PReLU)
def prelu(
    layer: nn.Module,
    x: Tensor,
    g: Tensor,
) -> dict[str, LayerGradient]:
    """y = max(x, 0) + w·min(x, 0), w [C] or [1]; x, g [B, C, *]."""
    assert isinstance(layer, nn.PReLU)
    gradient = g * torch.clamp(x, max=0)
    if layer.num_parameters == 1:
        gradient = gradient.flatten(1).sum(1, keepdim=True)
    elif gradient.dim() > 2:
        gradient = gradient.flatten(2).sum(dim=2)
    return {"weight": LayerGradient.from_gradients(gradient)}
