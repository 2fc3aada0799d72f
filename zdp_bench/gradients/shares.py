"""Shares of several examples: one patient's part of a step is clipped as one gradient.

The examples of a batch stand share by share, and `shares` says how many each has: (3, 1) are a
share of three examples and one of a single example. A share's gradient is the MEAN of its examples'
gradients, as long as one example's, so that a bound means the same with and without shares.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import accumulate

import torch
from torch import Tensor

from zdp_bench.gradients.clipping import held, squared_norms
from zdp_bench.gradients.layer_gradient import LayerGradient, Summands, summands_of

SMALL = 2**12  # numbers of a gradient: rather added up for each share than contracted anew

Shares = tuple[int, ...]  # the number of examples of each share, in order; none is 0


def cut(shares: Shares) -> list[slice]:
    """Return where each share's examples are in the batch."""
    ends = [*accumulate(shares)]
    return [slice(end - many, end) for many, end in zip(shares, ends, strict=True)]


def select(shares: Shares, chosen: Tensor) -> tuple[Tensor, Shares]:
    """Return a mask [B] of the examples of the chosen shares (a mask [S]), and these shares."""
    many = torch.tensor(shares, device=chosen.device)
    kept = tuple(n for n, keep in zip(shares, chosen.tolist(), strict=True) if keep)
    return chosen.repeat_interleave(many), kept


def average_shares(
    rule: Callable[[slice], dict[str, LayerGradient]], shares: Shares
) -> dict[str, LayerGradient]:
    """Return each parameter's gradients of shares, [S, *shape], from a layer's rule for examples.

    A share's gradient is one contraction over its examples and their positions, so that no
    example's is formed. Small ones that need no contraction, of biases and norms, are added up. No
    output gradient may be too small to be held in full (`clipping.flushed`): norms would miss it.
    """
    cuts = cut(shares)
    parts = cache(lambda number: rule(cuts[number]))  # one for all parameters of the layer
    whole = rule(slice(0, sum(shares)))

    def of_one(number: int, name: str) -> Tensor:
        many = shares[number]
        part: LayerGradient = parts(number)[name]
        return part.weighted_sum(torch.ones(many, dtype=torch.float64)) / many

    return {name: _average(own, partial(of_one, name=name), shares) for name, own in whole.items()}


def _average(
    whole: LayerGradient, of_one: Callable[[int], Tensor], shares: Shares
) -> LayerGradient:
    """Return one parameter's, from those of all examples and a function that averages a share's."""
    ends = [0, *accumulate(shares)]
    is_small = whole.summands is None and whole.per_sample(0, 1).numel() <= SMALL

    def added_up(start: int, stop: int) -> tuple[Tensor, Tensor]:
        each = whole.per_sample(ends[start], ends[stop]).resolve_conj()
        many = torch.tensor(shares[start:stop], device=each.device)
        owner = torch.arange(stop - start, device=each.device).repeat_interleave(many)
        found = each.new_zeros(stop - start, *each.shape[1:]).index_add_(0, owner, each)
        found /= many.view(-1, *[1] * (each.dim() - 1))
        return found, squared_norms(found)

    def per_share(start: int, stop: int) -> tuple[Tensor, Tensor]:
        if is_small:
            return added_up(start, stop)
        first = of_one(start)
        found, squares = first.new_empty(stop - start, *first.shape), []
        for number in range(start, stop):
            mean = first if number == start else of_one(number)
            found[number - start] = mean
            squares.append(squared_norms(mean.unsqueeze(0)))  # while it is in the core's cache
        return found, torch.cat(squares)

    def weighted_sum(factors: Tensor) -> Tensor:
        many = torch.tensor(shares, device=factors.device)
        return whole.weighted_sum(held(factors / many).repeat_interleave(many))

    def summands() -> Summands:
        each = summands_of(whole)
        mass = torch.stack([each.mass[of].mean() for of in cut(shares)])
        return Summands(mass, each.number * max(shares))

    return LayerGradient(
        lambda start, stop: per_share(start, stop)[0],
        weighted_sum,
        per_sample_and_norms=per_share,
        summands=summands,
    )
