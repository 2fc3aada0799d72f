"""Norms of per-sample gradients, in float64: one that comes out too small lets its gradient exceed the bound.

torch's `vector_norm` in float32 measures rows of 10⁸ entries 1 % too small; in float64 it takes five times as long. So float32
rows on a CPU are measured by a loop of our own that squares and sums in float64: nothing is lost, overflows or underflows.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from numba import carray
from torch import Tensor

from zdp_bench.kernels.jit import (
    Loop,
    begin,
    compiled,
    float32_at,
    float64_at,
    next_share,
    sum_of_squares,
    task_of,
    wide_vectors,
)
from zdp_bench.kernels.memory_format import memory_order

BLOCK = 2**15  # entries of a row that are summed in one go, and about as many are a thread's share


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
    """‖row‖₂² of several [B, ...], [B] each, in float64: a small network's cost more to ask for one by one than to sum."""
    if all(each.dtype in (torch.float32, torch.complex64) and each.is_cpu for each in several):
        return _summed(several, _squarer())
    return [
        torch.linalg.vector_norm(flat(each), dim=1, dtype=torch.float64).square_()
        for each in several
    ]


def all_finite(norms: Tensor) -> bool:
    """Whether none is ∞ or NaN: of one NaN the largest is NaN."""
    return norms.numel() == 0 or math.isfinite(norms.max())


def _square_blocks(task: Any) -> None:
    """Σ x² of every block of every row; an item's words: places of rows and sums, blocks in all, a row's, a share's, and a row's
    entries."""
    wide_vectors()
    notes = begin(task)
    while True:
        at, share = next_share(task, notes)
        if at < 0:
            break
        blocks, a_row, a_share, length = task[at + 2], task[at + 3], task[at + 4], task[at + 5]
        sums = carray(float64_at(task[at + 1]), (blocks,))
        for i in range(share * a_share, min((share + 1) * a_share, blocks)):
            row, block = i // a_row, i % a_row
            numbers = carray(
                float32_at(task[at] + 4 * (row * length + block * BLOCK)),
                (min(BLOCK, length - block * BLOCK),),
            )
            sums[i] = sum_of_squares(numbers)


@cache
def _squarer() -> Loop:
    return compiled(_square_blocks)


def _summed(several: list[Tensor], loop: Loop) -> list[Tensor]:
    """Σ |x|² of each row of float32 or complex64 [B, ...]; [B] each, in float64, for any number of threads alike."""
    sides = [rows if rows.is_contiguous() else flat(rows).contiguous() for rows in several]
    items, shapes, cells = [], [], 0
    for rows in sides:
        count, numbers = len(rows), rows.numel() * (2 if rows.is_complex() else 1)
        length = numbers // count if count else 0
        blocks, a_share = -(-length // BLOCK), BLOCK // length or 1 if length else 1
        items.append(
            (
                -(-count * blocks // a_share),
                [rows.data_ptr(), cells, count * blocks, blocks, a_share, length],
            )
        )
        shapes.append((count, blocks))
        cells += count * blocks
    sums = torch.empty(cells, dtype=torch.float64)
    for _, words in items:
        words[1] = sums.data_ptr() + 8 * words[1]
    loop.run(task_of(items))
    parts = zip(sums.split([count * blocks for count, blocks in shapes]), shapes, strict=True)
    return [
        part if blocks == 1 else part.view(count, blocks).sum(dim=1)
        for part, (count, blocks) in parts
    ]
