"""Norms of per-sample gradients, in float64: a norm too small lets its gradient exceed the bound.

torch's `vector_norm` in float32 measures rows of 10⁸ entries 1 % too small. In float64 nothing is
lost, overflows or underflows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from zdp_bench.nn.memory_format import memory_order


def squared_norms(gradients: Tensor) -> Tensor:
    """Return ‖gᵢ‖₂² of [B, ...], [B] in float64."""
    return torch.linalg.vector_norm(_flat(gradients), dim=1, dtype=torch.float64).square_()


def _flat(rows: Tensor) -> Tensor:
    """Return [B, ...] as real [B, n], in the order of memory: a view where possible."""
    if rows.is_complex():
        rows = torch.view_as_real(rows.resolve_conj())
    elif rows.dim() == 2:
        return rows
    if rows.is_contiguous():
        return rows.flatten(1)
    return rows.permute(0, *memory_order(rows)).reshape(rows.shape[0], math.prod(rows.shape[1:]))


def all_finite(norms: Tensor) -> bool:
    """True if none is ∞ or NaN; the maximum of numbers with a NaN is NaN."""
    return norms.numel() == 0 or math.isfinite(norms.max())
