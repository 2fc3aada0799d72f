"""What a model holds beside its trainable parameters, and a guard that it stays so.

Weights are released with noise. Buffers, attributes, hooks and what they keep are released as they
are, with the model, so nothing of an example may be in them, in any step.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zdp_bench.algorithms import Algorithm
from zdp_bench.errors import UserError
from zdp_bench.gradients.losses import Place, places_of
from zdp_bench.gradients.parts import map_leaves
from zdp_bench.training.model_checks.probes import (
    ROUNDED,
    advice_on,
    describe_layer,
    describe_owner,
    differs,
    forward,
)

State = dict[Place, Any]
Marks = dict[str, tuple[int, int, int]]
GLOBAL_HOOKS = (
    *("_global_forward_hooks", "_global_forward_pre_hooks"),
    *("_global_backward_hooks", "_global_backward_pre_hooks"),
)


def fingerprint(model: nn.Module) -> State:
    """Return what a model holds, by place: digests of tensors, only shapes of trained ones.

    torch's hooks on all modules are the model's too.
    """
    held = {place: _digest(value) for place, value in places_of(model)}
    for name in GLOBAL_HOOKS:
        held["", name] = tuple(map(id, getattr(torch.nn.modules.module, name).values()))
    return held


def _digest(value: Any) -> Any:
    if isinstance(value, Tensor):
        kind = value.dtype, value.shape
        trains = isinstance(value, nn.Parameter) and value.requires_grad
        if trains or value.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(value):
            return kind
        if value.numel() == 1 and not value.is_complex():
            return value.item()
        value = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
        return *kind, hashlib.sha256(value.flatten().view(torch.uint8).numpy().data).digest()
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, hashlib.sha256(value.tobytes()).digest()
    return repr(value) if isinstance(value, float) and math.isnan(value) else value


class WrittenError(UserError):
    """Weights hold something that no noise covers."""


def mark_weights(parameters: Mapping[str, nn.Parameter]) -> Marks:
    """Return what a change of a weight that trains changes: which tensor, its version, its memory.

    No number is read. A change in place through `.data` is not seen.
    """
    return {
        name: (id(p), p._version, p.data_ptr()) for name, p in parameters.items() if p.requires_grad
    }


def require_unwritten(parameters: Mapping[str, nn.Parameter], marks: Marks) -> None:
    """Reject weights that were changed after they were marked, while gradients were computed."""
    now = mark_weights(parameters)
    for name, mark in marks.items():
        if now.get(name) != mark:
            raise WrittenError(
                f"parameter '{name}' was changed by the model or the loss while its gradient was "
                "computed, and no noise covers that: make sure neither writes weights, and start "
                "again or resume from an earlier save."
            )


def copy_apart(model: nn.Module, algorithm: Algorithm | None = None) -> tuple[nn.Module, Any]:
    """Return a deep copy of a model, and of an algorithm that then works on the copy.

    What cannot be copied (a lock, an open file) and functions are shared, and so is the loss.
    """
    memo: dict[int, Any] = {}
    holders = [vars(module) for module in model.modules()]
    if algorithm is not None:
        memo[id(algorithm.problem.loss)] = algorithm.problem.loss
        holders.append(vars(algorithm))
    values = [value for holder in holders for value in holder.values()]
    for value in values:
        if isinstance(value, Tensor) and not value.is_leaf:
            memo[id(value)] = value.detach().clone()
    try:
        return copy.deepcopy((model, algorithm), {**memo})
    except Exception:  # a lock, an open file: what holds it is shared
        modules = {id(module): module for module in model.modules()}
        for value in values:
            try:
                copy.deepcopy(value, memo | modules)
            except Exception:
                memo[id(value)] = value
        return copy.deepcopy((model, algorithm), memo)


@dataclass(frozen=True)
class Guard:
    """What a model held when it was checked."""

    model: nn.Module
    state: State
    moved: State  # after a pass, which differs by what is made at a first call (a mask)
    inputs: Tensor  # what it was checked on: random numbers, or public examples

    def settle(self) -> Guard:
        """Return a guard of the model as it is now, after its first call, with our own hooks.

        What a layer makes there, made while torch.func maps it, would be no tensor afterwards.
        """
        if self.state != self.moved:
            with torch.no_grad():
                forward(self.model, self.inputs)
        state = fingerprint(self.model)
        return Guard(self.model, state, state, self.inputs)

    def require_unchanged(self) -> None:
        """Reject a model that changed since its check, other than in its trainable parameters."""
        for place in differing(self.state, fingerprint(self.model)):
            layer, key = describe(self.model, place)
            what = f"'{key}' of {layer}" if key else layer
            raise UserError(
                f"{what} changed since the model was checked: only trainable parameters may "
                "change, because no noise covers anything else. Change the model before the "
                "check, and let no layer or hook keep what it sees."
            )


def watch(model: nn.Module, inputs: Tensor, public: bool = False) -> Guard:
    """Return a guard of the model's state, and refuse one that keeps something of its passes."""
    state, ends, answers = fingerprint(model), [], []
    counts: list[Place] = []  # what every pass changes, of whatever examples
    other = map_leaves(partial(_change, public=public), inputs)
    for samples in (inputs, other.expand_as(inputs), inputs[:-1]):
        twin, _ = copy_apart(model)
        marks = mark_weights(dict(twin.named_parameters()))
        with torch.no_grad():
            forward(twin, samples)
            ends.append(fingerprint(twin))
            if len(samples) == len(inputs):
                answers.append(forward(twin, inputs))
        if len(ends) == 1:
            counts = differing(ends[0], fingerprint(twin))
        now = mark_weights(dict(twin.named_parameters()))
        for (name, before), after in zip(model.named_parameters(), twin.parameters(), strict=True):
            if marks.get(name) != now.get(name) or not torch.equal(before, after):
                raise UserError(
                    f"{describe_owner(model, name)} changes its '{name.rpartition('.')[2]}' in the "
                    "forward pass (max_norm, flatten_parameters?), and no noise covers that: leave "
                    "it out there."
                )
    for end in ends[1:]:
        numbers = [at for at in counts if isinstance(end.get(at), int | float | str)]
        if places := [at for at in differing(ends[0], end) if at not in numbers]:
            layer, key = describe(model, places[0])
            raise UserError(
                f"{layer} stores training examples in '{key}', which no noise covers: "
                + _advice(dict(model.named_modules()).get(places[0][0]))
            )
    if counts:
        layer, key = describe(model, counts[0])
        raise UserError(
            f"{layer} changes '{key}' in each pass. No noise covers that, and how many passes a "
            "step takes tells how many examples there were: leave it out."
        )
    if differs(answers[0], answers[1], ROUNDED):
        raise UserError(
            "the model answers otherwise after other examples went through it: it keeps something "
            "of them between its passes (in a global, a thread or the environment?), which nothing "
            "bounds and no noise covers: compute the output from the inputs and weights alone."
        )
    return Guard(model, state, ends[0], inputs)


def _change(leaf: Tensor, public: bool) -> Tensor:
    """Return other values for the first example: of public ones, those of the last."""
    if public:
        return leaf[-1]
    if leaf.dim() == 1 and not leaf.is_floating_point():
        return leaf[0]  # it may be a length
    return leaf[0].logical_not() if leaf.dtype == torch.bool else 1 - leaf[0]


def differing(one: State, other: State) -> list[Place]:
    """Return the places at which two states differ."""
    every = sorted(one.keys() | other.keys())
    return [place for place in every if one.get(place, Guard) != other.get(place, Guard)]


def describe(model: nn.Module, place: Place) -> tuple[str, str]:
    """Return "layer 'net.1' (BatchNorm2d)", and the name of what it holds."""
    name, key = place
    while name and name not in dict(model.named_modules(remove_duplicate=False)):
        name, _, last = name.rpartition(".")
        key = f"{last}.{key}" if key else last
    return describe_layer(model, name), key


def _advice(layer: Any) -> str:
    if "Norm" in type(layer).__name__:
        return (
            f"{advice_on(layer)}, or switch it off (track_running_stats=False for torch's norms)."
        )
    return "switch it off, remove the hook, or use another layer there."
