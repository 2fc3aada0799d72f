"""Substitutes for functions that torch records for a fixed batch size only.

Each substitute computes the same result by functions that torch records for any batch size. Calls
that it does not support are passed on to the original function.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zdp_bench.gradients.program.calls import factor_of

PLAIN_OPTIONS = {"mode", "padding_idx", "norm_type", "include_last_offset", "offsets"}


def _take_along_dim(
    x: Tensor,
    indices: Tensor,
    dim: int | None = None,
) -> Tensor:
    if dim is None or x.dim() != indices.dim():
        return torch.take_along_dim(x, indices, dim)
    sizes = zip(x.shape, indices.shape, strict=True)
    common = [indices_size if x_size == 1 else x_size for x_size, indices_size in sizes]
    x_shape, indices_shape = list(common), list(common)
    x_shape[dim] = x.shape[dim]
    indices_shape[dim] = indices.shape[dim]
    return x.expand(x_shape).gather(dim, indices.expand(indices_shape))


def _cdist(
    x: Tensor,
    y: Tensor,
    p: float = 2.0,
    compute_mode: str = "",
) -> Tensor:
    """Compute `torch.cdist` by a method that does not depend on the number of rows."""
    return torch.cdist(x, y, p, "donot_use_mm_for_euclid_dist")


def _chunk(
    x: Tensor,
    chunks: int,
    dim: int = 0,
) -> Any:
    size: Any = x.shape[dim]
    if isinstance(size, torch.SymInt) and factor_of(size) % chunks == 0:
        return x.split_with_sizes([size // chunks] * chunks, dim)
    return torch.chunk(x, chunks, dim)


def _embedding_bag(
    words: Tensor,
    table: Tensor,
    *args: Any,
    **options: Any,
) -> Tensor:
    """Compute `F.embedding_bag` for sums and means of bags [B, T]."""
    mode = options.get("mode", "mean")
    padding = options.get("padding_idx")
    used = {name for name, value in options.items() if value is not None and value is not False}
    is_pooled = used <= PLAIN_OPTIONS and options.get("offsets") is None and mode != "max"
    if args or words.dim() != 2 or not is_pooled:
        return F.embedding_bag(words, table, *args, **options)
    rows = F.embedding(words, table)
    if padding is None:
        return rows.mean(dim=1) if mode == "mean" else rows.sum(dim=1)
    counted = (words != padding % table.shape[0]).unsqueeze(2).to(rows.dtype)
    total = (rows * counted).sum(dim=1)
    if mode == "mean":
        total = total / counted.sum(dim=1).clamp(min=1)
    return total


SUBSTITUTES: dict[Any, Any] = {
    torch.take_along_dim: _take_along_dim,
    Tensor.take_along_dim: _take_along_dim,
    torch.cdist: _cdist,
    torch.chunk: _chunk,
    Tensor.chunk: _chunk,
    F.embedding_bag: _embedding_bag,
}
