"""Linear layers, real and complex: y = x Wᵀ + b on [B, *, n]; gᵢ = Σ_t g_t x_tᴴ, positions t."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor, nn

from zdp_bench.gradients.layer_gradient import (
    LayerGradient,
    bound_summands,
    ghost_is_cheaper,
    gram_norms,
    matrix_sum,
    weigh,
)
from zdp_bench.gradients.norms import squared_norms
from zdp_bench.gradients.rules import rule
from zdp_bench.nn.memory_format import MapLinear, in_memory_order, in_own_order


@rule(nn.Linear)
def linear(layer: nn.Module, x: Tensor, g: Tensor) -> dict[str, LayerGradient]:
    """[B, n]: norms are free, ‖gᵢ xᵢᴴ‖ = ‖gᵢ‖‖xᵢ‖. [B, *, n]: see `_over_positions`."""
    if x.dim() > 2:
        g = g.reshape(g.shape[0], -1, g.shape[-1])  # [B, T, out]
        x = x.reshape(x.shape[0], -1, x.shape[-1])  # [B, T, in]
        return {"weight": _over_positions(x, g), "bias": LayerGradient.of(g.sum(dim=1))}

    @cache
    def norms_of_g() -> Tensor:
        return squared_norms(g)

    weight = LayerGradient(
        lambda start, stop: g[start:stop].unsqueeze(2) * x[start:stop].conj().unsqueeze(1),
        lambda factors: matrix_sum(weigh(g, factors), x),
        squared_norms=lambda: norms_of_g() * squared_norms(x),
    )
    bias = LayerGradient(
        lambda start, stop: g[start:stop],
        lambda factors: weigh(g, factors).sum(dim=0),
        squared_norms=norms_of_g,
    )
    return {"weight": weight, "bias": bias}


@rule(MapLinear)
def map_linear(layer: nn.Module, x: Tensor, g: Tensor) -> dict[str, LayerGradient]:
    """x [B, *map]: measured and multiplied in the order of its memory."""
    gradients = linear(layer, in_memory_order(x), g)
    flat = gradients["weight"]
    weight = replace(
        flat,
        per_sample=lambda start, stop: in_own_order(flat.per_sample(start, stop), x),
        weighted_sum=lambda factors: in_own_order(flat.weighted_sum(factors), x),
    )
    return gradients | {"weight": weight}


def _over_positions(x: Tensor, g: Tensor) -> LayerGradient:
    """Σ_t g_t x_tᴴ, [B, O, D], for g [B, T, O] and x [B, T, D]."""
    _, positions, outputs = g.shape
    ghost = ghost_is_cheaper(positions, outputs, x.shape[2], g.element_size())
    return LayerGradient(
        lambda start, stop: torch.bmm(g[start:stop].transpose(1, 2), x[start:stop].conj()),
        lambda factors: matrix_sum(weigh(g, factors).flatten(0, 1), x.flatten(0, 1)),
        squared_norms=(lambda: gram_norms(g, x)) if ghost else None,
        summands=lambda: bound_summands(g, x, positions),
    )
