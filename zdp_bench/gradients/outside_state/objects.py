"""What objects, classes, modules and iterators hold."""

from __future__ import annotations

import gc
import io
import itertools
import os
import pickle
import threading
import types
import warnings
import weakref
from collections.abc import Iterator
from contextvars import Context, ContextVar
from operator import length_hint
from typing import Any

import torch
from torch import nn

from zdp_bench.errors import UserError
from zdp_bench.gradients.outside_state.content import (
    MISSING,
    Content,
    Slot,
    are_same,
    attributes_of,
    class_and_attributes_of,
    content_of,
    is_library,
)
from zdp_bench.gradients.outside_state.numbers import content_of_table, is_table

# Modules of libraries whose objects hold what a user stores in them. Others, such as loggers and
# trainers, may be in use by other threads.
MODULES_OF_HOLDERS = (
    *("argparse", "builtins", "collections", "functools", "itertools", "queue", "types"),
    *("weakref", "_weakrefset", "numpy", "scipy", "pandas", "torch._library.custom_ops"),
    *("torch.distributions", "torch.nn", "torch.optim", "torch.utils.data"),
    *("sklearn", "transformers", "timm", "monai", "peft", "einops", "torchvision", "torchaudio"),
    *("cachetools", "networkx", "omegaconf", "sortedcontainers"),
)

# Modules of iterators that tell their position: of lists, deques, arrays and CSV files.
WITH_POSITION = ("builtins", "_collections", "array", "numpy", "_csv")


@content_of.register(object)
def _(value: Any) -> Content:
    """Return what an object of any class holds: its attributes."""
    parts: list[Any] = []
    owner = type(value)
    if is_table(value):
        return content_of_table(value)
    if not is_library(owner.__module__):
        parts.extend([owner, *_slots_of(value)])
    elif isinstance(value, torch.jit.ScriptModule):  # its tensors are no Python attributes
        parts.extend([*value.parameters(), *value.buffers()])
    elif isinstance(value, nn.Module):
        pass
    elif owner.__module__.startswith(MODULES_OF_HOLDERS):
        # Such as the function and arguments of a partial.
        parts.extend([*_referents_of(value), *_slots_of(value)])
    else:
        return Content(())
    return Content([*parts, *attributes_of(value)])


def _referents_of(value: Any) -> list[Any]:
    """Return the objects that an object refers to, with the items of its private containers.

    A private container is no attribute. Only code in C changes it, which may point into it, so that
    Python could crash if it were restored.
    """
    if type(value).__module__ == "itertools":  # the containers are the user's
        return gc.get_referents(value)
    public = {id(slot.read()) for slot in _slots_of(value, with_c=True)}
    if isinstance(value, types.BuiltinMethodType):
        public.add(id(value.__self__))
    parts: list[Any] = []
    for part in gc.get_referents(value):
        if type(part) not in (dict, list, set) or id(part) in public:
            parts.append(part)
        elif type(part) is dict:
            parts.extend([*part.keys(), *part.values()])
        else:
            parts.extend(part)
    return parts


def _slots_of(value: Any, with_c: bool = False) -> list[Slot]:
    """Return the slots of an object; with `with_c`, also what its types in C or Cython define."""
    slots = []
    for owner in type(value).__mro__:
        if with_c or "__slots__" in vars(owner):  # some of those in C are read-only
            for descriptor in vars(owner).values():
                if isinstance(descriptor, types.MemberDescriptorType):
                    slots.append(Slot(value, descriptor))
    return slots


@content_of.register
def _(slot: Slot) -> Content:
    content = slot.read()

    def restore() -> bool:
        if slot.read() is content:
            return False
        slot.write(content)
        return True

    return Content([content], restore)


@content_of.register
def _(owner: type) -> Content:
    if is_library(owner.__module__):
        return Content(())
    attributes = _class_attributes(owner)

    def restore() -> bool:
        current = _class_attributes(owner)
        new = current.keys() - attributes.keys()
        same = {name for name, value in current.items() if attributes.get(name) is value}
        changed = attributes.keys() - same
        for name in new:
            delattr(owner, name)
        for name in changed:
            setattr(owner, name, attributes[name])
        return bool(new or changed)

    return Content([*vars(owner).values(), *owner.__bases__, type(owner)], restore)


