"""The optimizers of a private training, and the optional regulariser in their steps."""

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

from zdp_bench.errors import UserError, first_line, is_out_of_memory
from zdp_bench.gradients.clipping import trainable
from zdp_bench.training.distributed import Ranks

log = logging.getLogger(__name__)
Regulariser = Callable[[nn.Module], Tensor]
# Optimizers whose state comes from private steps only.
_PRIVATE: WeakSet[torch.optim.Optimizer] = WeakSet()
_IN_STEP = ContextVar("_IN_STEP", default=False)  # True while this thread takes a private step


@dataclass(frozen=True)
class Several:
    """Several optimizers that share a model's parameters and step together.

    Attributes:
        optimizers: The optimizers.
    """

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
        for optimizer, member_state in zip(self.optimizers, state["each"], strict=True):
            optimizer.load_state_dict(member_state)


def each_of(optimizer: Any) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers in `Several`, or a single optimizer, as a tuple."""
    return optimizer.optimizers if isinstance(optimizer, Several) else (optimizer,)


def require_held(parameters: dict[str, nn.Parameter], optimizer: Any) -> None:
    """Reject an optimizer that does not have exactly the trained parameters, each once.

    Frozen parameters of the model are allowed.

    Args:
        parameters: All parameters of the model, by name.
        optimizer: The optimizer, or several in one.
    """
    counts = Counter(id(p) for group in optimizer.param_groups for p in group["params"])
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            continue
        count = counts[id(parameter)]
        if count < 1:
            raise UserError(
                f"parameter '{name}' requires a gradient, but the optimizer does not have it: "
                "create the optimizer from this model's parameters, or set requires_grad=False."
            )
        if count > 1:
            raise UserError(
                f"parameter '{name}' is in the optimizer {count} times: give each optimizer "
                "different parameters."
            )
    if counts.keys() - set(map(id, parameters.values())):
        raise UserError(
            "optimizer: it has a parameter that does not belong to the model: create it from this "
            "model's parameters, and use another optimizer for other parameters."
        )


@contextmanager
def in_private_step() -> Iterator[None]:
    """Allow watched optimizers to step inside the block."""
    token = _IN_STEP.set(True)
    try:
        yield
    finally:
        _IN_STEP.reset(token)


def _note_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Record that an optimizer has taken a step that is not private."""
    if not _IN_STEP.get():
        _PRIVATE.discard(optimizer)


def watch_steps(model: nn.Module, optimizer: Any, training: ExitStack) -> None:
    """Reject optimizer steps on the model's weights outside private steps.

    Warn if an optimizer already has state, which may come from training examples.

    Args:
        model: The model.
        optimizer: The optimizer, or several in one.
        training: Steps are rejected until this stack is closed.
    """
    trained = set(map(id, trainable(model).values()))

    def refuse(other: torch.optim.Optimizer, *_: object) -> None:
        parameters = {id(p) for group in other.param_groups for p in group["params"]}
        if not _IN_STEP.get() and parameters & trained:
            raise UserError(
                "an optimizer would change the model's weights outside private.step: its gradient "
                "is not private, and no ε covers it. Remove this step (public terms go into "
                "regulariser=), or call close() first to continue without privacy."
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
            "the optimizer has state from earlier steps, which no ε covers: create a new one, "
            "unless those steps used no private data"
        )


@contextmanager
def adds_gradient(
    model: nn.Module, optimizer: Any, regulariser: Regulariser | None, ranks: Ranks
) -> Iterator[None]:
    """Add the regulariser's gradient at the current weights to the optimizer's next step.

    The gradient is computed on entry, before the examples are read, so the state of the random
    generators that the regulariser may use reveals nothing about them.

    Args:
        model: The model.
        optimizer: The optimizer, or several in one.
        regulariser: Function of the model that returns a real number; None for no regulariser.
        ranks: Processes that train together. All use the gradient of rank 0.

    Raises:
        UserError: The regulariser does not return a real number that depends on the weights, or its
            gradient is not finite.
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
                "regulariser: it must return one real number that depends on the model's weights, "
                "as in lambda model: ..."
            )
        try:
            autograd_result = torch.autograd.grad(value.sum(), parameters, allow_unused=True)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            advice = "its gradient cannot be computed"
            if "backward through the graph a second time" in str(error):
                advice = "it must return its number and not call backward() itself"
            raise UserError(f"regulariser: {advice}: torch raises: {first_line(error)}") from None
    gradients = []
    for parameter, gradient in zip(parameters, autograd_result, strict=True):
        gradients.append(torch.zeros_like(parameter) if gradient is None else gradient)
    if not all(bool(torch.isfinite(gradient).all()) for gradient in gradients):
        raise UserError("regulariser: its gradient is not finite, and would spoil the weights.")
    ranks.copy_from_first(gradients)  # the regulariser may draw random numbers

    def add(*_: object) -> None:
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                assert parameter.grad is not None
                parameter.grad += gradient

    handle = each_of(optimizer)[0].register_step_pre_hook(add)
    try:
        yield
    finally:
        handle.remove()
