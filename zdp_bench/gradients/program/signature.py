"""Whether a model is still the one that was recorded.

A program does what the model's Python code did with the attributes that its modules held. So it is
recorded again once a module, a hook, an attribute, or a parameter's shape, type or `requires_grad`
is another. Numbers of parameters and buffers may change: a program reads them when it runs.
"""

from __future__ import annotations

import weakref
from argparse import Namespace
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from zdp_bench.gradients.parts import leaves_of
from zdp_bench.gradients.program.ours import HOOKS, foreign_hooks

MOST_COMPARED = 64  # entries of a list or dictionary; a longer one is compared as an object
DEEPEST = 3  # levels of lists and dictionaries in each other; what is below is compared as objects
# What torch keeps of every module, and of recurrent ones.
OF_TORCH = {*vars(nn.Module()), "_flat_weights", "_flat_weight_refs", "_all_weights"}
IGNORED = OF_TORCH - {"training"}


class Reference:
    """A reference to an object, which equals only references to this object while it lives.

    An address alone would not do: a later object may lie there.
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
    """Return what a recording depends on, beside code and the numbers of parameters and buffers.

    Two that are equal have the same program. Every step computes one, so it is quick.
    """
    leaves = leaves_of(inputs)
    shapes = [(leaf.shape[1:], leaf.dtype, leaf.device) for leaf in leaves]
    return shapes, [_describe_module(module) for module in model.modules()]


def _describe_module(module: nn.Module) -> tuple[Any, ...]:
    held = vars(module)
    hooks = []
    for kind in HOOKS:
        if held[kind]:
            hooks += [Reference(hook) for hook in foreign_hooks(held[kind])]
    attributes = [
        (name, _describe_value(value)) for name, value in held.items() if name not in IGNORED
    ]
    tensors = []
    for named in (held["_parameters"], held["_buffers"]):
        for name, tensor in named.items():
            if tensor is not None:
                tensors.append((name, tensor.dtype, tensor.shape, tensor.requires_grad))
    return Reference(module), hooks, attributes, tensors


def _describe_value(value: Any, level: int = 0) -> Any:
    """Return what tells an attribute from what it is later.

    A tensor is a constant of the program itself, which follows changes in place.
    """
    if value is None or type(value) is str:
        return value
    if isinstance(value, bool | int | float | str):
        return type(value), value
    entries = _entries_of(value)
    if entries is None or len(entries) > MOST_COMPARED or level == DEEPEST:
        return Reference(value)
    return type(value), [_describe_value(entry, level + 1) for entry in entries]


def _entries_of(value: Any) -> Sequence[Any] | None:
    """Return what a list, dictionary or namespace holds; None for another object."""
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, Namespace | SimpleNamespace):
        value = vars(value)
    if isinstance(value, dict):
        return [*value, *value.values()]
    return None
