"""Sums of clipped per-sample gradients: Σᵢ min(1, C/‖gᵢ‖)·gᵢ, gᵢ in PyTorch's `.grad` convention.

How a clipped sum is computed, in the order of the code:

    __init__        `clipped_sum` picks the engine: the fast one if there is a rule for every use
                    of a parameter, else the reference engine, which the log then names
    program         a third-party model as a program: recorded operations that keep examples apart
    fast            the fast engine, which consists of the next five modules:
    tape            one forward and one backward pass: each layer's input and output gradient
    rules/          one rule per type of layer: a `LayerGradient` from these two tensors
    layer_gradient  `LayerGradient`, the arithmetic that rules share, and how norms are taken
    losses          the loss, computed for one example at a time (`PerExample`)
    outside_state/  what code of a model or loss can change in memory, restored for each example
    clipping        an example's clipping factor, from its norm (`clip_factors`). `fast` then sums
                    each parameter's gradients with these factors (`add_to` in `layer_gradient`)
    shares          an owner's examples, clipped as one
    reference       the reference engine, torch.func on any model; it defines the right result
    parts           batches of several tensors, for models that take more than one input
    spectra         gradients in the Fourier domain, for algorithms that clip there

To add a rule for a layer, copy `rules/linear.py` to a new file in `rules/`, or extend the file of a
similar layer. CONTRIBUTING.md lists what a new layer needs. Rules are discovered automatically. A
layer without one works too, but slower.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal
from weakref import WeakSet

import torch
from torch import Tensor, nn

from zdp_bench.errors import UserError, setting
from zdp_bench.gradients import fast, program, reference
from zdp_bench.gradients.clipping import Batch, ClippedSum, Loss, add_up, trainable
from zdp_bench.gradients.losses import PerExample, per_example, require_outputs_alone
from zdp_bench.gradients.program import Program
from zdp_bench.gradients.rules import NoRule, Rule
from zdp_bench.gradients.shares import Shares

log = logging.getLogger(__name__)

Engine = Literal["auto", "fast", "reference"]

__all__ = [
    "Batch",
    "ClippedSum",
    "Engine",
    "Loss",
    "PerExample",
    "Shares",
    "add_up",
    "clipped_sum",
    "per_example",
]

# Models whose layers without a rule the log has named.
_logged: WeakSet[nn.Module] = WeakSet()
# Programs and models that contain something the fast engine has no rule for.
_unsupported: WeakSet[Program | nn.Module] = WeakSet()


@torch.enable_grad()
def clipped_sum(
    model: nn.Module,
    loss: Loss,
    batch: Batch,
    bound: float,
    *,
    per_layer: bool = False,
    gamma: float | None = None,
    complex_scale: float = 1.0,
    engine: Engine = "auto",
    rules: Mapping[nn.Module, Rule] = MappingProxyType({}),
    shares: Shares | None = None,
    into: dict[str, Tensor] | None = None,
) -> ClippedSum:
    """Return Σᵢ clip(gᵢ) over the examples of a batch, and the norms before clipping.

    Args:
        model: a model with any mix of real and complex parameters. Parameters with
            `requires_grad=False` are left out.
        loss: (outputs, targets) -> one loss per example, shape [B]; never a mean. It is called
            for each example separately (see `losses`).
        batch: (inputs [B, ...], targets [B, ...]). B may be 0.
        bound: clipping norm C. Flat clipping: ‖clip(gᵢ)‖ ≤ C over all parameters.
        per_layer: clip each of the L layers at C/√L, weight and bias jointly. The norm over all
            layers is again at most C. Default: False.
        gamma: if None, gᵢ is clipped to gᵢ·min(1, C/‖gᵢ‖); otherwise to gᵢ·C/(‖gᵢ‖ + γ).
        complex_scale: factor on the gradients of complex parameters, applied before norms are
            taken. ½ turns `.grad` = 2∂L/∂θ̄ into the Wirtinger derivative ∂L/∂θ̄. Default: 1.
        engine: "fast", "reference" or "auto". Auto uses the fast engine, and the reference engine
            for a model with an operation that has no rule, which is logged once.
        rules: for some layers, a rule that replaces their own, so that another quantity than the
            gradient is clipped and summed (`spectra.padded_domain`). Needs the fast engine.
        shares: number of examples of each share, in the batch's order. The mean gradient of a share
            is then one gᵢ and clipped as such. Default: each example is a share.
        into: sums over other examples, by name. This batch's sums are added to them in place
            (`add_up`), and they are returned. For a batch of one example, this halves the passes
            over the memory of a large model.

    Formal guarantees:
        - One share contributes at most `bound` in the 2-norm, for any inputs, weights and targets,
          NaN and ∞ included: a share with an example whose gradient is not finite contributes zero.
        - The sum is linear in the batch: if a batch is split between shares, the sums of the parts
          add up to the sum of the whole.

    Raises:
        UserError: `engine` is "fast", or there are rules, and the fast engine does not support the
            model; or a trainable parameter has fewer than 32 bits, so that the rounded sum would
            exceed the bound.
    """
    _require_precise(model)
    options: dict[str, Any] = {
        "per_layer": per_layer,
        "gamma": gamma,
        "complex_scale": complex_scale,
        "shares": shares,
        "into": into,
    }
    loss = per_example(loss)
    if not len(batch[0]):
        return fast.clipped_sum(model, loss, batch, bound, rules=rules, **options)
    state = program.state_of(model, batch[0])
    if state.alone and (rules or engine == "fast"):
        raise UserError(f"{state.alone}: this algorithm cannot process examples one at a time.")
    program_or_model = state.program or model
    has_no_rule = engine == "auto" and program_or_model in _unsupported
    if state.alone or (not rules and (engine == "reference" or has_no_rule)):
        return reference.clipped_sum(model, loss, batch, bound, **options)
    try:
        if state.program is None:
            _log_layers_without_rule(model)
        return fast.clipped_sum(
            model, loss, batch, bound, rules=rules, program=state.program, **options
        )
    except NoRule as error:
        if engine == "fast":
            raise UserError(
                f"{setting('algorithm.gradients', 'fast')}: does not support {error}. "
                "Use auto or reference."
            ) from None
        if rules:
            raise UserError(
                f"this algorithm needs per-sample rules, which do not support {error}."
            ) from None
        require_outputs_alone(model, loss, *reference.compute_first_output(model, batch))
        log.info("no per-sample rule supports %s: using torch.func for this model", error)
        _unsupported.add(program_or_model)
    return reference.clipped_sum(model, loss, batch, bound, **options)


def _require_precise(model: nn.Module) -> None:
    """Reject a trainable parameter in whose type sums cannot be rounded within the bound."""
    for name, parameter in trainable(model).items():
        if torch.finfo(parameter.dtype).bits < 32:
            raise UserError(
                f"parameter '{name}' is of {parameter.dtype}, and rounding the clipped sum to it "
                "would exceed the bound: use float32, such as model.float(), and autocast for "
                "speed."
            )


def _log_layers_without_rule(model: nn.Module) -> None:
    """Log which layers of a model have no rule, once per model."""
    if model not in _logged and (names := fast.without_rule(model)):
        log.info(
            "no per-sample rule for %s: using torch.func", ", ".join(f"'{name}'" for name in names)
        )
    _logged.add(model)
