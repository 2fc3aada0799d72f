"""Per-sample gradients of a parameter, and helpers that rules share.

A rule returns a `LayerGradient` for each call of a layer. `ParameterGradient` combines a
parameter's calls and chooses how their norms are computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zdp_bench.gradients.clipping import add_up, cover_rounding, flush_subnormals, squared_norms
from zdp_bench.nn.memory_format import memory_order

# Arithmetic operations that a core performs while it reads or writes one byte of memory: 4 to 16 on
# current machines.
OPERATIONS_PER_BYTE = 8


class Summands(NamedTuple):
    """The terms that add up to each example's gradient."""

    mass: Tensor  # an upper bound on the sum of their norms, [B] in float64
    terms: int  # number of terms of one example


@dataclass(frozen=True, slots=True)
class LayerGradient:
    """The per-sample gradients gᵢ of one parameter in one call of its layer.

    They follow the convention of PyTorch's `.grad`: gᵢ xᵢᴴ for y = W x. Each attribute is a
    function, and nothing is computed until it is called. A rule provides the first two, and
    `squared_norms`, `summands` or both. `ParameterGradient.measure` decides which of them to use.

    Attributes:
        per_sample: (start, stop) -> gradients of these examples, [stop - start, *shape].
        weighted_sum: real factors c [B] -> Σᵢ cᵢ gᵢ, [*shape].
        squared_norms: () -> ‖gᵢ‖², [B] in float64. Provide it if the gradients exist already, or if
            norms can be computed without them (ghost norms).
        per_sample_and_norms: as `per_sample`, but also returns ‖gᵢ‖², [stop - start] in float64.
        summands: () -> the terms that `weighted_sum` adds up. Terms that cancel in a norm leave
            rounding errors in the sum (`clipping.cover_rounding`). Not needed if `squared_norms`
            measures the same numbers that `weighted_sum` adds up.
    """

    per_sample: Callable[[int, int], Tensor]
    weighted_sum: Callable[[Tensor], Tensor]
    squared_norms: Callable[[], Tensor] | None = None
    per_sample_and_norms: Callable[[int, int], tuple[Tensor, Tensor]] | None = None
    summands: Callable[[], Summands] | None = None

    def __post_init__(self) -> None:
        if self.squared_norms is None and self.summands is None:
            raise TypeError("LayerGradient requires squared_norms or summands: see its docstring")

    @classmethod
    def from_gradients(cls, gradients: Tensor) -> LayerGradient:
        """Create it from gradients [B, *shape], such as those of a bias, that exist already."""
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
        """Return the gradients of examples start … stop − 1, and their squared norms."""
        if self.per_sample_and_norms is not None:
            return self.per_sample_and_norms(start, stop)
        gradients = self.per_sample(start, stop)
        return gradients, squared_norms(gradients)


def add_calls(calls: list[LayerGradient]) -> LayerGradient:
    """Return the sum of the gradients of several calls of one layer or of tied parameters.

    The norm of such a sum does not follow from the norms of the calls, so the result has no
    `squared_norms` unless there is only one call.
    """
    if len(calls) == 1:
        (call,) = calls
        return call

    def summands() -> Summands:
        masses, counts = zip(*(summands_of(call) for call in calls), strict=True)
        return Summands(torch.stack(masses).sum(dim=0), sum(counts))

    def per_sample(start: int, stop: int) -> Tensor:
        return reduce(torch.add, (call.per_sample(start, stop) for call in calls))

    def weighted_sum(factors: Tensor) -> Tensor:
        return reduce(torch.add, (call.weighted_sum(factors) for call in calls))

    return LayerGradient(per_sample, weighted_sum, summands=summands)


def transform(
    call: LayerGradient,
    linear: Callable[[Tensor], Tensor],
    max_gain: float,
    terms: int,
) -> LayerGradient:
    """Return the gradients `linear(gᵢ)`.

    Args:
        call: the gradients gᵢ.
        linear: a linear map of tensors [*, *shape].
        max_gain: upper bound on ‖linear(g)‖ / ‖g‖.
        terms: largest number of entries of g that an entry of linear(g) is the sum of.
    """

    def summands() -> Summands:
        mass, count = summands_of(call)
        return Summands(mass * max_gain, count + terms)

    return LayerGradient(
        lambda start, stop: linear(call.per_sample(start, stop)),
        lambda factors: linear(call.weighted_sum(factors)),
        summands=summands,
    )


