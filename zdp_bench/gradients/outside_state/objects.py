"""What objects, classes, modules and iterators hold."""

from __future__ import annotations

import gc
import io
import itertools
import os
import pickle
import re
import sys
import threading
import types
import warnings
import weakref
from collections.abc import Iterator
from contextlib import suppress
from contextvars import ContextVar
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
    slots_of,
)
from zdp_bench.gradients.outside_state.numbers import content_of_table, is_table

# Modules of libraries whose objects hold what a user stores in them. Others, such as loggers and
# trainers, may be in use by other threads.
MODULES_OF_HOLDERS = (
    *("argparse", "builtins", "collections", "csv", "functools", "itertools", "queue", "types"),
    *("weakref", "_weakrefset", "numpy", "scipy", "pandas", "torch._library.custom_ops"),
    *("torch.distributions", "torch.nn", "torch.optim", "torch.utils.data"),
    *("sklearn", "transformers", "timm", "monai", "peft", "einops", "torchvision", "torchaudio"),
    *("cachetools", "networkx", "omegaconf", "sortedcontainers"),
)
_PATTERN: Any = re.compile("")
_TEE: type = type(itertools.tee(())[0])


@content_of.register(object)
def _(value: Any) -> Content:
    """Return what an object of any class holds: its attributes."""
    parts: list[Any] = []
    owner = type(value)
    if is_table(value):
        return content_of_table(value)
    if not is_library(owner.__module__):
        parts.extend([owner, *slots_of(value)])
    elif isinstance(value, torch.jit.ScriptModule):  # its tensors are no Python attributes
        parts.extend([*value.parameters(), *value.buffers()])
    elif isinstance(value, nn.Module):
        pass
    elif owner.__module__.startswith(MODULES_OF_HOLDERS):
        # Such as the function and arguments of a partial.
        parts.extend([*_referents_of(value), *slots_of(value)])
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
    public = {id(slot.read()) for slot in slots_of(value, with_c=True)}
    if isinstance(value, types.BuiltinMethodType):
        public.add(id(value.__self__))
    parts: list[Any] = []
    for part in gc.get_referents(value):
        if type(part) not in (dict, list, set) or id(part) in public:
            parts.append(part)
        elif type(part) is dict:
            parts.extend([*part, *part.values()])
        else:
            parts.extend(part)
    return parts


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
        new = current.keys() - attributes
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
    """Return the object, and hold it, so that a weak dictionary keeps its entry meanwhile."""
    return Content([reference()], lambda: False)


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
    return Content([type(local), *slots_of(local), *attributes_of(local)])


@content_of.register
def _(variable: ContextVar) -> Content:
    """Return what a variable holds, and whether that has changed. `own_context` restores it."""
    content = variable.get(MISSING)
    return Content([content], lambda: variable.get(MISSING) is not content)


@content_of.register
def _(environment: os._Environ) -> Content:
    variables = dict(environment)

    def restore() -> bool:
        current = dict(environment)
        if current == variables:
            return False
        for name in current.keys() - variables:
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
    """Return what an iterator holds. It cannot be set back, so that advancing it is refused.

    One that does not tell its position is refused at once.
    """
    if not _is_builtin_iterator(iterator):
        return content_of.dispatch(object)(iterator)
    parts = _parts_of_iterator(iterator)
    position = _position_of(iterator)
    if position is None:
        _refuse_without_position(iterator)

    def require_unchanged() -> bool:
        has_same_parts = are_same(_parts_of_iterator(iterator), parts)
        if has_same_parts and _position_of(iterator) == position:
            return False
        raise UserError(
            f"an iterator ({type(iterator).__name__}) outside of the model was advanced by the "
            "model or the loss, so an example may affect others, which clipping cannot bound: "
            "compute the value for each example anew."
        )

    return Content(parts, require_unchanged)


@content_of.register(type(_PATTERN.scanner("")))  # which `re.finditer` advances
def _refuse_without_position(iterator: Any) -> Content:
    """Refuse an iterator, because nothing tells whether the model or the loss has advanced it."""
    raise UserError(
        f"the model or the loss can advance an iterator ({type(iterator).__name__}) that does not "
        "tell its position, so an example may affect others, which clipping cannot bound: hold a "
        "list of its items instead."
    )


def _is_builtin_iterator(iterator: Iterator[Any]) -> bool:
    """Return True for an iterator of Python's or NumPy's in C that reads no file or database."""
    package = type(iterator).__module__.partition(".")[0]
    is_in_c = isinstance(type(iterator).__next__, types.WrapperDescriptorType)
    is_outside = isinstance(iterator, io.IOBase) or package == "sqlite3"
    return is_in_c and not is_outside and package in {*sys.stdlib_module_names, "numpy"}


def _parts_of_iterator(iterator: Iterator) -> list[Any]:
    """Return the objects that an iterator of Python's refers to, such as a running total."""
    if isinstance(iterator, types.GeneratorType):
        frame = iterator.gi_frame
        return [] if frame is None else [*frame.f_locals.values()]  # None at its end
    parts = gc.get_referents(iterator)
    if isinstance(iterator, itertools.cycle):  # it counts positions in a list of its own
        *sources, items = parts
        return [*sources, *items]
    return parts


def _counts_items(iterator: Iterator) -> bool:
    """Return True for an iterator of itertools that only advances a hidden number.

    That is a `cycle` after its first pass, which refers to no iterator any more, and one of `tee`.
    """
    sources = [part for part in gc.get_referents(iterator) if part is not type(iterator)]
    is_repeating = isinstance(iterator, itertools.cycle) and len(sources) == 1  # its own list
    return is_repeating or isinstance(iterator, _TEE)


def _position_of(iterator: Iterator) -> Any:
    """Return a value that differs once an iterator has advanced, or None if none is known."""
    if isinstance(iterator, types.GeneratorType):
        frame = iterator.gi_frame
        return frame is None or frame.f_lasti  # None at its end
    if isinstance(iterator, itertools.count | itertools.repeat):
        return repr(iterator)
    if type(iterator).__module__ == "itertools":
        with warnings.catch_warnings(), suppress(Exception):
            warnings.simplefilter("ignore", DeprecationWarning)
            return pickle.dumps(iterator)  # Python 3.14 copies none of these
        # The iterators that the others advance are among their parts, and tell theirs.
        return None if _counts_items(iterator) else ()
    position: list[Any] = [length_hint(iterator, -1)]
    with suppress(TypeError):  # it cannot be pickled
        position.extend(iterator.__reduce__())
    for name in ("index", "line_num", "iterindex"):
        with suppress(AttributeError, ValueError):
            position.append(getattr(iterator, name))
    return None if position == [-1] else position
