"""The optimizers of a private training, one or several, with an optional regulariser."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zdp_bench.errors import UserError
from zdp_bench.gradients.clipping import trainable
from zdp_bench.training.distributed import Ranks

log = logging.getLogger(__name__)
Regulariser = Callable[[nn.Module], Tensor]
_PRIVATE: WeakSet[torch.optim.Optimizer] = WeakSet()  # their state comes from private steps only
_IN_STEP = ContextVar("_IN_STEP", default=False)  # True while this thread takes a private step


@dataclass(frozen=True)
class Several:
    """Several optimizers that share a model's parameters and step together."""

    optimizers: tuple[torch.optim.Optimizer, ...]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"each": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for optimizer, own_state in zip(self.optimizers, state["each"], strict=True):
            optimizer.load_state_dict(own_state)


def each_of(optimizer: Any) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers of `Several`, or the one optimizer, as a tuple."""
    return optimizer.optimizers if isinstance(optimizer, Several) else (optimizer,)


def require_held(parameters: dict[str, nn.Parameter], optimizer: Any) -> None:
    """Reject an optimizer that lacks a trained parameter, has one twice, or has others."""
    held = Counter(id(p) for group in optimizer.param_groups for p in group["params"])
    for name, parameter in parameters.items():
        times = held[id(parameter)] if parameter.requires_grad else 1
        if times < 1:
            raise UserError(
                f"parameter '{name}' requires a gradient, but the optimizer does not hold it: make "
                "the optimizer from this model's parameters, or set requires_grad=False on it."
            )
        if times > 1:
            raise UserError(
                f"parameter '{name}' is held {times} times by the optimizer: give "
                "each optimizer parameters of its own."
            )
    if held.keys() - set(map(id, parameters.values())):
        raise UserError(
            "optimizer: it holds a parameter that is not the model's: make it from this model's "
            "parameters, and use another optimizer for anything else that trains."
        )


@contextmanager
def in_private_step() -> Iterator[None]:
    """Allow watched optimizers to step inside."""
    before = _IN_STEP.set(True)
    try:
        yield
    finally:
        _IN_STEP.reset(before)


def _note_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    if not _IN_STEP.get():
        _PRIVATE.discard(optimizer)


def watch_steps(model: nn.Module, optimizer: Any, training: ExitStack) -> None:
    """Reject steps of the weights outside private steps until the training is closed.

    Warn if an optimizer already has a state, which may come from training examples.
    """
    trained = set(map(id, trainable(model).values()))

    def refuse(other: torch.optim.Optimizer, *_: object) -> None:
        parameters = {id(p) for group in other.param_groups for p in group["params"]}
        if not _IN_STEP.get() and parameters & trained:
            raise UserError(
                "an optimizer was stepped on the model's weights outside private.step: its "
                "gradient is not private, and no ε covers it. Leave that step out (public terms go "
                "into regulariser=), or close() the training first to go on without privacy."
            )

    training.callback(register_optimizer_step_pre_hook(refuse).remove)
    for member in each_of(optimizer):
        states = [state for state in member.state.values() if isinstance(state, dict) and state]
        # Adagrad creates its state, with a step of 0, before the first step.
        if all(float(state.get("step", 1)) == 0 for state in states):
            _PRIVATE.add(member)
            member.register_step_pre_hook(_note_step)
    if not _PRIVATE.issuperset(each_of(optimizer)):
        log.warning(
            "the optimizer holds a state of earlier steps, which no ε covers: make a new one, "
            "unless no private data reached them"
        )


@contextmanager
def adds_gradient(
    model: nn.Module, optimizer: Any, regulariser: Regulariser | None, ranks: Ranks
) -> Iterator[None]:
    """Add the regulariser's gradient at the current weights to the optimizer's next step.

    The gradient is computed before the examples are read, so random numbers that the regulariser
    draws reveal nothing of them.
    """
    if regulariser is None:
        yield
        return
    parameters = list(trainable(model).values())
    with torch.enable_grad():
        value = regulariser(model)
        is_number = isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
        if not is_number or not value.requires_grad:
            raise UserError(
                "regulariser: it must give one real number that depends on the model's weights, "
                "lambda model: ..."
            )
        gradients = torch.autograd.grad(value.sum(), parameters, allow_unused=True)
    added = []
    for parameter, gradient in zip(parameters, gradients, strict=True):
        added.append(torch.zeros_like(parameter) if gradient is None else gradient)
    if not all(bool(torch.isfinite(g).all()) for g in added):
        raise UserError("regulariser: its gradient is not finite, and would spoil the weights.")
    ranks.copy_from_first(added)  # the regulariser may draw random numbers

    def add(*_: object) -> None:
        with torch.no_grad():
            for parameter, g in zip(parameters, added, strict=True):
                assert parameter.grad is not None
                parameter.grad += g

    handle = each_of(optimizer)[0].register_step_pre_hook(add)
    try:
        yield
    finally:
        handle.remove()
