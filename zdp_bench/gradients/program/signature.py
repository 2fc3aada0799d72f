"""Whether a model has changed since it was recorded.

A program does what the model's Python code did with the attributes that its modules had then. It is
therefore recorded again if a module, its class, a hook, an attribute, or the shape, type or
`requires_grad` of a parameter changes, if other names share a module or a tensor, or if inputs are
no longer contiguous. The values of parameters and buffers may change, because a program reads them
by name when it runs.
"""

from __future__ import annotations

import weakref
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor, nn

from zdp_bench.gradients.outside_state.content import is_library, slots_of
from zdp_bench.gradients.parts import leaves_by_path, leaves_of
from zdp_bench.nn.unchanged import HOOKS, foreign_hooks

MAX_ENTRIES = 64  # length up to which containers, arrays and objects are compared by entry
MAX_DEPTH = 3  # nesting up to which they are compared by entry
# Attributes that torch sets in each module, and in recurrent ones.
OF_TORCH = {*vars(nn.Module()), "_flat_weights", "_flat_weight_refs", "_all_weights"}
IGNORED = OF_TORCH - {"training"}


class Reference:
    """A reference that equals only references to the same object, while this object exists.

    The address of an object is not sufficient, because a later object may have the same one.
    """

    def __init__(self, referred: Any) -> None:
        try:
            self.get: Callable[[], Any] = weakref.ref(referred)
        except TypeError:  # a built-in type has no weak references
            self.get = lambda: referred

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Reference):
            return False
        referred = self.get()
        return referred is not None and referred is other.get()


def signature_of(model: nn.Module, inputs: Tensor) -> Any:
    """Return what a recording depends on, other than code and values of parameters and buffers.

    Models with equal signatures have the same program. Each step computes one, so it is fast.
    """
    kinds = kinds_of(inputs)
    # The order of a dictionary's keys is compared, because a forward function may depend on it.
    numbers: dict[int, int] = {}
    modules = [_describe_module(module, numbers) for module in model.modules()]
    are_contiguous = [leaf.is_contiguous() for leaf in leaves_of(inputs)]
    return [*kinds], kinds, are_contiguous, modules


def kinds_of(inputs: Tensor) -> dict[str, tuple[Any, ...]]:
    """Return shape, type and device of an example's tensors, by their path in the inputs."""
    return {
        path: (leaf.shape[1:], leaf.dtype, leaf.device)
        for path, leaf in leaves_by_path(inputs).items()
    }


def _describe_module(module: nn.Module, numbers: dict[int, int]) -> tuple[Any, ...]:
    """Return what a recording depends on in one module.

    Args:
        module: the module.
        numbers: a number for each module and tensor of the model, by `id`, in the order in which
            they are met; extended in place. Equal numbers mean that names share one.
    """
    held = vars(module)
    hooks = []
    for kind in HOOKS:
        if held[kind]:
            hooks += [Reference(hook) for hook in foreign_hooks(held[kind])]
    attributes = [
        (name, _describe_value(value, numbers))
        for name, value in held.items()
        if name not in IGNORED
    ]
    tensors = []
    for named in (held["_parameters"], held["_buffers"]):
        for name, tensor in named.items():
            if tensor is not None:
                number = numbers.setdefault(id(tensor), len(numbers))
                tensor_kind = tensor.dtype, tensor.shape, tensor.requires_grad
                tensors.append((name, number, *tensor_kind))
    children = [
        (name, numbers.setdefault(id(child), len(numbers)))
        for name, child in held["_modules"].items()
    ]
    return Reference(module), type(module), hooks, attributes, tensors, children


def _describe_value(value: Any, numbers: dict[int, int], level: int = 0) -> Any:
    """Return a value that changes if an attribute changes.

    A tensor is described by its identity: it is a constant of the program, which therefore follows
    changes in place. An object that several modules hold is described once.
    """
    if value is None or type(value) is str:
        return value
    if isinstance(value, bool | int | float | complex | str | bytes):
        return type(value), value
    if id(value) in numbers:
        return type(value), numbers[id(value)]
    entries = _entries_of(value)
    if entries is None or len(entries) > MAX_ENTRIES or level == MAX_DEPTH:
        return Reference(value)
    if _is_users(value):
        numbers[id(value)] = len(numbers)
    return type(value), [_describe_value(entry, numbers, level + 1) for entry in entries]


def _entries_of(value: Any) -> Sequence[Any] | None:
    """Return what a container, an array or an object of a user's class holds; None for others."""
    if isinstance(value, list | tuple | set | frozenset | deque):
        return [*value]
    if isinstance(value, np.ndarray):
        is_small = value.size <= MAX_ENTRIES and not value.dtype.hasobject
        return [str(value.dtype), value.shape, value.tobytes()] if is_small else None
    if isinstance(value, Namespace | SimpleNamespace):
        value = vars(value)
    if isinstance(value, dict):
        return [*value, *value.values()]
    return _attributes_of(value) if _is_users(value) else None


def _attributes_of(value: Any) -> list[Any]:
    """Return the names and values of an object's attributes, and the values of its slots."""
    attributes = getattr(value, "__dict__", {})
    slots = slots_of(value, with_c=True)
    return [*attributes, *attributes.values(), *[slot.read() for slot in slots]]


def _is_users(value: Any) -> bool:
    """Return True for an object of a user's own class that is no module, tensor or class.

    Objects of libraries, such as trainers and loggers, may change at each step.
    """
    is_plain = not isinstance(value, nn.Module | Tensor | type)
    return is_plain and not _is_library(type(value).__module__)


_is_library = lru_cache(maxsize=1000)(is_library)
