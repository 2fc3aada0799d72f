"""Layer rules: what one call of a layer says of its parameters' per-sample gradients, from its input and output gradient.

A rule is one function, entered for exact layer types: a subclass may compute something else, and then has no rule. It returns a
`Share` for each of the layer's own parameters that trains. Every gradient is PyTorch's own `.grad`: gᵢ xᵢᴴ for y = W x, with
the input conjugated. Nothing is computed until a share is asked; `fast.py` asks, and decides what is kept.

A layer that has parameters and no rule is taken by `any_layer.py`: the reference, for that layer alone.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from functools import cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zdp_bench.gradients.clipping import flushed
from zdp_bench.gradients.norms import squared_norms_of
from zdp_bench.kernels.memory_format import memory_order


class NoRule(ValueError):  # noqa: N818  it is an answer, not an accident
    """Book-keeping cannot serve this layer, or this call of it; the sentence says why. The reference engine can."""


class Terms(NamedTuple):
    """What a record's gradient is summed up from: `number` products, whose norms add up to `mass` at most, [B] in float64."""

    mass: Tensor
    number: int


class Share(NamedTuple):
    """One call's per-sample gradients of one parameter.

    Attributes:
        rows: records (start, stop) -> their gradients, [stop - start, *shape].
        weighted_sum: real factors [B] -> Σᵢ cᵢ gᵢ, [*shape].
        ghost: squared norms [B] in float64 without forming a gradient; None where forming them is cheaper.
        measured: as `rows`, and their squared norms in float64, where the two come together.
        product: tensors [B, *] the product of whose rows' norms is the gradient's: the gradients themselves where they are
            there, or the two sides of an outer product. Where there are such, nothing else is asked for a norm.
        terms: what `weighted_sum` adds up for each record, where it does not add up the very `rows` that are measured. Terms
            that cancel in a norm leave rounding errors behind in a sum (`clipping.guarded`).
    """

    rows: Callable[[int, int], Tensor]
    weighted_sum: Callable[[Tensor], Tensor]
    ghost: Callable[[], Tensor] | None = None
    measured: Callable[[int, int], tuple[Tensor, Tensor]] | None = None
    product: Callable[[], tuple[Tensor, ...]] | None = None
    terms: Callable[[], Terms] | None = None


Rule = Callable[
    [nn.Module, Tensor, Tensor], dict[str, Share]
]  # (layer, input [B, ...], output gradient [B, ...])
_rules: dict[type[nn.Module], Rule] = {}


def rule(*types: type[nn.Module]) -> Callable[[Rule], Rule]:
    """Enter the decorated function as the rule of these layer types."""

    def enter(function: Rule) -> Rule:
        for layer in types:
            _rules[layer] = function
        return function

    return enter


def rule_of(layer: nn.Module) -> Rule | None:
    """The rule entered for exactly this type of layer."""
    return _all_rules().get(type(layer))


@cache
def _all_rules() -> dict[type[nn.Module], Rule]:
    """With those of every file beside this one. Even an import that has been made takes longer than a look."""
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        importlib.import_module(module.name)
    return _rules


def kept(rows: Tensor) -> Share:
    """A share whose gradients [B, *shape] are there already: small ones always are."""
    return Share(
        lambda start, stop: rows[start:stop],
        lambda factors: contract(rows, factors),
        product=lambda: (rows,),
    )


def products(g: Tensor, x: Tensor, positions: int, uses: int = 1) -> Terms:
    """The terms of Σ_t g_t x_tᴴ, for g and x [B, ...]: Σ_t ‖g_t‖‖x_t‖ ≤ ‖g‖‖x‖·√uses (Cauchy and Schwarz).

    Args:
        positions: how many t there are.
        uses: at how many positions a number of x is met at most (a convolution's kernel).
    """
    of_g, of_x = squared_norms_of([g, x])
    return Terms((of_g * of_x * uses).sqrt(), positions)


def contract(rows: Tensor, factors: Tensor) -> Tensor:
    """Σᵢ cᵢ rowᵢ: [B, *shape], real [B] -> [*shape]. One pass over the rows, in whatever order they lie in memory."""
    if rows.dim() == 2 and not rows.is_complex():
        return torch.mv(rows.T, factors.to(rows.dtype))
    real = torch.view_as_real(rows.resolve_conj()) if rows.is_complex() else rows
    if real.is_contiguous():
        summed = torch.mv(
            real.view(len(real), prod(real.shape[1:])).T, factors.to(real.dtype)
        ).view(real.shape[1:])
        return torch.view_as_complex(summed) if rows.is_complex() else summed
    order = memory_order(real)
    ordered = real.permute(0, *order)
    summed = torch.mv(
        ordered.reshape(len(real), prod(real.shape[1:])).T, factors.to(real.dtype)
    ).view(ordered.shape[1:])
    back = [order.index(dim) for dim in range(1, real.dim())]
    summed = summed.permute(back).contiguous()  # so that noise can be laid over it as it is
    return torch.view_as_complex(summed) if rows.is_complex() else summed


def weigh(g: Tensor, factors: Tensor) -> Tensor:
    """cᵢ gᵢ, for g [B, ...], `flushed`."""
    if g.is_complex():  # a complex number times a real one is four products to torch
        return torch.view_as_complex(weigh(torch.view_as_real(g.resolve_conj()), factors))
    return flushed(g * factors.to(g.dtype).view(-1, *[1] * (g.dim() - 1)))


def matrix_sum(g: Tensor, x: Tensor) -> Tensor:
    """Σₙ gₙ xₙᴴ, for g [N, O] and x [N, D]: (gᴴx)‾, lazily conjugated, as BLAS conjugates only transposed matrices."""
    return (g.mH @ x).conj()


# ---------------------------------------------------------------------------------------------------------- counting

# Arithmetic a core does in the time it takes to move one byte of memory to and fro; a ratio of 4 to 16 on today's machines.
OPERATIONS_A_BYTE = 8


def ghost_is_cheaper(positions: int, outputs: int, inputs: int, itemsize: int) -> bool:
    """Whether two T×T Gram matrices cost less than forming a gradient of outputs×inputs, for one record.

    Both ways end in one product of 2·T·O·D operations (the weighted sum here, the gradient there), so what counts is the rest:
    the Gram matrices, which must be float64 (they cancel), against writing the gradient and reading it twice.
    """
    gram = 4 * positions**2 * (outputs + inputs)
    return gram < 3 * itemsize * outputs * inputs * OPERATIONS_A_BYTE
