"""Norms of a batch's per-sample gradients and the clip factors that follow.

Float32 numbers on a CPU take one compiled loop. torch takes some forty calls for it, each longer
than the arithmetic of a small network.
"""

from __future__ import annotations

import math
from functools import cache, reduce
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import carray
from torch import Tensor

from zdp_bench.gradients.clipping import SAFETY, SMALLEST, clip_factors
from zdp_bench.gradients.norms import flat, squared_norms_of
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
    word_of,
)

A_SHARE = 2**13  # numbers that a thread measures at a time, at least


class Term(NamedTuple):
    """What one parameter adds to the squared norms of the records it is clipped with, [B]: Π ‖rows of a part‖² · scale².

    Attributes:
        parts: one or two [B, *]; or none, where `squares` are there.
        squares: [B] float64.
    """

    parts: tuple[Tensor, ...]
    squares: Tensor | None = None
    scale: float = 1.0


class Clipping(NamedTuple):
    """Norms and `clip_factors` of B records, [B] float64 each."""

    norms: Tensor
    factors: Tensor


def clipping(terms: list[Term], bound: float) -> Clipping:
    """Norms √Σ terms, at least one, and factors min(1, bound/norm).

    Args:
        bound: infinite for no clipping.
    """
    return _by_loop(terms, bound, _weigher()) or _by_torch(terms, bound)


def _by_torch(terms: list[Term], bound: float) -> Clipping:
    """On any device, in any precision."""
    parts = {id(part): part for term in terms for part in term.parts}
    squares_of = dict(zip(parts, squared_norms_of([*parts.values()]), strict=True))
    squares = []
    for term in terms:
        own = (
            reduce(torch.mul, (squares_of[id(part)] for part in term.parts))
            if term.squares is None
            else term.squares
        )
        squares.append(own if term.scale == 1 else own * term.scale**2)
    norms = torch.stack(squares).sum(dim=0).sqrt_()
    return Clipping(norms, clip_factors(norms, bound))


# Words of a task's one item, in front of those of parts and terms.
_RECORDS, _A_SHARE, _PARTS, _TERMS, _LIMIT, _NORMS, _FACTORS, _FIRST = range(8)
# Of each part: its address, and the numbers of one record.
_PLACE, _LENGTH, _PART = range(3)
# Of each term: the numbers of its parts or -1, where its squares lie, and its scale.
_ONE, _OTHER, _SQUARES, _SCALE, _TERM = range(5)
_SHRUNK = float(SMALLEST)


def _weigh_records(task: Any) -> None:
    """See `Clipping`; a share is some records."""
    wide_vectors()
    squares, notes = np.empty(16, np.float64), begin(task)
    while True:
        at, share = next_share(task, notes)
        if at < 0:
            break
        records, parts, terms = task[at + _RECORDS], task[at + _PARTS], task[at + _TERMS]
        limit = np.int64(task[at + _LIMIT]).view(np.float64)
        norms, factors = (
            carray(float64_at(task[at + _NORMS]), (records,)),
            carray(float64_at(task[at + _FACTORS]), (records,)),
        )
        first_part, first_term = at + _FIRST, at + _FIRST + parts * _PART
        if parts > len(squares):
            squares = np.empty(parts, np.float64)
        for i in range(
            share * task[at + _A_SHARE], min((share + 1) * task[at + _A_SHARE], records)
        ):
            for part in range(parts):
                words = first_part + part * _PART
                length = task[words + _LENGTH]
                squares[part] = sum_of_squares(
                    carray(float32_at(task[words + _PLACE] + 4 * i * length), (length,))
                )
            total = 0.0
            for term in range(terms):
                words = first_term + term * _TERM
                if task[words + _ONE] < 0:
                    square = carray(float64_at(task[words + _SQUARES]), (records,))[i]
                else:
                    square = squares[task[words + _ONE]]
                    if task[words + _OTHER] >= 0:
                        square *= squares[task[words + _OTHER]]
                scale = np.int64(task[words + _SCALE]).view(np.float64)
                total += square * (scale * scale)
            norm = np.sqrt(total)
            factor = 1.0
            if limit < np.inf:
                ratio = (1.0 / norm) * limit
                if not ratio > _SHRUNK:  # as where the norm is NaN; see `clipping.held`
                    ratio = 0.0
                factor = 1.0 if ratio > 1.0 else ratio
            norms[i], factors[i] = norm, factor


@cache
def _weigher() -> Loop:
    return compiled(_weigh_records)


def _by_loop(terms: list[Term], bound: float, loop: Loop) -> Clipping | None:
    """None where anything is not of float32 numbers on a CPU."""
    places: dict[int, int] = {}  # of parts, by id
    all_rows: list[Tensor] = []
    held: list[Tensor] = []  # must not go before the loop has read it
    of_parts: list[int] = []
    of_terms: list[int] = []
    records, a_record = 0, 1
    for parts, squares, scale in terms:
        pair, at = [-1, -1], 0
        for which, part in enumerate(parts):
            own = id(part)
            if own not in places:
                rows = _side_by_side(part)
                if rows is None:
                    return None
                places[own] = len(places)
                all_rows.append(rows)
                records = part.shape[0]
                length = rows.nbytes // (4 * records) if records else 0
                a_record += length
                of_parts += (rows.data_ptr(), length)
            pair[which] = places[own]
        if squares is not None:
            if not squares.is_cpu:
                return None
            records, squares = len(squares), squares.contiguous()
            held.append(squares)
            at = squares.data_ptr()
        of_terms += (*pair, at, word_of(scale, "<d"))
    norms, factors = (
        torch.empty(records, dtype=torch.float64),
        torch.empty(records, dtype=torch.float64),
    )
    a_share = max(1, A_SHARE // a_record)
    limit = bound if math.isinf(bound) else bound * SAFETY
    words = [
        records,
        a_share,
        len(places),
        len(terms),
        word_of(limit, "<d"),
        norms.data_ptr(),
        factors.data_ptr(),
    ]
    loop.run(task_of([(-(-records // a_share), words + of_parts + of_terms)]))
    return Clipping(norms, factors)


_NARROW = (torch.float32, torch.complex64)


def _side_by_side(part: Tensor) -> Tensor | None:
    """A part's numbers as they lie in memory, row after row: itself, or a copy where there are gaps, or a bar or sign that waits.
    None where they are not float32's."""
    if part.dtype not in _NARROW or not part.is_cpu:
        return None
    if part.is_conj() or part.is_neg():
        part = part.resolve_conj().resolve_neg()
    if part.is_contiguous():
        return part
    return part.contiguous() if part.dim() == 2 else flat(part).contiguous()
