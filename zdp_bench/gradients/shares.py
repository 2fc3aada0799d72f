"""Shares of several examples: one patient's part of a step is clipped as one gradient.

The examples of a batch stand share by share, and `shares` says how many each has: (3, 1) are a
share of three examples and one of a single example. A share's gradient is the MEAN of its examples'
gradients, as long as one example's, so that a bound means the same with and without shares.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import accumulate, compress, pairwise

import torch
from torch import Tensor

from zdp_bench.gradients.clipping import held, squared_norms
from zdp_bench.gradients.layer_gradient import LayerGradient, Summands, summands_of

SMALL = 2**12  # numbers of a gradient: rather added up for each share than contracted anew

Shares = tuple[int, ...]  # the number of examples of each share, in order; none is 0


def cut(shares: Shares) -> list[slice]:
    """Return where each share's examples are in the batch."""
    return [slice(start, end) for start, end in pairwise(_borders(shares))]


def _borders(shares: Shares) -> list[int]:
    """Return where each share begins, and where the last one ends."""
    return [0, *accumulate(shares)]


def select(shares: Shares, chosen: Tensor) -> tuple[Tensor, Shares]:
    """Return a mask [B] of the examples of the chosen shares (a mask [S]), and these shares."""
    sizes = torch.tensor(shares, device=chosen.device)
    chosen_shares = tuple(compress(shares, chosen.tolist()))
    return chosen.repeat_interleave(sizes), chosen_shares


def average_shares(
    rule: Callable[[slice], dict[str, LayerGradient]],
    shares: Shares,
) -> dict[str, LayerGradient]:
    """Return each parameter's gradients of shares, [S, *shape], from a layer's rule for examples.

    A share's gradient is one contraction over its examples and their positions, so that no
    example's is formed. Small ones that need no contraction, of biases and norms, are added up. No
    output gradient may be too small to be held in full (`clipping.flushed`): norms would miss it.
    """
    cuts = cut(shares)
    gradients_of = cache(lambda number: rule(cuts[number]))  # one for all parameters of the layer
    whole = rule(slice(0, sum(shares)))

    def mean_of_one(name: str, number: int) -> Tensor:
        gradient: LayerGradient = gradients_of(number)[name]
        size = shares[number]
        ones = torch.ones(size, dtype=torch.float64)
        return gradient.weighted_sum(ones) / size

    return {
        name: _average(gradient, partial(mean_of_one, name), shares)
        for name, gradient in whole.items()
    }


def _average(
    whole: LayerGradient,
    mean_of_one: Callable[[int], Tensor],
    shares: Shares,
) -> LayerGradient:
    """Return one parameter's, from those of all examples and a function that averages a share's."""
    borders = _borders(shares)
    needs_contraction = whole.summands is not None
    is_small = not needs_contraction and whole.per_sample(0, 1).numel() <= SMALL

    def add_up_each(start: int, stop: int) -> tuple[Tensor, Tensor]:
        first, end = borders[start], borders[stop]
        gradients = whole.per_sample(first, end).resolve_conj()
        sizes = torch.tensor(shares[start:stop], device=gradients.device)
        numbers = torch.arange(stop - start, device=gradients.device)
        share_of_example = numbers.repeat_interleave(sizes)
        _, *shape = gradients.shape
        means = gradients.new_zeros(stop - start, *shape)
        means.index_add_(0, share_of_example, gradients)
        means /= sizes.view(-1, *[1] * len(shape))
        return means, squared_norms(means)

    def contract_each(start: int, stop: int) -> tuple[Tensor, Tensor]:
        first = mean_of_one(start)
        means = first.new_empty(stop - start, *first.shape)
        squares = []
        for number in range(start, stop):
            mean = first if number == start else mean_of_one(number)
            means[number - start] = mean
            squares.append(squared_norms(mean.unsqueeze(0)))  # while it is in the core's cache
        return means, torch.cat(squares)

    means_and_norms = add_up_each if is_small else contract_each

    def per_share(start: int, stop: int) -> Tensor:
        means, _ = means_and_norms(start, stop)
        return means

    def weighted_sum(factors: Tensor) -> Tensor:
        sizes = torch.tensor(shares, device=factors.device)
        factors_of_examples = held(factors / sizes).repeat_interleave(sizes)
        return whole.weighted_sum(factors_of_examples)

    def summands() -> Summands:
        mass, number = summands_of(whole)
        means = [mass[examples].mean() for examples in cut(shares)]
        return Summands(torch.stack(means), number * max(shares))

    return LayerGradient(
        per_share,
        weighted_sum,
        per_sample_and_norms=means_and_norms,
        summands=summands,
    )
