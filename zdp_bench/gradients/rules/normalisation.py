"""Rules of normalisation layers, and of PReLU, whose parameters scale channels as well.

For y = w·x̂ + b with normalised input x̂, the gradient of the scale w is Σ g·conj(x̂), and that of the
shift b is Σ g. Both sums run over the positions that share an entry of w and b.
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
from zdp_bench.nn.surgery import InstanceNorm1d


@rule(nn.GroupNorm)
def group_norm(
    layer: nn.Module,
    x: Tensor,
    g: Tensor,
) -> dict[str, LayerGradient]:
    """Return the gradients of a group norm for x and g [B, C, *]."""
    assert isinstance(layer, nn.GroupNorm)
    normalised = F.group_norm(x, layer.num_groups, eps=layer.eps)
    return _by_channel(normalised, g)


@rule(ComplexGroupNorm, ComplexInstanceNorm, ComplexLayerNorm)
def complex_norm(
    layer: nn.Module,
    x: Tensor,
    g: Tensor,
) -> dict[str, LayerGradient]:
    """Return the gradients of a complex norm for complex x and g [B, C, *].

    The whitened input is computed again, because keeping it would take memory.
    """
    assert isinstance(layer, ComplexGroupNorm)
    normalised = normalise(x, layer.groups, eps=layer.eps)
    return _by_channel(normalised, g)


@rule(InstanceNorm1d, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
def instance_norm(
    layer: nn.Module,
    x: Tensor,
    g: Tensor,
) -> dict[str, LayerGradient]:
    """Return the gradients of an instance norm for x and g [B, C, *]."""
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
    """Return the gradients of a layer norm for x and g [B, *, *normalized_shape]."""
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
    """Return the gradient of an RMS norm's scale for x and g [B, *, *normalized_shape]."""
    assert isinstance(layer, nn.RMSNorm)
    shape = layer.normalized_shape
    normalised = F.rms_norm(x, shape, eps=layer.eps)
    gradients = _by_position(normalised, g, len(shape))
    return {"weight": gradients["weight"]}


def _by_channel(normalised: Tensor, g: Tensor) -> dict[str, LayerGradient]:
    """Return the gradients of a scale and shift [C], for x̂ and g [B, C, *]."""
    positions = range(2, g.dim())
    return _add_positions(normalised, g, tuple(positions))


def _by_position(
    normalised: Tensor,
    g: Tensor,
    shape_dims: int,
) -> dict[str, LayerGradient]:
    """Return the gradients of a scale and shift with the shape of the last `shape_dims` dims."""
    positions = range(1, g.dim() - shape_dims)
    return _add_positions(normalised, g, tuple(positions))


def _add_positions(
    normalised: Tensor,
    g: Tensor,
    positions: tuple[int, ...],
) -> dict[str, LayerGradient]:
    """Return the gradients of scale and shift, added up over the dimensions `positions`."""
    weight = g * normalised.conj()
    if positions:  # with dim=(), torch would sum over all dimensions
        weight = weight.sum(dim=positions)
        g = g.sum(dim=positions)
    return {"weight": LayerGradient.from_gradients(weight), "bias": LayerGradient.from_gradients(g)}


@rule(nn.PReLU)
def prelu(
    layer: nn.Module,
    x: Tensor,
    g: Tensor,
) -> dict[str, LayerGradient]:
    """Return the gradient of a PReLU's weight for x and g [B, C, *], or [B].

    PReLU computes y = max(x, 0) + w·min(x, 0) with w [C] or [1].
    """
    assert isinstance(layer, nn.PReLU)
    gradient = g * torch.clamp(x, max=0)
    if layer.num_parameters == 1:
        gradient = gradient.reshape(len(gradient), -1).sum(1, keepdim=True)
    elif gradient.dim() > 2:
        gradient = gradient.flatten(2).sum(dim=2)
    return {"weight": LayerGradient.from_gradients(gradient)}