def _class_attributes(owner: type) -> dict[str, Any]:
    """Return the attributes of a class except those that Python itself may set."""
    return {
        name: value
        for name, value in vars(owner).items()
        if callable(value) or not name.startswith("__")
    }


@content_of.register
def _(module: types.ModuleType) -> Content:
    return Content(() if is_library(module.__name__) else [vars(module)])


@content_of.register
def _(reference: weakref.ref) -> Content:
    return Content([reference()])


@content_of.register(weakref.ProxyType)
@content_of.register(weakref.CallableProxyType)
def _(proxy: Any) -> Content:
    try:
        return Content([proxy.__init__.__self__])
    except ReferenceError:  # the object no longer exists
        return Content(())


@content_of.register
def _(local: threading.local) -> Content:
    """Return what is this thread's own. Other threads use theirs meanwhile."""
    return Content([type(local), *_slots_of(local), *attributes_of(local)])


@content_of.register
def _(variable: ContextVar) -> Content:
    content = variable.get(MISSING)
    if content is MISSING:  # its default value takes the place of none
        content = Context().run(_read_default, variable)

    def restore() -> bool:
        if variable.get(content) is content:
            return False
        if content is MISSING:
            raise UserError(
                f"the context variable '{variable.name}' is set by the model or the loss, so an "
                "example may affect others, which clipping cannot bound: do not set it, or give "
                "it a default value."
            )
        variable.set(content)
        return True

    return Content([content], restore)


def _read_default(variable: ContextVar) -> Any:
    """Return the value of a variable in an empty context."""
    try:
        return variable.get()
    except LookupError:
        return MISSING


@content_of.register
def _(environment: os._Environ) -> Content:
    variables = dict(environment)

    def restore() -> bool:
        current = dict(environment)
        if current == variables:
            return False
        for name in current.keys() - variables.keys():
            del environment[name]
        environment.update(variables)
        return True

    return Content((), restore)


@content_of.register(io.StringIO)
@content_of.register(io.BytesIO)
def _(file: Any) -> Content:
    if file.closed:
        return Content(())
    *state, _ = file.__getstate__()  # the last are its attributes

    def restore() -> bool:
        if file.__getstate__()[:-1] == (*state,):
            return False
        file.__setstate__((*state, None))
        return True

    return Content([*class_and_attributes_of(file)], restore)


@content_of.register
def _(iterator: Iterator) -> Content:
    """Return what an iterator holds. It cannot be set back, so that advancing it is refused."""
    is_generator = isinstance(iterator, types.GeneratorType)
    if not is_generator and type(iterator).__module__ not in (*WITH_POSITION, "itertools"):
        return content_of.dispatch(object)(iterator)
    parts = _parts_of_iterator(iterator)
    position = _position_of(iterator)

    def require_unchanged() -> bool:
        has_same_parts = are_same(_parts_of_iterator(iterator), parts)
        if has_same_parts and _position_of(iterator) == position:
            return False
        raise UserError(
            f"a {type(iterator).__name__} outside of the model was advanced by the model or the "
            "loss, so an example may affect others, which clipping cannot bound: compute the value "
            "for each example anew."
        )

    return Content(parts, require_unchanged)


def _parts_of_iterator(iterator: Iterator) -> list[Any]:
    """Return the objects that an iterator of Python's refers to, such as a running total."""
    if isinstance(iterator, types.GeneratorType):
        frame = iterator.gi_frame
        return [] if frame is None else [*frame.f_locals.values()]  # None at its end
    parts = gc.get_referents(iterator)
    if isinstance(iterator, itertools.cycle):  # it counts positions in a list of its own
        return [*parts[:-1], *parts[-1]]
    return parts


def _position_of(iterator: Iterator) -> Any:
    """Return a value that differs once an iterator of Python's has advanced, if one is known."""
    if isinstance(iterator, types.GeneratorType):
        frame = iterator.gi_frame
        return None if frame is None else frame.f_lasti  # None at its end
    if type(iterator).__module__ in WITH_POSITION:
        try:
            position = iterator.__reduce__()
        except TypeError:  # it cannot be pickled
            position = ()
        attributes = [getattr(iterator, name, None) for name in ("index", "line_num")]
        return length_hint(iterator, -1), position, attributes
    if isinstance(iterator, itertools.count | itertools.repeat):
        return repr(iterator)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.14 copies none of these
        try:
            return pickle.dumps(iterator)
        except Exception:
            return None
