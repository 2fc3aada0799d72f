"""Norms of per-sample gradients, in float64: one that comes out too small lets its gradient exceed the bound.

torch's `vector_norm` in float32 measures rows of 10⁸ entries 1 % too small. In float64 nothing is
lost, overflows or underflows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from zdp_bench.kernels.memory_format import memory_order


def flat(rows: Tensor) -> Tensor:
    """[B, ...] -> real [B, n], the entries of each row in the order they lie in memory: a view wherever there is one."""
    if rows.is_complex():
        rows = torch.view_as_real(rows.resolve_conj())
    elif rows.dim() == 2:
        return rows
    if rows.is_contiguous():
        return rows.flatten(1)
    return rows.permute(0, *memory_order(rows)).reshape(rows.shape[0], math.prod(rows.shape[1:]))


def squared_norms(rows: Tensor) -> Tensor:
    """‖row‖₂² of each row, [B, ...] -> [B] in float64."""
    return squared_norms_of([rows])[0]


def squared_norms_of(several: list[Tensor]) -> list[Tensor]:
    """‖row‖₂² of several [B, ...], [B] each, in float64."""
    return [
        torch.linalg.vector_norm(flat(each), dim=1, dtype=torch.float64).square_()
        for each in several
    ]


def all_finite(norms: Tensor) -> bool:
    """Whether none is ∞ or NaN: of one NaN the largest is NaN."""
    return norms.numel() == 0 or math.isfinite(norms.max())
