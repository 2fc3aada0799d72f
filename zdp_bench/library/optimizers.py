"""Optimisers of a private training: one or several, with an optional regulariser."""

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
_PRIVATE: WeakSet[torch.optim.Optimizer] = WeakSet()  # whose state is of private steps alone
_IN_STEP = ContextVar("whether this thread takes a private step", default=False)


@dataclass(frozen=True)
class Several:
    """Optimisers that share a model's parameters, as one: a step is a step of each."""

    optimizers: tuple[torch.optim.Optimizer, ...]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for one in self.optimizers for group in one.param_groups]

    def step(self) -> None:
        for one in self.optimizers:
            one.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for one in self.optimizers:
            one.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"each": [one.state_dict() for one in self.optimizers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for one, own in zip(self.optimizers, state["each"], strict=True):
            one.load_state_dict(own)


def each_of(optimizer: Any) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimisers of one or `Several`."""
    return optimizer.optimizers if isinstance(optimizer, Several) else (optimizer,)


def require_held(parameters: dict[str, nn.Parameter], optimizer: Any) -> None:
    """Reject an optimiser that does not hold each parameter that trains once, or holds others."""
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
            "optimizer: it holds a parameter that is none of the model's: make it from this "
            "model's parameters, and step what else trains by itself."
        )


@contextmanager
def in_private_step() -> Iterator[None]:
    """Let watched optimisers step."""
    before = _IN_STEP.set(True)
    try:
        yield
    finally:
        _IN_STEP.reset(before)


def _note_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    if not _IN_STEP.get():
        _PRIVATE.discard(optimizer)


def watch_steps(model: nn.Module, optimizer: Any, training: ExitStack) -> None:
    """Reject any optimiser's other steps of the weights until the training is closed.

    Warn of a state of earlier ones.
    """
    trained = set(map(id, trainable(model).values()))

    def refuse(other: torch.optim.Optimizer, *_: object) -> None:
        held = {id(p) for group in other.param_groups for p in group["params"]}
        if not _IN_STEP.get() and held & trained:
            raise UserError(
                "an optimizer was stepped on the model's weights outside private.step: its "
                "gradient is not private, and no ε covers it. Leave that step out (public terms go "
                "into regulariser=), or close() the training first to go on without privacy."
            )

    training.callback(register_optimizer_step_pre_hook(refuse).remove)
    for one in each_of(optimizer):
        states = (own for own in one.state.values() if isinstance(own, dict) and own)
        if all(float(own.get("step", 1)) == 0 for own in states):  # Adagrad's begins at 0
            _PRIVATE.add(one)
            one.register_step_pre_hook(_note_step)
    if not _PRIVATE.issuperset(each_of(optimizer)):
        log.warning(
            "the optimizer holds a state of earlier steps, which no ε covers: make a new one, "
            "unless no private data reached them"
        )


@contextmanager
def adds_gradient(
    model: nn.Module, optimizer: Any, regulariser: Regulariser | None, ranks: Ranks
) -> Iterator[None]:
    """Add the regulariser's gradient, at the current weights, in the optimiser's next step.

    It is taken before the examples are read: random numbers that it draws tell nothing of them.
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
        found = torch.autograd.grad(value.sum(), parameters, allow_unused=True)
    added = [
        torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)
    ]
    if not all(bool(torch.isfinite(g).all()) for g in added):
        raise UserError("regulariser: its gradient is not finite, and would spoil the weights.")
    ranks.copy_from_first(added)  # it may draw numbers

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
