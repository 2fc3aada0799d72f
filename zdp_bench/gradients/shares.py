"""Shares of several examples: an owner's part of the sum, clipped as one gradient.

The examples of a batch are ordered by share, and `shares` contains the number of examples of each:
(3, 1) is a share of three examples followed by a share of one. A share's gradient is the MEAN of
its examples' gradients. Its norm is therefore like that of one example, and a clipping norm means
the same with and without shares.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import accumulate, compress, pairwise

import torch
from torch import Tensor

from zdp_bench.gradients.clipping import flush_factors, squared_norms
from zdp_bench.gradients.layer_gradient import LayerGradient, Summands, summands_of

# Entries up to which the gradients of a share's examples are formed and added up, instead of
# computing the share's gradient by a contraction of its own.
MAX_SUMMED_ENTRIES = 2**12

Shares = tuple[int, ...]  # number of examples of each share, in order; each at least 1


def cut(shares: Shares) -> list[slice]:
    """Return the slice of the batch that contains each share's examples."""
    return [slice(start, end) for start, end in pairwise(_borders(shares))]


def _borders(shares: Shares) -> list[int]:
    """Return the index at which each share starts, followed by the number of examples."""
    return [0, *accumulate(shares)]


def select(shares: Shares, chosen: Tensor) -> tuple[Tensor, Shares]:
    """Select shares by a mask.

    Args:
        shares: number of examples of each of the S shares.
        chosen: boolean mask of shares, [S].

    Returns:
        A boolean mask of the chosen shares' examples, [B], and the chosen shares.
    """
    sizes = torch.tensor(shares, device=chosen.device)
    chosen_shares = tuple(compress(shares, chosen.tolist()))
    return chosen.repeat_interleave(sizes, output_size=sum(shares)), chosen_shares


def average_shares(
    rule: Callable[[slice], dict[str, LayerGradient]],
    shares: Shares,
    device: torch.device,
) -> dict[str, LayerGradient]:
    """Return each parameter's gradients of shares, [S, *shape], from a layer's rule for examples.

    A share's gradient is one contraction over its examples and their positions, so no example's
    gradient is formed. Small gradients that need no contraction, such as those of biases, are
    added up instead.

    Args:
        rule: slice of the batch -> gradients of its examples, by parameter name. The output
            gradients must not be subnormal (`clipping.flush_subnormals`), or norms would be wrong.
        shares: number of examples of each share.
        device: device of the gradients.
    """
    slices = cut(shares)
    # Cached because the function is called for each parameter of the layer.
    gradients_of = cache(lambda index: rule(slices[index]))
    example_gradients = rule(slice(0, sum(shares)))

    def average_share(name: str, index: int) -> Tensor:
        gradient: LayerGradient = gradients_of(index)[name]
        size = shares[index]
        ones = torch.ones(size, dtype=torch.float64, device=device)
        return gradient.weighted_sum(ones) / size

    return {
        name: _average(gradient, partial(average_share, name), shares)
        for name, gradient in example_gradients.items()
    }


def _average(
    examples: LayerGradient,
    average_share: Callable[[int], Tensor],
    shares: Shares,
) -> LayerGradient:
    """Return the gradients of shares of one parameter.

    Args:
        examples: the gradients of all examples.
        average_share: index of a share -> its mean gradient, by one contraction.
        shares: number of examples of each share.
    """
    borders = _borders(shares)
    is_formed = examples.summands is None
    is_small = is_formed and examples.per_sample(0, 1).numel() <= MAX_SUMMED_ENTRIES

    def add_up_each(start: int, stop: int) -> tuple[Tensor, Tensor]:
        first, end = borders[start], borders[stop]
        gradients = examples.per_sample(first, end).resolve_conj()
        sizes = torch.tensor(shares[start:stop], device=gradients.device)
        indices = torch.arange(stop - start, device=gradients.device)
        share_of_example = indices.repeat_interleave(sizes, output_size=end - first)
        _, *shape = gradients.shape
        means = gradients.new_zeros(stop - start, *shape)
        means.index_add_(0, share_of_example, gradients)
        means /= sizes.view(-1, *[1] * len(shape))
        return means, squared_norms(means)

    def contract_each(start: int, stop: int) -> tuple[Tensor, Tensor]:
        first = average_share(start)
        means = first.new_empty(stop - start, *first.shape)
        squares = []
        for index in range(start, stop):
            mean = first if index == start else average_share(index)
            means[index - start] = mean
            squares.append(squared_norms(mean.unsqueeze(0)))  # while it is in the core's cache
        return means, torch.cat(squares)

    means_and_norms = add_up_each if is_small else contract_each

    def per_share(start: int, stop: int) -> Tensor:
        means, _ = means_and_norms(start, stop)
        return means

    def weighted_sum(factors: Tensor) -> Tensor:
        sizes = torch.tensor(shares, device=factors.device)
        factors_of_shares = flush_factors(factors / sizes)
        # Without a size, a GPU would wait for the sum of `sizes`.
        return examples.weighted_sum(
            factors_of_shares.repeat_interleave(sizes, output_size=sum(shares))
        )

    def summands() -> Summands:
        mass, count = summands_of(examples)
        mean_masses = [mass[share].mean() for share in cut(shares)]
        return Summands(torch.stack(mean_masses), count * max(shares))

    return LayerGradient(
        per_share,
        weighted_sum,
        per_sample_and_norms=means_and_norms,
        summands=summands,
    )
