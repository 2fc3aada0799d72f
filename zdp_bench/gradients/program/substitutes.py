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


# Arguments have torch's names, because a model may pass them by name.


def _take_along_dim(
    input: Tensor,
    indices: Tensor,
    dim: int | None = None,
) -> Tensor:
    if dim is None or input.dim() != indices.dim():
        return torch.take_along_dim(input, indices, dim)
    sizes = zip(input.shape, indices.shape, strict=True)
    common = [indices_size if size == 1 else size for size, indices_size in sizes]
    input_shape, indices_shape = list(common), list(common)
    input_shape[dim] = input.shape[dim]
    indices_shape[dim] = indices.shape[dim]
    return input.expand(input_shape).gather(dim, indices.expand(indices_shape))


def _cdist(
    x1: Tensor,
    x2: Tensor,
    p: float = 2.0,
    compute_mode: str = "",
) -> Tensor:
    """Compute `torch.cdist` by a method that does not depend on the number of rows."""
    return torch.cdist(x1, x2, p, "donot_use_mm_for_euclid_dist")


def _chunk(
    input: Tensor,
    chunks: int,
    dim: int = 0,
) -> Any:
    size: Any = input.shape[dim]
    if isinstance(size, torch.SymInt) and factor_of(size) % chunks == 0:
        return input.split_with_sizes([size // chunks] * chunks, dim)
    return torch.chunk(input, chunks, dim)


def _embedding_bag(
    input: Tensor,
    weight: Tensor,
    *args: Any,
    **options: Any,
) -> Tensor:
    """Compute `F.embedding_bag` for sums and means of bags [B, T]."""
    mode = options.get("mode", "mean")
    padding = options.get("padding_idx")
    used = {name for name, value in options.items() if value is not None and value is not False}
    is_pooled = used <= PLAIN_OPTIONS and options.get("offsets") is None and mode != "max"
    if args or input.dim() != 2 or not is_pooled:
        return F.embedding_bag(input, weight, *args, **options)
    rows = F.embedding(input, weight)
    if padding is None:
        return rows.mean(dim=1) if mode == "mean" else rows.sum(dim=1)
    counted = (input != padding % weight.shape[0]).unsqueeze(2).to(rows.dtype)
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
