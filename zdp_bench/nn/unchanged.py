"""Which layers compute what their type says: without a user's hooks, functions or methods."""

from __future__ import annotations

from functools import partial
from inspect import getattr_static
from types import FunctionType
from typing import Any

from torch import nn

BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", *BACKWARD_HOOKS)
# What a call of a layer uses of it.
METHODS = ("__call__", "_call_impl", "__getattr__", "forward", "_conv_forward", "_check_input_dim")
TENSORS = ("weight", "bias")


def computes_as(module: nn.Module, types: tuple[type[nn.Module], ...]) -> bool:
    """Return True for an unchanged module that computes what one of these types does.

    A derived type may set its parameters in another way, but not compute in another way.
    """
    kind = type(module)
    base = next((base for base in kind.__mro__ if base in types), None)
    if base is None or not is_unchanged(module):
        return False
    # Older weight norm and pruning compute a weight, which is then no parameter.
    if any(vars(module).get(name) is not None for name in TENSORS):
        return False
    for name in METHODS + TENSORS:
        if getattr_static(kind, name, None) is not getattr_static(base, name, None):
            return False
    return True


def is_unchanged(module: nn.Module) -> bool:
    """Return True for a module without hooks, and without functions in place of its class's."""
    attributes = vars(module)
    for name in METHODS:
        if name in attributes and not _is_of_package(attributes[name]):
            return False
    return not any(foreign_hooks(attributes[kind]) for kind in HOOKS)


def foreign_hooks(hooks: dict[Any, Any]) -> list[Any]:
    """Return the hooks that are not this package's own."""
    return [hook for hook in hooks.values() if not _is_of_package(hook)]


def _is_of_package(function: Any) -> bool:
    """Return True if the code that a call runs is this package's own."""
    while isinstance(function, partial):
        function = function.func
    function = getattr(function, "__func__", function)  # of a bound method
    if isinstance(function, FunctionType):
        # Not `__module__`, which `functools.wraps` copies from the function that it wraps.
        module = str(function.__globals__.get("__name__"))
    else:
        module = type(function).__module__
    return module.startswith("zdp_bench.")
