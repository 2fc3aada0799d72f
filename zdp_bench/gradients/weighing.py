"""Norms of a batch's per-sample gradients and the clip factors that follow."""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from zdp_bench.gradients.clipping import clip_factors
from zdp_bench.gradients.norms import squared_norms_of


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