def summands_of(call: LayerGradient) -> Summands:
    """Return the terms that the weighted sum adds up: by default, the gradient as a single term."""
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
    """Bound the summands of Σ_t g_t x_tᴴ by Cauchy–Schwarz: Σ_t ‖g_t‖‖x_t‖ ≤ ‖g‖‖x‖·√uses.

    Args:
        g: output gradients, [B, ...].
        x: inputs, [B, ...].
        positions: number of positions t.
        uses: largest number of positions that use the same entry of x, such as the size of a
            kernel. Default: 1.
    """
    squares = squared_norms(g) * squared_norms(x) * uses
    return Summands(squares.sqrt(), positions)


def contract(gradients: Tensor, factors: Tensor) -> Tensor:
    """Return Σᵢ cᵢ gᵢ in one pass over memory, in any memory order.

    Shapes: gradients [B, *shape], real factors [B] -> [*shape].
    """
    if gradients.is_complex():
        reals = torch.view_as_real(gradients.resolve_conj())
        return torch.view_as_complex(contract(reals, factors))
    factors = factors.to(gradients.dtype)
    if gradients.dim() == 2:
        return torch.mv(gradients.T, factors)
    dims = list(range(1, gradients.dim()))
    order = memory_order(gradients)
    ordered = gradients.permute(0, *order)
    rows = ordered.reshape(len(gradients), prod(gradients.shape[1:]))
    total = torch.mv(rows.T, factors).view(ordered.shape[1:])
    return total.permute([order.index(dim) for dim in dims]).contiguous()


def apply_factors(g: Tensor, factors: Tensor) -> Tensor:
    """Return cᵢ gᵢ for g [B, ...], with 0 for subnormal results (`flush_subnormals`)."""
    if g.is_complex():  # torch would compute four products for a complex number times a real one
        reals = torch.view_as_real(g.resolve_conj())
        return torch.view_as_complex(apply_factors(reals, factors))
    ones = [1] * (g.dim() - 1)
    return flush_subnormals(g * factors.to(g.dtype).view(-1, *ones))


def matrix_sum(g: Tensor, x: Tensor) -> Tensor:
    """Return Σₙ gₙ xₙᴴ for g [N, O] and x [N, D]; the result may be lazily conjugated.

    BLAS conjugates only a matrix that it also transposes. So either x is conjugated beforehand or
    gᴴx afterwards, whichever is smaller.
    """
    is_x_smaller = x.is_complex() and len(x) < g.shape[1]
    if is_x_smaller:
        return g.mT @ x.conj()
    return (g.mH @ x).conj()


