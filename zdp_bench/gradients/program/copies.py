"""Copies of a model, on which a check or a single example runs without changing the original."""

from __future__ import annotations

import copy
import copyreg
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from zdp_bench.errors import UserError, first_line
from zdp_bench.gradients.outside_state.content import attributes_of, slots_of
from zdp_bench.gradients.program.closures import refer_to_copies


def copy_apart(
    model: nn.Module,
    shared: tuple[Any, ...] = (),
) -> nn.Module:
    """Return a deep copy of a model.

    Functions that do not refer to the model (`closures`), and objects that cannot be copied, such
    as a lock, an open file or a class's only instance, are shared with the original. Attributes of
    parameters are copied too.

    Args:
        model: the model.
        shared: other objects that are shared with the original instead of copied.
    """
    memo: dict[int, Any] = {id(shared_object): shared_object for shared_object in shared}
    # What a copy gets: a Lightning module leaves its trainer out.
    attributes = [value for module in model.modules() for value in _state_of(module).values()]
    for value in attributes:
        if isinstance(value, Tensor) and not value.is_leaf:
            memo[id(value)] = value  # `deepcopy` rejects it; gradients reach a parameter through it
    try:
        copied = _copy(model, memo)
    except Exception:  # a user's class may raise anything
        modules: dict[int, Any] = {id(module): module for module in model.modules()}
        for value in attributes:
            _share_uncopyable(value, memo, modules)
        try:
            copied = _copy(model, memo)
        except Exception as error:
            raise UserError(
                f"the model cannot be copied, as private steps do: copy.deepcopy raises: "
                f"{first_line(error)}"
            ) from None
    _share_parameters(copied, model, {id(shared_object) for shared_object in shared})
    pairs = zip(copied.parameters(), model.parameters(), strict=True)
    for parameter, original in pairs:
        if parameter is not original:  # `deepcopy` leaves out a parameter's attributes
            vars(parameter).update(copy.deepcopy(vars(original)))
    return copied


class _Memo(dict[int, Any]):
    """What `copy.deepcopy` has copied, by the id of the original.

    It rejects an object that is given as its own copy, as by the `__new__` of a class with one
    instance: `copy.deepcopy` would then overwrite the original's attributes with their copies. An
    object such as a logger, of which it copies no attributes, may be its own copy.
    """

    def __setitem__(self, number: int, copied: Any) -> None:
        if number == id(copied) and _is_overwritten(copied):
            raise TypeError(
                f"{type(copied).__name__} gives an existing object instead of a new one: let its "
                "__new__ create one"
            )
        dict.__setitem__(self, number, copied)  # `super` takes longer


def _is_overwritten(value: Any) -> bool:
    """Return True if `copy.deepcopy` takes an object itself for a new one, and fills it."""
    if hasattr(type(value), "__deepcopy__"):
        return False
    reduce = copyreg.dispatch_table.get(type(value))
    with suppress(Exception):  # not reducible, such as a lock that a `__deepcopy__` shares
        reduced: Any = value.__reduce_ex__(4) if reduce is None else reduce(value)
        create, arguments, *contents = reduced
        is_filled = any(content is not None for content in contents)
        return is_filled and create(*arguments) is value
    return False


def _copy(model: nn.Module, shared: dict[int, Any]) -> nn.Module:
    memo = _Memo(shared)
    copied = copy.deepcopy(model, memo)
    refer_to_copies(memo)
    return copied


def _state_of(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that a copy gets, or all if a module does not tell them."""
    with suppress(Exception):  # parametrized modules refuse; a user's may raise anything
        state: Any = module.__getstate__()
        if isinstance(state, dict):
            return state
    return vars(module)


def _share_parameters(copied: nn.Module, model: nn.Module, shared: set[int]) -> None:
    """Give a copy the shared parameters that a `__deepcopy__` of the user's has copied."""
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if id(parameter) in shared:
                twin = copied.get_submodule(name)
                if twin._parameters.get(key) is not parameter:
                    setattr(twin, key, parameter)


def _share_uncopyable(
    value: Any,
    memo: dict[int, Any],
    modules: dict[int, Any],
) -> None:
    """Add to `memo` the objects in a value that cannot be copied, such as locks.

    An object is added only if it cannot be copied even with such parts of it shared. An object that
    contains a lock is therefore copied, and only the lock is shared.

    Args:
        value: the value.
        memo: objects that are shared, by id; extended in place.
        modules: objects that are not followed, by id: modules, and objects that contain the value.
    """
    if isinstance(value, ModuleType):  # whose namespace is no part of the model
        memo[id(value)] = value
    if id(value) in memo or id(value) in modules or _is_copyable(value, memo | modules):
        return
    outer = modules | {id(value): value}  # a reference back to the value would be a cycle
    for part in _parts_of(value):
        _share_uncopyable(part, memo, outer)
    if not _is_copyable(value, memo | modules):
        memo[id(value)] = value


def _is_copyable(value: Any, memo: dict[int, Any]) -> bool:
    try:
        copy.deepcopy(value, _Memo(memo))
    except Exception:  # a user's class may raise anything
        return False
    return True


def _parts_of(value: Any) -> list[Any]:
    """Return the attributes of an object, and what it contains if it is a container."""
    parts = [slot.read() for slot in slots_of(value)]
    for attributes in attributes_of(value):
        parts += attributes.values()
    if isinstance(value, Mapping):
        parts += [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple | set | frozenset | deque):
        parts += value
    return parts
