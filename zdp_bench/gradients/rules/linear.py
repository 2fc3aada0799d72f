"""Linear layers, real and complex, and embeddings.

A linear layer computes y = x Wᵀ + b on [B, *, n], so gᵢ = Σ_t g_t x_tᴴ over positions t. The
gradient of an embedding is nonzero only in the rows that an example looks up.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor, nn

from zdp_bench.gradients.clipping import squared_norms
from zdp_bench.gradients.layer_gradient import (
    LayerGradient,
    Summands,
    apply_factors,
    bound_summands,
    ghost_is_cheaper,
    gram_norms,
    matrix_sum,
)
from zdp_bench.gradients.rules import NoRule, rule
from zdp_bench.nn.memory_format import MapLinear, in_memory_order, in_own_order


@rule(nn.Linear)
def linear(
    layer: nn.Module,
    x: Tensor,
    g: Tensor,
) -> dict[str, LayerGradient]:
    """Return the gradients of a linear layer.

    For inputs [B, n], norms need no gradients: ‖gᵢ xᵢᴴ‖ = ‖gᵢ‖‖xᵢ‖. For inputs [B, *, n], see
    `over_positions`.
    """
    if x.dim() > 2:
        g = g.flatten(1, -2)  # [B, T, out]
        x = x.flatten(1, -2)  # [B, T, in]
        return {"weight": over_positions(x, g), "bias": LayerGradient.from_gradients(g.sum(dim=1))}

    norms = squared_norms(g)

    @lru_cache(maxsize=1)  # weight and bias have the same factors
    def apply_once(factors: Tensor) -> Tensor:
        return apply_factors(g, factors)

    def per_sample(start: int, stop: int) -> Tensor:
        columns = g[start:stop].unsqueeze(2)
        rows = x[start:stop].conj().unsqueeze(1)
        return columns * rows

    weight = LayerGradient(
        per_sample,
        lambda factors: matrix_sum(apply_once(factors), x),
        squared_norms=lambda: norms * squared_norms(x),
    )
    bias = LayerGradient(
        lambda start, stop: g[start:stop],
        lambda factors: apply_once(factors).sum(dim=0),
        squared_norms=lambda: norms,
    )
    return {"weight": weight, "bias": bias}


@rule(MapLinear)
def map_linear(
    layer: nn.Module,
    x: Tensor,
    g: Tensor,
) -> dict[str, LayerGradient]:
    """Return the gradients of a `MapLinear` for maps x [B, *map].

    Norms and products are computed in the maps' memory order, which avoids copies.
    """
    gradients = linear(layer, in_memory_order(x), g)
    flat = gradients["weight"]

    def per_sample(start: int, stop: int) -> Tensor:
        return in_own_order(flat.per_sample(start, stop), x)

    def weighted_sum(factors: Tensor) -> Tensor:
        return in_own_order(flat.weighted_sum(factors), x)

    gradients["weight"] = replace(flat, per_sample=per_sample, weighted_sum=weighted_sum)
    return gradients


def over_positions(x: Tensor, g: Tensor) -> LayerGradient:
    """Return the gradients Σ_t g_t x_tᴴ, [B, O, D], for g [B, T, O] and x [B, T, D]."""
    _, positions, outputs = g.shape
    ghost = ghost_is_cheaper(positions, outputs, x.shape[2], g.element_size())

    def per_sample(start: int, stop: int) -> Tensor:
        return torch.bmm(g[start:stop].mT, x[start:stop].conj())

    def weighted_sum(factors: Tensor) -> Tensor:
        weighted = apply_factors(g, factors)
        return matrix_sum(weighted.flatten(0, 1), x.flatten(0, 1))

    return LayerGradient(
        per_sample,
        weighted_sum,
        squared_norms=(lambda: gram_norms(g, x)) if ghost else None,
        summands=lambda: bound_summands(g, x, positions),
    )


@rule(nn.Embedding)
def embedding(
    layer: nn.Module,
    x: Tensor,
    g: Tensor,
) -> dict[str, LayerGradient]:
    """Return the gradients of an embedding for indices x [B, *] and g [B, *, E].

    Norms are those of the output gradients added up over equal indices.
    """
    assert isinstance(layer, nn.Embedding)
    if layer.scale_grad_by_freq or layer.sparse or layer.max_norm is not None:
        raise NoRule("an embedding with scale_grad_by_freq, sparse or max_norm")
    examples = len(x)
    table, width = layer.weight.shape
    x = x.reshape(examples, -1)  # [B, T]
    g = g.reshape(examples, -1, width)  # [B, T, E]
    positions = x.shape[1]
    if layer.padding_idx is not None:
        g = g * (x != layer.padding_idx).unsqueeze(-1)

    def per_sample(start: int, stop: int) -> Tensor:
        rows = x[start:stop].unsqueeze(-1).expand(-1, -1, width)
        gradients = g.new_zeros(stop - start, table, width)
        return gradients.scatter_add_(1, rows, g[start:stop])

    def weighted_sum(factors: Tensor) -> Tensor:
        weighted = apply_factors(g, factors).flatten(0, 1)
        gradient = g.new_zeros(table, width)
        return gradient.index_add_(0, x.flatten(), weighted)

    def ghost_norms() -> Tensor:
        example = torch.arange(examples, device=x.device).unsqueeze(1)
        pairs = example * table + x  # encodes (example, index) as one number
        unique_pairs, pair_index = torch.unique(pairs, return_inverse=True)
        sums = g.new_zeros(len(unique_pairs), width)
        sums.index_add_(0, pair_index.flatten(), g.flatten(0, 1))
        squares = torch.zeros(examples, dtype=torch.float64, device=g.device)
        return squares.index_add_(0, unique_pairs // table, squared_norms(sums))

    def summands() -> Summands:
        mass = (squared_norms(g) * positions).sqrt()  # Σ_t ‖g_t‖ ≤ √T ‖g‖
        return Summands(mass, positions)

    weight = LayerGradient(per_sample, weighted_sum, squared_norms=ghost_norms, summands=summands)
    return {"weight": weight}
