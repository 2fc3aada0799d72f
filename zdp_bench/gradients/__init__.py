"""Sums of clipped per-sample gradients: Σᵢ min(1, C/‖gᵢ‖)·gᵢ, gᵢ in PyTorch's `.grad` convention.

How a clipped sum is made, in the order of the code:

    __init__        `clipped_sum` picks the engine: fast, where there is a rule for all that
                    parameters do, else the reference. It says so in the log.
    program         what is run of a foreign model: its operations, which keep examples apart
    fast            the fast engine, made of the next five:
    tape            one forward and backward pass: every layer's input and output gradient
    rules/          for each type of layer, a `LayerGradient` from these two
    layer_gradient  what that is, the arithmetic that rules share, and how norms are taken
    losses          the loss, computed for one example at a time (`PerExample`)
    clipping        the factor that clips an example, from its norm (`clip_factors`). `fast` takes
                    the sum of each parameter with these factors (`add_to` in `layer_gradient`)
    shares          several examples of one patient, clipped as one
    reference       the same by torch.func, for any model; it defines what is right
    parts           inputs of several tensors, for models that take more than one
    spectra         gradients in the Fourier domain, for algorithms that clip there

To add a rule for a layer: write it in `rules/`, in a new file or the one it is akin to; start from
`rules/linear.py`. CONTRIBUTING.md lists what a new layer needs. Rules are found by themselves, and
a layer without one works too, only slower.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal
from weakref import WeakSet

from torch import Tensor, nn

from zdp_bench.errors import UserError, setting
from zdp_bench.gradients import fast, program, reference
from zdp_bench.gradients.clipping import Batch, ClippedSum, Loss, add_up
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

_named: WeakSet[nn.Module] = WeakSet()  # whose layers without a rule are named in the log
_unserved: WeakSet[Program | nn.Module] = WeakSet()  # which fast has no rule for


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
        model: any mix of real and complex parameters; those with `requires_grad=False` are left
            out.
        loss: (outputs, targets) -> one loss per example, shape [B]; never a mean. It is called
            for each example alone (`losses`).
        batch: (inputs [B, ...], targets [B, ...]); B may be 0.
        bound: C. Flat: ‖clip(gᵢ)‖ ≤ C over all parameters. Per layer: each of the L layers is
            clipped at C/√L, weight and bias jointly, so the whole is again ≤ C.
        gamma: None clips gᵢ to gᵢ·min(1, C/‖gᵢ‖); a number, to gᵢ·C/(‖gᵢ‖ + γ).
        complex_scale: factor on the gradients of complex parameters before norms are taken: ½
            turns `.grad` = 2∂L/∂θ̄ into the Wirtinger derivative ∂L/∂θ̄.
        engine: auto takes fast; where it has no rule it takes the reference, and the log says so
            once.
        rules: for layers of which another quantity than the gradient is clipped and summed
            (`spectra.padded_domain`); only fast can serve them.
        shares: how many examples each share has, in the batch's order; their mean gradient is then
            one gᵢ, clipped as such (`shares`). None: one example is a share.
        into: sums of other examples by name, to which this batch's are added in place (`add_up`),
            and which are returned. A single example then takes half the passes over a large
            model's memory.

    Formal guarantees:
        - ‖contribution of one share‖₂ ≤ bound, whatever inputs, weights or targets are, NaN and ∞
          included (a share with such an example contributes zero);
        - the sum is linear in the batch: cut it between shares and the parts add up to the whole.

    Raises:
        UserError: engine is fast, or there are rules, and fast cannot serve the model.
    """

    how: dict[str, Any] = {
        "per_layer": per_layer,
        "gamma": gamma,
        "complex_scale": complex_scale,
        "shares": shares,
        "into": into,
    }
    loss = per_example(loss)
    if not len(batch[0]):
        return fast.clipped_sum(model, loss, batch, bound, rules=rules, **how)
    state = program.state_of(model, batch[0])
    if state.alone and (rules or engine == "fast"):
        raise UserError(f"{state.alone}: this algorithm cannot process examples one at a time.")
    runs = state.program or model
    unserved = engine == "auto" and runs in _unserved
    if state.alone or (not rules and (engine == "reference" or unserved)):
        return reference.clipped_sum(model, loss, batch, bound, **how)
    try:
        if state.program is None:
            _name_layers(model)
        return fast.clipped_sum(
            model, loss, batch, bound, rules=rules, program=state.program, **how
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
        require_outputs_alone(model, loss, *reference.outputs_of_one(model, batch))
        log.info("no per-sample rule supports %s: using torch.func for this model", error)
        _unserved.add(runs)
    return reference.clipped_sum(model, loss, batch, bound, **how)


def _name_layers(model: nn.Module) -> None:
    """Log once which layers have no rule."""
    if model not in _named and (names := fast.without_rule(model)):
        log.info(
            "no per-sample rule for %s: using torch.func", ", ".join(f"'{name}'" for name in names)
        )
    _named.add(model)
