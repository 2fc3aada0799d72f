"""Linear layers, real and complex: y = x Wᵀ + b on [B, *, n]; the gradient of one record is Σ_t g_t x_tᴴ over its positions t."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zdp_bench.gradients.rules import (
    Share,
    ghost_is_cheaper,
    kept,
    matrix_sum,
    products,
    rule,
    weigh,
)
from zdp_bench.kernels.memory_format import in_memory_order, in_own_order
from zdp_bench.nn.map_linear import MapLinear


@rule(nn.Linear)
def linear(layer: nn.Module, x: Tensor, g: Tensor) -> dict[str, Share]:
    """One position: ‖gᵢ xᵢᴴ‖² = ‖gᵢ‖²‖xᵢ‖², free. Several: `outer_products`."""
    if x.dim() == 2:
        weight = Share(
            rows=lambda start, stop: g[start:stop].unsqueeze(2) * x[start:stop].conj().unsqueeze(1),
            weighted_sum=lambda factors: matrix_sum(weigh(g, factors), x),
            product=lambda: (g, x),
            terms=lambda: products(g, x, 1),
        )
        bias = Share(
            rows=lambda start, stop: g[start:stop],
            weighted_sum=lambda factors: weigh(g, factors).sum(dim=0),
            product=lambda: (g,),
        )
        return {"weight": weight, "bias": bias}
    g, x = (
        g.reshape(g.shape[0], -1, g.shape[-1]),
        x.reshape(x.shape[0], -1, x.shape[-1]),
    )  # [B, T, out], [B, T, in]
    return {"weight": outer_products(g, x), "bias": kept(g.sum(dim=1))}


@rule(MapLinear)
def map_linear(layer: nn.Module, x: Tensor, g: Tensor) -> dict[str, Share]:
    """x [B, *map]: measured and multiplied as it lies in memory."""
    flat = in_memory_order(x)
    shares = linear(layer, flat, g)
    weight = shares["weight"]
    return shares | {
        "weight": Share(
            rows=lambda start, stop: in_own_order(weight.rows(start, stop), x),
            weighted_sum=lambda factors: in_own_order(weight.weighted_sum(factors), x),
            product=weight.product,
            terms=weight.terms,
        )
    }


def outer_products(g: Tensor, x: Tensor) -> Share:
    """The share of Σ_t g_t x_tᴴ, for g [B, T, O] and x [B, T, D]: rows [B, O, D]."""
    _, positions, outputs = g.shape
    inputs = x.shape[2]
    cheap = ghost_is_cheaper(positions, outputs, inputs, g.element_size())
    return Share(
        rows=lambda start, stop: torch.bmm(g[start:stop].transpose(1, 2), x[start:stop].conj()),
        weighted_sum=lambda factors: matrix_sum(weigh(g, factors).flatten(0, 1), x.flatten(0, 1)),
        ghost=(lambda: gram_norms(g, x)) if cheap else None,
        terms=lambda: products(g, x, positions),
    )


def gram_norms(g: Tensor, x: Tensor) -> Tensor:
    """‖Σ_t g_t x_tᴴ‖² = Σ_tu (g_uᴴ g_t)(x_tᴴ x_u), [B]; in float64, because the terms cancel where the gradient is small."""
    wide = torch.complex128 if g.is_complex() else torch.float64
    g, x = g.to(wide), x.to(wide)
    grams = torch.bmm(g, g.mH), torch.bmm(x, x.mH)  # [B, T, T]
    return (grams[0] * grams[1].conj()).real.sum(dim=(1, 2)).clamp(min=0)
