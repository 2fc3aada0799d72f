"""Sums of clipped per-sample gradients: Σᵢ min(1, C/‖gᵢ‖)·gᵢ, with gᵢ PyTorch's own `.grad` convention.

`reference` (torch.func, any model) defines what is right; `fast` (book-keeping) gives the same numbers near the price of an
ordinary backward pass. `clipped_sum` takes fast wherever it can serve the model, else the reference, and says so once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal
from weakref import WeakSet

from torch import Tensor, nn

from zdp_bench.errors import UserError
from zdp_bench.gradients import cross_check, fast, reference
from zdp_bench.gradients.clipping import Batch, ClippedSum, Loss, add_up
from zdp_bench.gradients.rules import NoRule, Rule

log = logging.getLogger(__name__)

Engine = Literal["auto", "fast", "reference"]

__all__ = ["Batch", "ClippedSum", "Engine", "Loss", "add_up", "clipped_sum", "trust"]

_for_the_reference: WeakSet[nn.Module] = WeakSet()  # models that `auto` found to be beyond fast
_met: WeakSet[nn.Module] = (
    WeakSet()
)  # models that have been checked, and whose layers without a rule have been named in the log


def trust(model: nn.Module) -> None:
    """Spare a model the check on its first two records: for trials whose sums go nowhere."""
    _met.add(model)


def clipped_sum(
    model: nn.Module,
    loss: Loss,
    batch: Batch,
    bound: float,
    *,
    per_layer: bool = False,
    complex_scale: float = 1.0,
    engine: Engine = "auto",
    rules: Mapping[nn.Module, Rule] = MappingProxyType({}),
    resolved: bool = True,
    into: dict[str, Tensor] | None = None,
) -> ClippedSum:
    """Σᵢ clip(gᵢ) over the records of a batch, and the norms before clipping.

    Args:
        model: any mix of real and complex parameters; those with `requires_grad=False` are left out.
        loss: (outputs, targets) -> one loss per record, shape [B]; never a mean.
        batch: (inputs [B, ...], targets [B, ...]); B may be 0.
        bound: C. Flat: ‖clip(gᵢ)‖ ≤ C over all parameters. Per layer: each of the L layers is clipped at C/√L, weight and bias
            jointly, so the whole is again ≤ C.
        complex_scale: factor on the gradients of complex parameters, before norms are taken: ½ turns `.grad` = 2∂L/∂θ̄ into the
            Wirtinger derivative ∂L/∂θ̄.
        engine: auto takes fast, checked on two records against plain autograd when it meets a model; for a model that fast
            cannot serve it takes the reference, and the log says so once.
        resolved: False lets complex sums be lazy conjugates of their memory (torch's `is_conj`), which `privacy.noise.add_noise`
            resolves in passing.
        into: sums of other records, by name, which this batch's are added to in place (`add_up`), and which come back. One record
            takes half the passes over a large model's memory so.
        rules: layers whose share is another one than their gradient (`spectra.padded_domain`): only fast can serve them.

    Formal guarantees:
        - ‖contribution of one record‖₂ ≤ bound, whatever inputs, weights or targets are, NaN and ∞ included (such a record
          contributes zero);
        - the sum is linear in the batch: cut it anyhow and the parts add up to the whole.

    Raises:
        UserError: engine is fast, or there are rules, and fast cannot serve the model.
    """
    if rules:
        engine = "auto" if engine == "reference" else engine
    elif engine == "reference" or (engine == "auto" and model in _for_the_reference):
        return reference.clipped_sum(
            model, loss, batch, bound, per_layer=per_layer, complex_scale=complex_scale, into=into
        )
    try:
        if model not in _met and len(batch[0]) > 1:
            if lacking := fast.without_rule(model):
                log.info(
                    "no book-keeping rule for %s: their gradients come from torch.func",
                    ", ".join(f"'{n}'" for n in lacking),
                )
            if engine == "auto" and not cross_check.agrees(model, loss, batch):
                raise NoRule(
                    "a model in which a record's gradient depends on the records beside it, or on where it stands"
                )
            _met.add(model)  # after the check: one that memory cut short is made again
        return fast.clipped_sum(
            model,
            loss,
            batch,
            bound,
            per_layer=per_layer,
            complex_scale=complex_scale,
            rules=rules,
            resolved=resolved,
            into=into,
        )
    except NoRule as error:
        if engine == "fast":
            raise UserError(
                f"algorithm.gradients=fast: book-keeping cannot serve {error}. Use auto or reference."
            ) from None
        if rules:
            raise UserError(
                f"this algorithm's shares are made by book-keeping, which cannot serve {error}."
            ) from None
        log.info("book-keeping cannot serve %s: this model's gradients come from torch.func", error)
        _for_the_reference.add(model)
    return reference.clipped_sum(
        model, loss, batch, bound, per_layer=per_layer, complex_scale=complex_scale, into=into
    )