def gram_norms(g: Tensor, x: Tensor) -> Tensor:
    """Return ‖Σ_t g_t x_tᴴ‖² = Σ_tu (g_uᴴ g_t)(x_tᴴ x_u), [B], for g [B, T, O] and x [B, T, D].

    It is computed in float64, because the terms cancel if the gradient is small.
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
    """Return True if an example's two T×T Gram matrices cost less than its gradient [O, D].

    Both methods need one product of 2·T·O·D operations for the sum. The rest differs: the Gram
    matrices in float64, or writing the gradient and reading it twice.

    Args:
        positions: T.
        outputs: O.
        inputs: D.
        itemsize: bytes of an entry of the gradient.
    """
    gram = 4 * positions**2 * (outputs + inputs)
    return gram < 3 * itemsize * outputs * inputs * OPERATIONS_PER_BYTE


# -------------------------------------------------------------------- how a parameter is measured

# Memory for gradients that are formed only to measure their norms, at any one time.
FORM_BYTES = 64 * 2**20
# Factor on memory limits like this one on a GPU; they are meant for a core's cache. It is also used
# in `fast.py` and in the rules.
GPU_SCALE = 32


def device_scale(like: Tensor, gpu_scale: int = GPU_SCALE) -> int:
    """Return the factor on memory limits for the device of a tensor: 1 on a CPU."""
    return gpu_scale if like.is_cuda else 1


@dataclass(slots=True)
class ParameterGradient:
    """The per-sample gradients of one parameter, from its layer calls to their weighted sum.

    Attributes:
        parameter: the parameter.
        pending_calls: number of calls whose output gradient the backward pass has yet to compute.
        calls: gradients of the calls until `measure` combines them.
        kept: the gradients [B, *shape], if they are kept for the sum.
        squared_norms: ‖gᵢ‖², [B] in float64, once measured.
        weighted_sum: factors [B] -> Σᵢ cᵢ gᵢ. None before `measure`, and in the end if no
            example's loss depends on the parameter.
    """

    parameter: nn.Parameter
    pending_calls: int = 0
    calls: list[LayerGradient] = field(default_factory=list)
    kept: Tensor | None = None
    squared_norms: Tensor | None = None
    weighted_sum: Callable[[Tensor], Tensor] | None = None

    def measure(
        self,
        examples: int,
        freed: int,
        budget: int,
    ) -> int:
        """Compute the norms after the last call, by the first of these methods that applies:

            ghost    the layer's `squared_norms`, without the gradients
            kept     form the gradients, measure them, and keep them for the sum, if memory allows
            formed   form the gradients, a few examples at a time, only to measure them

        Unless gradients are kept, the layer's `weighted_sum` adds them up, and the norms must cover
        its rounding errors (`clipping.cover_rounding`).

        Args:
            examples: number of examples, or of shares.
            freed: bytes of the activations that are freed after this call.
            budget: bytes that kept gradients may take if they take more than `freed`.

        Returns:
            Bytes of the budget that were spent.
        """
        gradient = add_calls(self.calls)
        gradient_bytes = self.parameter.nbytes * examples * len(self.calls)
        can_be_kept = gradient_bytes <= max(freed, budget)
        spent_bytes = 0 if gradient_bytes <= freed else gradient_bytes
        self.calls = []
        self.weighted_sum = gradient.weighted_sum
        if gradient.squared_norms is not None:
            self.squared_norms = self._cover_rounding(gradient, gradient.squared_norms())
        elif can_be_kept:
            kept, self.squared_norms = gradient.form(0, examples)
            self.kept = kept
            self.weighted_sum = lambda factors: contract(kept, factors)
            return spent_bytes
        else:
            max_bytes = FORM_BYTES * device_scale(self.parameter)
            chunk = max(1, max_bytes // max(1, self.parameter.nbytes))
            squares_of_chunks = []
            for start in range(0, examples, chunk):
                _, squares = gradient.form(start, min(start + chunk, examples))
                squares_of_chunks.append(squares)
            self.squared_norms = self._cover_rounding(gradient, torch.cat(squares_of_chunks))
        return 0

    def _cover_rounding(self, gradient: LayerGradient, squares: Tensor) -> Tensor:
        if gradient.summands is None:
            return squares
        mass, count = gradient.summands()
        return cover_rounding(squares, mass, count, self.parameter.real.dtype)

    def scaled_squares(self, complex_scale: float) -> Tensor:
        """Return the parameter's part of the squared norms, [B] in float64."""
        assert self.squared_norms is not None
        scale = self._scale(complex_scale)
        return self.squared_norms if scale == 1 else self.squared_norms * scale**2

    def add_to(
        self,
        total: dict[str, Tensor],
        name: str,
        factors: Tensor,
        complex_scale: float,
        like_parameter: bool,
    ) -> None:
        """Add Σᵢ cᵢ gᵢ to `total[name]`.

        Args:
            total: sums by name.
            name: the parameter's name.
            factors: clipping factors cᵢ, [B].
            complex_scale: another factor on the gradients of a complex parameter.
            like_parameter: give the sum the parameter's shape and dtype, and add zeros if no
                example's loss depends on the parameter. If False, the sum keeps its own shape and
                dtype, and nothing is added in that case.
        """
        scale = self._scale(complex_scale)
        earlier_sum = total.get(name)
        if self.kept is not None and earlier_sum is not None and _fits(self.kept, earlier_sum):
            (gradient,), (factor,) = self.kept, factors
            earlier_sum.add_(gradient, alpha=float(factor) * scale)
        elif self.weighted_sum is not None:
            gradient_sum = self.weighted_sum(factors if scale == 1 else factors * scale)
            if like_parameter:
                gradient_sum = gradient_sum.to(self.parameter.dtype).view_as(self.parameter)
            add_up(total, {name: gradient_sum.resolve_conj()})
        elif like_parameter:
            add_up(total, {name: torch.zeros_like(self.parameter)})

    def _scale(self, complex_scale: float) -> float:
        return complex_scale if self.parameter.is_complex() else 1.0


def _fits(kept: Tensor, total: Tensor) -> bool:
    """Return True if `kept` is the gradient of one example that can be added to `total` as it is.

    This halves the passes over memory.
    """
    has_same_form = kept.dtype == total.dtype and kept.shape == (1, *total.shape)
    return kept.is_cpu and has_same_form
