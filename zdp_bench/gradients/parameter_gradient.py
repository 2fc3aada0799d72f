"""One parameter's per-sample gradients: the choice of how they are measured, and their sum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from zdp_bench.gradients.clipping import add_up, guarded
from zdp_bench.gradients.layer_gradient import LayerGradient, add_calls, contract

# Gradients that are formed for their norms only take at most this many bytes at a time.
FORM_BYTES = 64 * 2**20


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

    def measure(self, examples: int, freed: int, budget: int) -> int:
        """Take the norms, once all calls are in, in the first of these ways that applies:

            ghost    from the layer's `squared_norms`, without the gradients
            kept     the gradients are formed, measured, and kept for the sum, if memory allows
            formed   the gradients are formed, a few examples at a time, for their norms only

        Unless gradients are kept, the layer's own contraction sums them, whose rounding errors the
        norms must cover (`clipping.guarded`).

        Args:
            examples: B.
            freed: bytes of the activations that go where gradients are kept instead.
            budget: bytes that kept gradients may take otherwise.

        Returns:
            Bytes of the budget that are spent.
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
            few = max(1, FORM_BYTES // self.parameter.nbytes)
            starts = range(0, examples, few)
            norms = [gradient.form(start, min(start + few, examples))[1] for start in starts]
            self.squared_norms = self._guard(gradient, torch.cat(norms))
        return 0

    def _guard(self, gradient: LayerGradient, squares: Tensor) -> Tensor:
        if gradient.summands is None:
            return squares
        of = gradient.summands()
        return guarded(squares, of.mass, of.number, self.parameter.real.dtype)

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
        """Add Σᵢ cᵢ gᵢ to `total[name]`.

        Args:
            shaped: the sum has the parameter's shape and dtype; else it is taken as it comes, and
                nothing is added where no example moves the loss through the parameter.
        """
        scale, before = self._scale(complex_scale), total.get(name)
        if before is not None and self._is_one_of(before):
            assert self.kept is not None
            before.add_(self.kept[0], alpha=float(factors[0]) * scale)
        elif self.weighted_sum is not None:
            own = self.weighted_sum(factors if scale == 1 else factors * scale)
            own = own.to(self.parameter.dtype).view_as(self.parameter) if shaped else own
            add_up(total, {name: own.resolve_conj()})
        elif shaped:
            add_up(total, {name: torch.zeros_like(self.parameter, requires_grad=False)})

    def _is_one_of(self, total: Tensor) -> bool:
        """True if one example's kept gradient can join `total`, in half the passes over memory."""
        one = self.kept
        return (
            one is not None
            and one.is_cpu
            and one.dtype == total.dtype
            and one.shape == (1, *total.shape)
        )

    def _scale(self, complex_scale: float) -> float:
        return complex_scale if self.parameter.is_complex() else 1.0
