"""Embedding tables: a record's gradient is non-zero only in the rows it looked up."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zdp_bench.gradients.norms import squared_norms
from zdp_bench.gradients.rules import NoRule, Share, Terms, rule, weigh


@rule(nn.Embedding)
def embedding(layer: nn.Module, x: Tensor, g: Tensor) -> dict[str, Share]:
    """x [B, *] indices, g [B, *, E]. The norm sums the output gradients of equal indices first, then squares."""
    assert isinstance(layer, nn.Embedding)
    if layer.scale_grad_by_freq or layer.sparse or layer.max_norm is not None:
        raise NoRule("an embedding with scale_grad_by_freq, sparse or max_norm")
    records, table = len(x), layer.weight.shape[0]
    x, g = x.reshape(records, -1), g.reshape(records, -1, g.shape[-1])  # [B, T], [B, T, E]
    if layer.padding_idx is not None:
        g = g * (x != layer.padding_idx).unsqueeze(-1)

    def rows(start: int, stop: int) -> Tensor:
        zeros = g.new_zeros(stop - start, table, g.shape[-1])
        return zeros.scatter_add_(
            1, x[start:stop].unsqueeze(-1).expand(-1, -1, g.shape[-1]), g[start:stop]
        )

    def weighted_sum(factors: Tensor) -> Tensor:
        return g.new_zeros(table, g.shape[-1]).index_add_(
            0, x.flatten(), weigh(g, factors).flatten(0, 1)
        )

    def ghost() -> Tensor:
        owner = torch.arange(records, device=x.device).unsqueeze(1)
        looked_up, where = torch.unique(
            owner * table + x, return_inverse=True
        )  # (record, index) pairs
        summed = g.new_zeros(len(looked_up), g.shape[-1]).index_add_(
            0, where.flatten(), g.flatten(0, 1)
        )
        squares = torch.zeros(records, dtype=torch.float64, device=g.device)
        return squares.index_add_(0, looked_up // table, squared_norms(summed))

    def terms() -> Terms:
        looked_up = x.shape[1]
        return Terms((squared_norms(g) * looked_up).sqrt(), looked_up)  # Σ_t ‖g_t‖ ≤ √T ‖g‖

    return {"weight": Share(rows, weighted_sum, ghost, terms=terms)}
