"""The learning rate schedulers of a user's loop, whose state `Private.save` stores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

from torch import nn
from torch.optim import Optimizer

from zdp_bench.errors import wrong_type
from zdp_bench.training.checkpoint import HasState


class Scheduler(HasState, Protocol):
    """A learning rate scheduler of torch, or another one with the same methods."""

    def step(self, *args: Any, **kwargs: Any) -> Any: ...


@dataclass(frozen=True)
class Schedules:
    """The schedulers of a loop, whose states are saved and loaded together.

    Attributes:
        schedulers: The schedulers, in the order in which the caller passed them.
    """

    schedulers: tuple[Scheduler, ...]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the only scheduler, or the list of all states."""
        if len(self.schedulers) == 1:
            return self.schedulers[0].state_dict()
        states = [scheduler.state_dict() for scheduler in self.schedulers]
        return {"each": states} if states else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned for schedulers of the same classes."""
        states = [state] if len(self.schedulers) == 1 else state.get("each", [])
        for scheduler, own_state in zip(self.schedulers, states, strict=True):
            scheduler.load_state_dict(own_state)

    def kinds(self) -> list[Any]:
        """Return the names of the schedulers' classes, each with those inside it."""
        if not self.schedulers:
            return [type(None).__name__]
        if len(self.schedulers) == 1:
            return _kinds(self.schedulers[0])
        return ["list", *map(_kinds, self.schedulers)]


def read_schedules(caller: str, given: Any) -> Schedules:
    """Return the schedulers in an argument: none, one, or a list.

    Args:
        caller: Name of the method, for the error.
        given: The value of the argument.

    Raises:
        UserError: The value is something else, such as the path of a file.
    """
    if given is None:
        return Schedules(())
    schedulers = tuple(given) if isinstance(given, list | tuple) else (given,)
    for scheduler in schedulers:
        if not _is_scheduler(scheduler):
            raise wrong_type(
                caller,
                scheduler,
                "a learning rate scheduler, or a list of them,",
                "omit it if there is none; model, optimizer and file are those of make_private",
            )
    return Schedules(schedulers)


def _is_scheduler(given: Any) -> TypeGuard[Scheduler]:
    """Return True if a value has a scheduler's methods. Optimizers and modules are something else.

    Schedulers of other libraries, such as those of timm, do not inherit from torch's.
    """
    methods = ("step", "state_dict", "load_state_dict")
    has_methods = all(callable(getattr(given, method, None)) for method in methods)
    return has_methods and not isinstance(given, Optimizer | nn.Module | type)


def _kinds(scheduler: Any) -> list[Any]:
    inner = getattr(scheduler, "_schedulers", ())  # of SequentialLR and ChainedScheduler
    return [type(scheduler).__name__, *map(_kinds, inner)]
