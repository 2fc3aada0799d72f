"""Embedding tables: an example's gradient is non-zero only in the rows that it looks up."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zdp_bench.gradients.layer_gradient import LayerGradient, Summands, weigh
from zdp_bench.gradients.norms import squared_norms
from zdp_bench.gradients.rules import NoRule, rule


@rule(nn.Embedding)
def embedding(layer: nn.Module, x: Tensor, g: Tensor) -> dict[str, LayerGradient]:
    """x [B, *] indices, g [B, *, E]. Norms: sum the output gradients of equal indices, square."""
    assert isinstance(layer, nn.Embedding)
    if layer.scale_grad_by_freq or layer.sparse or layer.max_norm is not None:
        raise NoRule("an embedding with scale_grad_by_freq, sparse or max_norm")
    examples, table, width = len(x), layer.weight.shape[0], g.shape[-1]
    x, g = x.reshape(examples, -1), g.reshape(examples, -1, width)  # [B, T], [B, T, E]
    positions = x.shape[1]
    if layer.padding_idx is not None:
        g = g * (x != layer.padding_idx).unsqueeze(-1)

    def per_sample(start: int, stop: int) -> Tensor:
        index = x[start:stop].unsqueeze(-1).expand(-1, -1, width)
        return g.new_zeros(stop - start, table, width).scatter_add_(1, index, g[start:stop])

    def weighted_sum(factors: Tensor) -> Tensor:
        weighted = weigh(g, factors).flatten(0, 1)
        return g.new_zeros(table, width).index_add_(0, x.flatten(), weighted)

    def ghost_norms() -> Tensor:
        example = torch.arange(examples, device=x.device).unsqueeze(1)
        pairs, which = torch.unique(example * table + x, return_inverse=True)  # (example, index)
        summed = g.new_zeros(len(pairs), width).index_add_(0, which.flatten(), g.flatten(0, 1))
        squares = torch.zeros(examples, dtype=torch.float64, device=g.device)
        return squares.index_add_(0, pairs // table, squared_norms(summed))

    def summands() -> Summands:
        return Summands((squared_norms(g) * positions).sqrt(), positions)  # Σ_t ‖g_t‖ ≤ √T ‖g‖

    weight = LayerGradient(per_sample, weighted_sum, squared_norms=ghost_norms, summands=summands)
    return {"weight": weight}
