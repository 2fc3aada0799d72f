"""What an object holds, and how it is restored: what all kinds of objects share."""

from __future__ import annotations

import sys
import sysconfig
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, singledispatch
from operator import is_
from pathlib import Path
from typing import Any

MISSING = object()

Restore = Callable[[], bool]  # returns True if there was something to restore


@dataclass(frozen=True)
class Content:
    """What an object holds.

    Attributes:
        parts: the objects that it refers to.
        restore: restores what the object itself holds; None if that cannot change.
        finish: is called at the end.
    """

    parts: Iterable[Any]
    restore: Restore | None = None
    finish: Callable[[], None] | None = None


@singledispatch
def content_of(value: Any) -> Content:
    """Return what an object holds. Each kind of object has its own rule, see the other modules."""
    raise NotImplementedError  # `objects` has the rule for any object


@dataclass(frozen=True, eq=False)
class Slot:
    """An attribute that is not in the object's dictionary, such as one in `__slots__`."""

    value: Any
    descriptor: types.MemberDescriptorType | types.GetSetDescriptorType

    def read(self) -> Any:
        try:
            return self.descriptor.__get__(self.value)
        except AttributeError:  # not assigned yet
            return MISSING

    def write(self, content: Any) -> None:
        if content is MISSING:
            self.descriptor.__delete__(self.value)
        else:
            self.descriptor.__set__(self.value, content)


def slots_of(value: Any, with_c: bool = False) -> list[Slot]:
    """Return the slots of an object; with `with_c`, also what its types in C or Cython define."""
    owner: Any = type(value)
    return [Slot(value, descriptor) for descriptor in _slots_of_class(owner, with_c)]


@lru_cache(maxsize=4096)
def _slots_of_class(kind: type, with_c: bool) -> list[types.MemberDescriptorType]:
    return [
        descriptor
        for owner in kind.__mro__
        if with_c or "__slots__" in vars(owner)  # some of those in C are read-only
        for descriptor in vars(owner).values()
        if isinstance(descriptor, types.MemberDescriptorType)
    ]


def read_cell(cell: types.CellType) -> Any:
    """Return the value of a variable in a closure."""
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return MISSING


@lru_cache(maxsize=4096)
def is_library(module_name: Any) -> bool:
    """Return True if a module belongs to Python or an installed package, not to a user's code."""
    package = str(module_name).partition(".")[0]
    if package in ("torch", "zdp_bench"):
        return True
    module = sys.modules.get(package)
    file = getattr(module, "__file__", None)
    # A namespace package, such as `cuda`, has folders only.
    paths = [file] if file else list(getattr(module, "__path__", ()))
    if not paths:  # part of the interpreter, or a script
        return package in sys.stdlib_module_names
    folders = [sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")]
    return all(any(Path(path).is_relative_to(folder) for folder in folders) for path in paths)


def attributes_of(value: Any) -> list[Any]:
    """Return the dictionary of an object's attributes in a list, or an empty list."""
    attributes = getattr(value, "__dict__", None)
    return [attributes] if isinstance(attributes, dict) else []


def class_and_attributes_of(container: Any) -> list[Any]:
    """Return the class of a container and its attributes if they are a user's own."""
    owner = type(container)
    if owner.__module__ in ("builtins", "collections"):
        return []
    return [owner, *attributes_of(container)]


def are_same(first: list[Any], second: list[Any]) -> bool:
    """Return True if two lists hold the same objects in the same order."""
    return len(first) == len(second) and all(map(is_, first, second))
