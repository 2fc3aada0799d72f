"""Per-sample gradients of a parameter: `LayerGradient`, which a rule returns for each call of a
layer, `ParameterGradient`, which chooses how norms are taken, and the helpers that rules share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zdp_bench.gradients.clipping import add_up, flushed, guarded, squared_norms
from zdp_bench.nn.memory_format import memory_order

# Arithmetic operations a core does while it moves one byte of memory to and fro; 4 to 16 today.
OPERATIONS_PER_BYTE = 8


class Summands(NamedTuple):
    """What each example's gradient is added up from."""

    mass: Tensor  # an upper bound on the sum of their norms, [B] in float64
    number: int  # how many they are


@dataclass(frozen=True, slots=True)
class LayerGradient:
    """The per-sample gradients gᵢ of one parameter in one call of its layer.

    They follow PyTorch's `.grad`: gᵢ xᵢᴴ for y = W x. Nothing is computed before a function is
    called. A rule gives the first two, with `squared_norms`, `summands` or both;
    `ParameterGradient.measure` decides which of them is used.

    Attributes:
        per_sample: (start, stop) -> gradients of these examples, [stop - start, *shape].
        weighted_sum: real factors c [B] -> Σᵢ cᵢ gᵢ, [*shape].
        squared_norms: () -> ‖gᵢ‖² [B] in float64, if gradients exist or none is needed (ghost).
        per_sample_and_norms: as `per_sample`, with ‖gᵢ‖² [stop - start] in float64.
        summands: () -> what `weighted_sum` adds up, unless `squared_norms` measures these very
            numbers: where they cancel in a norm they leave errors in a sum (`clipping.guarded`).
    """

    per_sample: Callable[[int, int], Tensor]
    weighted_sum: Callable[[Tensor], Tensor]
    squared_norms: Callable[[], Tensor] | None = None
    per_sample_and_norms: Callable[[int, int], tuple[Tensor, Tensor]] | None = None
    summands: Callable[[], Summands] | None = None

    def __post_init__(self) -> None:
        if self.squared_norms is None and self.summands is None:
            raise TypeError("LayerGradient needs squared_norms or summands: see its docstring")

    @classmethod
    def of(cls, gradients: Tensor) -> LayerGradient:
        """From gradients [B, *shape] that exist already, as small ones always do."""
        return cls(
            lambda start, stop: gradients[start:stop],
            lambda factors: contract(gradients, factors),
            squared_norms=lambda: squared_norms(gradients),
        )

    def form(
        self,
        start: int,
        stop: int,
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of these examples and their squared norms."""
        if self.per_sample_and_norms is not None:
            return self.per_sample_and_norms(start, stop)
        gradients = self.per_sample(start, stop)
        return gradients, squared_norms(gradients)


def add_calls(calls: list[LayerGradient]) -> LayerGradient:
    """Return the gradient of a parameter over all calls; of several only sums have norms."""
    if len(calls) == 1:
        return calls[0]

    def summands() -> Summands:
        masses, numbers = zip(*(summands_of(call) for call in calls), strict=True)
        return Summands(torch.stack(masses).sum(dim=0), sum(numbers))

    def per_sample(start: int, stop: int) -> Tensor:
        return reduce(torch.add, (call.per_sample(start, stop) for call in calls))

    def weighted_sum(factors: Tensor) -> Tensor:
        return reduce(torch.add, (call.weighted_sum(factors) for call in calls))

    return LayerGradient(per_sample, weighted_sum, summands=summands)


def transform(
    call: LayerGradient,
    linear: Callable[[Tensor], Tensor],
    most: float,  # it makes no gradient longer than this many times
    summed: int,
) -> LayerGradient:
    """Return the gradients `linear(gᵢ)`, for a map of [*, *shape] that adds `summed` numbers up."""

    def summands() -> Summands:
        mass, number = summands_of(call)
        return Summands(mass * most, number + summed)

    return LayerGradient(
        lambda start, stop: linear(call.per_sample(start, stop)),
        lambda factors: linear(call.weighted_sum(factors)),
        summands=summands,
    )


def summands_of(call: LayerGradient) -> Summands:
    """Return what the weighted sum adds up; without any, the gradients themselves."""
    if call.summands is not None:
        return call.summands()
    assert call.squared_norms is not None  # `LayerGradient` requires one of the two
    return Summands(call.squared_norms().sqrt(), 1)


def bound_summands(
    g: Tensor,
    x: Tensor,
    positions: int,
    uses: int = 1,
) -> Summands:
    """Bound the summands of Σ_t g_t x_tᴴ, g and x [B, ...]: Σ_t ‖g_t‖‖x_t‖ ≤ ‖g‖‖x‖·√uses.

    That is Cauchy and Schwarz, with one entry of x at `uses` positions at most (a kernel's size).
    """
    squares = squared_norms(g) * squared_norms(x) * uses
    return Summands(squares.sqrt(), positions)


def contract(gradients: Tensor, factors: Tensor) -> Tensor:
    """Return Σᵢ cᵢ gᵢ: [B, *shape], real [B] -> [*shape]; one pass, in any memory order."""
    if gradients.is_complex():
        reals = torch.view_as_real(gradients.resolve_conj())
        return torch.view_as_complex(contract(reals, factors))
    factors = factors.to(gradients.dtype)
    if gradients.dim() == 2:
        return torch.mv(gradients.T, factors)
    dims = list(range(1, gradients.dim()))
    order = dims if gradients.is_contiguous() else memory_order(gradients)
    ordered = gradients.permute(0, *order)
    rows = ordered.reshape(len(gradients), prod(gradients.shape[1:]))
    total = torch.mv(rows.T, factors).view(ordered.shape[1:])
    return total.permute([order.index(dim) for dim in dims]).contiguous()


def weigh(g: Tensor, factors: Tensor) -> Tensor:
    """Return cᵢ gᵢ for g [B, ...], `flushed`."""
    if g.is_complex():  # torch multiplies a complex number by a real one as four products
        reals = torch.view_as_real(g.resolve_conj())
        return torch.view_as_complex(weigh(reals, factors))
    one_dims = [1] * (g.dim() - 1)
    own_factors = factors.to(g.dtype).view(-1, *one_dims)
    return flushed(g * own_factors)


def matrix_sum(g: Tensor, x: Tensor) -> Tensor:
    """Return Σₙ gₙ xₙᴴ for g [N, O] and x [N, D], maybe lazily conjugated.

    BLAS conjugates only what it transposes: so x is, or (gᴴx)‾ after, whichever is smaller.
    """
    if x.is_complex() and len(x) < g.shape[1]:
        return g.mT @ x.conj()
    return (g.mH @ x).conj()


def gram_norms(g: Tensor, x: Tensor) -> Tensor:
    """Return ‖Σ_t g_t x_tᴴ‖² = Σ_tu (g_uᴴ g_t)(x_tᴴ x_u), [B], for g [B, T, O] and x [B, T, D].

    In float64: the terms cancel where the gradient is small.
    """
    wide = torch.complex128 if g.is_complex() else torch.float64
    g, x = g.to(wide), x.to(wide)
    g_gram = torch.bmm(g, g.mH)  # [B, T, T]
    x_gram = torch.bmm(x, x.mH)
    terms = (g_gram * x_gram.conj()).real
    return terms.sum(dim=(1, 2)).clamp(min=0)


def ghost_is_cheaper(
    positions: int,
    outputs: int,
    inputs: int,
    itemsize: int,
) -> bool:
    """True if one example's two T×T Gram matrices cost less than forming its gradient [O, D].

    Both ways end in one product of 2·T·O·D operations. What counts is the rest: Gram matrices in
    float64, or writing the gradient and reading it twice.
    """
    gram = 4 * positions**2 * (outputs + inputs)
    return gram < 3 * itemsize * outputs * inputs * OPERATIONS_PER_BYTE


# -------------------------------------------------------------------- how a parameter is measured

# Gradients that are formed for their norms only take at most this many bytes at a time.
FORM_BYTES = 64 * 2**20
# A GPU takes so many times as much at once as a core's cache: here, in `fast.py` and in the rules.
GPU_TIMES = 32


def times_on(like: Tensor, of_gpu: int = GPU_TIMES) -> int:
    """Return how many times the limits of one core hold where a tensor is."""
    return of_gpu if like.is_cuda else 1


@dataclass(slots=True)
class ParameterGradient:
    """The per-sample gradients of one parameter, from its layer calls to their weighted sum.

    `weighted_sum` stays None where no example moves the loss through the parameter.
    """

    parameter: nn.Parameter
    pending_calls: int = 0
    calls: list[LayerGradient] = field(default_factory=list)
    kept: Tensor | None = None  # [B, *shape]
    squared_norms: Tensor | None = None  # [B] float64
    weighted_sum: Callable[[Tensor], Tensor] | None = None

    def measure(
        self,
        examples: int,
        freed: int,
        budget: int,
    ) -> int:
        """Take the norms, once all calls are in, in the first of these ways that applies:

            ghost    from the layer's `squared_norms`, without the gradients
            kept     the gradients are formed, measured, and kept for the sum, if memory allows
            formed   the gradients are formed, a few examples at a time, for their norms only

        Unless gradients are kept, the layer's own contraction sums them, whose rounding errors the
        norms must cover (`clipping.guarded`).

        Args:
            freed: bytes of the activations that go where gradients are kept instead.
            budget: bytes that kept gradients may take otherwise; those spent are returned.
        """
        gradient = add_calls(self.calls)
        needed = self.parameter.nbytes * examples * len(self.calls)
        self.calls = []
        self.weighted_sum = gradient.weighted_sum
        if gradient.squared_norms is not None:
            self.squared_norms = self._guard(gradient, gradient.squared_norms())
        elif needed <= max(freed, budget):
            kept, self.squared_norms = gradient.form(0, examples)
            self.kept = kept
            self.weighted_sum = lambda factors: contract(kept, factors)
            return 0 if needed <= freed else needed
        else:
            most = FORM_BYTES * times_on(self.parameter)
            few = max(1, most // self.parameter.nbytes)
            norms = []
            for start in range(0, examples, few):
                _, squares = gradient.form(start, min(start + few, examples))
                norms.append(squares)
            self.squared_norms = self._guard(gradient, torch.cat(norms))
        return 0

    def _guard(self, gradient: LayerGradient, squares: Tensor) -> Tensor:
        if gradient.summands is None:
            return squares
        mass, number = gradient.summands()
        return guarded(squares, mass, number, self.parameter.real.dtype)

    def scaled_squares(self, complex_scale: float) -> Tensor:
        """Return what the parameter adds to the squared norms, [B] in float64."""
        assert self.squared_norms is not None
        scale = self._scale(complex_scale)
        return self.squared_norms if scale == 1 else self.squared_norms * scale**2

    def add_to(
        self,
        total: dict[str, Tensor],
        name: str,
        factors: Tensor,
        complex_scale: float,
        shaped: bool,
    ) -> None:
        """Add Σᵢ cᵢ gᵢ to `total[name]`; `shaped`, in the parameter's shape and dtype.

        Else it is taken as it comes, and nothing is added where no example moves the loss.
        """
        scale = self._scale(complex_scale)
        before = total.get(name)
        if before is not None and self.kept is not None and _is_one_of(self.kept, before):
            before.add_(self.kept[0], alpha=float(factors[0]) * scale)
        elif self.weighted_sum is not None:
            own = self.weighted_sum(factors if scale == 1 else factors * scale)
            if shaped:
                own = own.to(self.parameter.dtype).view_as(self.parameter)
            add_up(total, {name: own.resolve_conj()})
        elif shaped:
            zeros = torch.zeros_like(self.parameter, requires_grad=False)
            add_up(total, {name: zeros})

    def _scale(self, complex_scale: float) -> float:
        return complex_scale if self.parameter.is_complex() else 1.0


def _is_one_of(kept: Tensor, total: Tensor) -> bool:
    """True if one example's kept gradient can join `total`, in half the passes over memory."""
    fits = kept.dtype == total.dtype and kept.shape == (1, *total.shape)
    return kept.is_cpu and fits
