"""What a model, a loss or a hook holds: every tensor and number that it could keep examples in.

Followed are attributes, slots, containers, a module's parameters, buffers and hooks, of users'
classes what they hold, and of their functions what they close over and name. Of the objects of
torch and the standard library only the kind is seen.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

MANY = 10_000  # entries of a container that is no longer looked into
LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy"} - {"__main__"}
PLAIN = (type(None), bool, int, float, complex, str, bytes, Tensor, np.ndarray, CodeType)
SEQUENCES = (list, tuple, set, frozenset, deque)
CONTAINERS = (dict, *SEQUENCES)

KEPT = (*PLAIN, *CONTAINERS)

Place = tuple[str, str]  # name of the module, and of what it holds


def places_of(thing: Any) -> Iterator[tuple[Place, Any]]:
    """Yield each thing held with its place; of what holds others in turn, its kind.

    A module's `training` is left out: it is set anew for every step.
    """
    seen: set[int] = set()

    def visit(module: str, name: str, value: Any) -> Iterator[tuple[Place, Any]]:
        if isinstance(value, PLAIN):
            yield (module, name), value
            return
        if id(value) in seen or isinstance(value, ModuleType):
            return
        seen.add(id(value))
        if isinstance(value, nn.Module):
            if name:
                module = f"{module}.{name}" if module else name
            yield (module, ""), type(value)
            own = vars(value)
            parts = own["_parameters"] | own["_buffers"] | own["_modules"]
            held = {key: part for key, part in own.items() if key not in _OF_MODULES} | parts
            for key, part in held.items():
                yield from visit(module, key, part)
        elif isinstance(value, CONTAINERS) and len(value) > MANY:
            yield (module, name), (type(value), len(value))
        elif isinstance(value, dict):
            for key, part in value.items():
                yield from visit(module, f"{name}[{key!r}]", part)
        elif isinstance(value, SEQUENCES):
            for number, part in enumerate(value):
                yield from visit(module, f"{name}[{number}]", part)
        else:
            yield (module, name), type(value)
            for key, part in _inside(value):
                yield from visit(module, f"{name}.{key}" if name else key, part)

    yield from visit("", "", thing)


_OF_MODULES = {"_parameters", "_buffers", "_modules", "training"}


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a user's object, or what a function can reach, by name."""
    if isinstance(value, MethodType):
        yield from (("__func__", value.__func__), ("__self__", value.__self__))
    elif isinstance(value, partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif isinstance(value, FunctionType):
        yield "code", value.__code__
        if _root(value.__module__) in LIBRARIES:
            return
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # not set yet
                continue
        yield from vars(value).items()
        yield from (("defaults", value.__defaults__), ("kwdefaults", value.__kwdefaults__))
        if _root(value.__module__) == "zdp_bench":
            return
        for name in _names(value.__code__):
            named = value.__globals__.get(name)
            if isinstance(named, ModuleType):
                if _root(named.__name__) not in LIBRARIES:  # a module that keeps numbers
                    inside = {key: vars(named).get(key) for key in _names(value.__code__)}
                    yield from ((f"{name}.{key}", of) for key, of in inside.items())
            elif named is not None:
                yield name, named
    elif isinstance(value, type):
        if _root(value.__module__) not in LIBRARIES:
            yield from ((k, v) for k, v in vars(value).items() if isinstance(v, KEPT))
    elif isinstance(value, SimpleNamespace) or _root(type(value).__module__) not in LIBRARIES:
        yield from getattr(value, "__dict__", {}).items()
        for of in type(value).__mro__:
            slots = vars(of).get("__slots__", ())
            for key in (slots,) if isinstance(slots, str) else slots:
                if hasattr(value, key):
                    yield key, getattr(value, key)
        yield "class", type(value)


def _root(module: str | None) -> str:
    return (module or "").partition(".")[0]


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names that a function, and the functions within it, look up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


class Held(NamedTuple):
    """What something holds at a moment, for a comparison that reads no tensor's numbers."""

    things: dict[Place, tuple[Any, int]]

    def differs_from(self, later: Held) -> str:
        """Return the name of something that was replaced or changed in between, or ''."""
        for place in self.things.keys() | later.things.keys():
            was, now = (held.things.get(place, (Held, 0)) for held in (self, later))
            plain = not isinstance(now[0], Tensor | np.ndarray) and type(was[0]) is type(now[0])
            if was[1] != now[1] or not (was[0] is now[0] or (plain and was[0] == now[0])):
                return place[1] or place[0]
        return ""


def held_by(thing: Any) -> Held:
    """Return what something holds now, and for each tensor how often torch counted a change."""

    def version(value: Any) -> int:
        if isinstance(value, np.ndarray):
            return hash(value.tobytes())
        return value._version if isinstance(value, Tensor) else 0

    return Held({place: (value, version(value)) for place, value in places_of(thing)})
