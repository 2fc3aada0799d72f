"""Sums of clipped per-sample gradients: Σᵢ min(1, C/‖gᵢ‖)·gᵢ, gᵢ in PyTorch's `.grad` convention.

How a clipped sum is made, in the order of the code:

    __init__        `clipped_sum` picks the engine: fast, once it agrees with plain autograd on two
                    examples (`cross_check`), else the reference. It says so in the log.
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
    watched         holds a forward pass of foreign code to those that were checked
    spectra         gradients in the Fourier domain, for algorithms that clip there

To add a rule for a layer: write it in `rules/`, in a new file or the one it is akin to; start from
`rules/linear.py`. CONTRIBUTING.md lists what a new layer needs. Rules are found by themselves, and
a layer without one works too, only slower.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Literal
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, nn

from zdp_bench.errors import UserError
from zdp_bench.gradients import cross_check, fast, reference
from zdp_bench.gradients.clipping import Batch, ClippedSum, Loss, add_up
from zdp_bench.gradients.losses import PerExample, per_example, require_outputs_alone
from zdp_bench.gradients.rules import NoRule, Rule
from zdp_bench.gradients.shares import Shares
from zdp_bench.gradients.watched import PROGRAMS, Departs

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
    "run_alone",
    "runs_alone",
    "take_over",
    "trust",
]

# For a model and a loss, whether the fast engine serves the two.
_served: WeakKeyDictionary[nn.Module, dict[Any, tuple[ref[Any], bool]]] = WeakKeyDictionary()
_alone: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()  # why they run one at a time
# Models that are not to be checked, and those whose layers without a rule are named in the log.
_trusted: WeakSet[nn.Module] = WeakSet()
_named: WeakSet[nn.Module] = WeakSet()


def trust(model: nn.Module) -> None:
    """Skip a model's check on its first two examples, for trials whose sums are discarded."""
    _trusted.add(model)


def run_alone(model: nn.Module, reason: str) -> None:
    """Run each example of a model in its own pass."""
    log.warning("%s: examples are processed one at a time, which is slower", reason)
    _alone[model] = reason
    PROGRAMS.pop(model, None)


def runs_alone(model: nn.Module) -> str:
    """Return the reason that `run_alone` was given; empty if it was not called."""
    return _alone.get(model, "")


def take_over(model: nn.Module, twin: nn.Module, inputs: Tensor) -> None:
    """Apply to a model what was found out about its copy, on random or public inputs."""
    reference.PUBLIC[model] = inputs
    tables: tuple[WeakKeyDictionary[nn.Module, Any], ...] = (_alone, PROGRAMS, _served)
    for table in tables:
        table.pop(model, None)
        if twin in table:
            table[model] = table[twin]


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
        engine: auto takes fast, checked on two examples against plain autograd when it meets a
            model with a loss; where fast cannot serve them it takes the reference, and the log says
            so once.
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
    owner, key = _place(loss)
    held, served = _served.get(model, {}).get(key, (None, None))
    known = served if held is not None and held() is owner else None
    if reason := runs_alone(model):
        if rules or engine == "fast":
            raise UserError(f"{reason}: this algorithm cannot process examples one at a time.")
        return reference.clipped_sum(model, loss, batch, bound, **how)
    if rules:
        engine = "auto" if engine == "reference" else engine
    elif engine == "reference" or (engine == "auto" and known is False):
        return reference.clipped_sum(model, loss, batch, bound, **how)
    try:
        if len(batch[0]) > 1 and model not in _trusted:
            _name_layers(model)
            if engine == "auto" and known is None:
                _check(model, loss, batch)
                _remember(model, loss, True)  # not before: one that memory cut short is made again
        return fast.clipped_sum(model, loss, batch, bound, rules=rules, **how)
    except Departs as error:
        run_alone(model, str(error))
        return clipped_sum(model, loss, batch, bound, engine=engine, rules=rules, **how)
    except NoRule as error:
        if engine == "fast":
            raise UserError(
                f"algorithm.gradients=fast: does not support {error}. Use auto or reference."
            ) from None
        if rules:
            raise UserError(
                f"this algorithm needs per-sample rules, which do not support {error}."
            ) from None
        with torch.no_grad():
            outputs = model(batch[0][:1])
        require_outputs_alone(model, loss, outputs, batch[1][:1])  # the reference would drop it
        log.info("no per-sample rule supports %s: using torch.func for this model", error)
        _remember(model, loss, False)
    return reference.clipped_sum(model, loss, batch, bound, **how)


def _place(loss: PerExample) -> tuple[Any, tuple[int, int]]:
    """Return the owner of a loss (a function or method), and the key it is stored under."""
    owner, part = getattr(loss.loss, "__self__", loss.loss), getattr(loss.loss, "__func__", None)
    return owner, (id(owner), id(part))


def _remember(model: nn.Module, loss: PerExample, served: bool) -> None:
    owner, key = _place(loss)
    with suppress(TypeError):  # of what cannot be referred to: it is checked each time
        _served.setdefault(model, {})[key] = ref(owner), served


def _name_layers(model: nn.Module) -> None:
    """Log once which layers have no rule."""
    if model not in _named and (names := fast.without_rule(model)):
        log.info(
            "no per-sample rule for %s: using torch.func", ", ".join(f"'{name}'" for name in names)
        )
    _named.add(model)


def _check(model: nn.Module, loss: Loss, batch: Batch) -> None:
    if not cross_check.agrees(model, loss, batch):
        raise NoRule(
            "a model in which an example's gradient depends on other examples or on its position"
        )
