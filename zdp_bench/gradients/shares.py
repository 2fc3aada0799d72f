"""Shares of several examples: what one patient brings to a step is clipped as one gradient.

The examples of a batch stand share by share, and `shares` says how many each has: (3, 1) are a
share of three examples and one of a single example. A share's gradient is the MEAN of its examples'
gradients, as long as one example's, so that a bound means the same with and without shares.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor

from zdp_bench.gradients.clipping import held
from zdp_bench.gradients.layer_gradient import LayerGradient, Summands, summands_of
from zdp_bench.gradients.norms import squared_norms

Shares = tuple[int, ...]  # the number of examples of each share, in order; none is 0


def cut(shares: Shares) -> list[slice]:
    """Return where each share's examples stand in the batch."""
    ends = [*accumulate(shares)]
    return [slice(end - many, end) for many, end in zip(shares, ends, strict=True)]


def select(shares: Shares, chosen: Tensor) -> tuple[Tensor, Shares]:
    """Return a mask [B] of the examples of the chosen shares (a mask [S]), and these shares."""
    many = torch.tensor(shares, device=chosen.device)
    kept = tuple(n for n, keep in zip(shares, chosen.tolist(), strict=True) if keep)
    return chosen.repeat_interleave(many), kept


def average_shares(
    whole: LayerGradient, rule: Callable[[slice], LayerGradient], shares: Shares
) -> LayerGradient:
    """Return the gradients of shares, [S, *shape], in place of the examples', [B, *shape].

    A share's gradient is one contraction over its examples and their positions, so that no
    example's is ever formed.

    Args:
        whole: the gradients of all examples.
        rule: the gradients of the examples in a slice of the batch. No output gradient may be too
            small to be held in full (`clipping.flushed`): the contraction drops such numbers, and
            norms would miss them.
    """
    cuts = cut(shares)

    def average(of: slice) -> Tensor:
        many = of.stop - of.start
        return rule(of).weighted_sum(torch.ones(many, dtype=torch.float64)) / many

    def per_share(start: int, stop: int) -> tuple[Tensor, Tensor]:
        found: Tensor | None = None
        squares = []
        for row, of in enumerate(cuts[start:stop]):
            mean = average(of)
            found = mean.new_empty(stop - start, *mean.shape) if found is None else found
            found[row] = mean
            squares.append(squared_norms(mean.unsqueeze(0)))  # while it is in the core's cache
        assert found is not None
        return found, torch.cat(squares)

    def weighted_sum(factors: Tensor) -> Tensor:
        many = torch.tensor(shares, device=factors.device)
        return whole.weighted_sum(held(factors / many).repeat_interleave(many))

    def summands() -> Summands:
        each = summands_of(whole)
        mass = torch.stack([each.mass[of].mean() for of in cuts])
        return Summands(mass, each.number * max(shares))

    return LayerGradient(
        lambda start, stop: per_share(start, stop)[0],
        weighted_sum,
        per_sample_and_norms=per_share,
        summands=summands,
    )
