"""Functions that a model holds, such as hooks, whose closures refer to the model itself."""

from __future__ import annotations

import gc
from collections import OrderedDict, deque
from collections.abc import Iterable
from functools import lru_cache, partial
from types import BuiltinMethodType, CellType, FunctionType, MethodType
from typing import Any

from torch import nn

from zdp_bench.gradients.outside_state.content import attributes_of, read_cell, slots_of
from zdp_bench.nn.unchanged import HOOKS

CACHE = type(lru_cache(len))
# What `copy.deepcopy` shares with the original, and what may hold it and cannot be changed.
REFERRING = (FunctionType, MethodType, BuiltinMethodType, partial, CACHE, tuple, frozenset)
CONTAINERS = {dict, OrderedDict, list, deque, set}  # which have no attributes


def refer_to_copies(memo: dict[int, Any]) -> None:
    """Let the functions that a deep copy holds refer to the copy.

    `copy.deepcopy` shares functions with the original, so that a hook of a copy would write into
    the original. A function that refers to nothing copied stays the same, also to `is`.

    Args:
        memo: the copies of a model and its parts, by the id of the original, as `copy.deepcopy`
            leaves them.
    """
    functions = _Functions(memo)
    originals = memo.get(id(memo))  # which `copy.deepcopy` keeps alive
    for number, copied in memo.items():
        is_empty = type(copied) in CONTAINERS and not copied  # as most of a module's are
        if not is_empty and number != id(copied) and copied is not originals:
            functions.replace_in(copied)


class _Functions:
    """Copies of functions that refer to copied objects."""

    def __init__(self, memo: dict[int, Any]) -> None:
        self.memo = memo
        self.copies: dict[int, tuple[Any, Any]] = {}  # original and copy, by the original's id
        self.cells: dict[int, CellType] = {}
        self.unrelated: dict[int, Any] = {}  # functions that refer to nothing copied, by id

    def replace_in(self, copied: Any) -> None:
        """Replace the functions in a copied object by their copies."""
        self._replace_in_container(copied)
        if type(copied) in CONTAINERS or isinstance(copied, MethodType):
            return  # the attributes of a method are those of its function, which is shared
        for attributes in attributes_of(copied):
            self._replace_in_container(attributes)
        if isinstance(copied, nn.Module):  # one that copies itself leaves them out of the memo
            for kind in HOOKS:
                self._replace_in_container(vars(copied).get(kind))
        for slot in slots_of(copied):
            content = [slot.read()]
            if self._replace_in_list(content):
                slot.write(*content)

    def _replace_in_container(self, container: Any) -> None:
        if isinstance(container, dict):
            values = [*container.values()]
            if self._replace_in_list(values):
                dict.update(container, zip(container, values, strict=True))
        elif isinstance(container, list | deque):
            self._replace_in_list(container)
        elif isinstance(container, set):
            items = [*container]
            if self._replace_in_list(items):
                container.clear()
                container.update(items)

    def _replace_in_list(self, items: list[Any] | deque[Any]) -> bool:
        """Replace the functions in a list by their copies, and return True if any has a copy.

        Any other item is a copy, or an original that a `__deepcopy__` has kept.
        """
        functions = {at: item for at, item in enumerate(items) if isinstance(item, REFERRING)}
        if not self._refer_to_copies(functions.values()):
            return False
        for at, function in functions.items():
            items[at] = self.copy_of(function)
        return True

    def _refer_to_copies(self, values: Iterable[Any]) -> bool:
        """Return True if any of these values is copied, or refers through functions to what is."""
        pending = [*values]
        seen: dict[int, Any] = {}
        while pending:
            value = pending.pop()
            number = id(value)
            if number in self.memo:
                if self.memo[number] is not value:
                    return True
            elif number in self.copies:
                return True
            elif isinstance(value, REFERRING) and not (number in seen or number in self.unrelated):
                seen[number] = value
                pending += _parts_of(value)
        self.unrelated.update(seen)
        return False

    def copy_of(self, value: Any) -> Any:
        """Return the copy of a function or other object, or itself if there is none."""
        if id(value) in self.memo:
            copied = self.memo[id(value)]
            # `copy.deepcopy` copies a partial or a tuple, but not the functions in it.
            is_incomplete = isinstance(copied, REFERRING) and copied is not value
            return self.copy_of(copied) if is_incomplete else copied
        if id(value) not in self.copies:
            if not self._refer_to_copies([value]):
                return value
            if isinstance(value, FunctionType):
                self._copy_function(value)
            else:
                parts = [*map(self.copy_of, _parts_of(value))]
                # A part that leads back to the value has already added its copy.
                self.copies.setdefault(id(value), (value, _rebuild(value, parts)))
        _, copied = self.copies[id(value)]
        return copied

    def _copy_function(self, function: FunctionType) -> None:
        """Copy a function before what it refers to, which may lead back to it."""
        closure = function.__closure__ or ()
        cells = [*map(self._cell_of, closure)]
        copied = FunctionType(
            function.__code__, function.__globals__, function.__name__, None, tuple(cells)
        )
        self.copies[id(function)] = function, copied
        for own, cell in zip(cells, closure, strict=True):
            if own is not cell:
                own.cell_contents = self.copy_of(cell.cell_contents)
        named = function.__kwdefaults__ or {}
        copied.__defaults__ = tuple(map(self.copy_of, function.__defaults__ or ()))
        copied.__kwdefaults__ = {name: self.copy_of(value) for name, value in named.items()}
        copied.__module__ = function.__module__
        copied.__qualname__ = function.__qualname__
        annotate = getattr(function, "__annotate__", None)
        if annotate is None:
            copied.__annotations__ = function.__annotations__
        else:  # Python 3.14 evaluates annotations when they are read, and names may be missing
            copied.__annotate__ = annotate  # type: ignore[attr-defined]
        copied.__dict__ = function.__dict__  # shared

    def _cell_of(self, cell: CellType) -> CellType:
        """Return the cell of a copied variable, empty at first, or the same if it has no copy."""
        if not self._refer_to_copies([read_cell(cell)]):
            return cell
        return self.cells.setdefault(id(cell), CellType())


def _parts_of(value: Any) -> list[Any]:
    """Return what a function, or a value that holds functions, refers to."""
    if isinstance(value, FunctionType):
        variables = map(read_cell, value.__closure__ or ())
        named = value.__kwdefaults__ or {}
        return [*variables, *(value.__defaults__ or ()), *named.values()]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, BuiltinMethodType):
        return [value.__self__]
    if isinstance(value, CACHE):
        function = getattr(value, "__wrapped__", None)
        is_called = any(part is function for part in gc.get_referents(value))
        return [function] if is_called else []  # `__wrapped__` was set anew or deleted
    if type(value) is partial:
        return [value.func, *value.args, *value.keywords.values()]
    if type(value) in (tuple, frozenset) or hasattr(value, "_make"):
        return [*value]
    return []


def _rebuild(value: Any, parts: list[Any]) -> Any:
    """Return a value of the same kind that refers to other parts."""
    if isinstance(value, MethodType):
        return MethodType(*parts)
    if isinstance(value, BuiltinMethodType):
        (owner,) = parts
        return getattr(owner, value.__name__)
    if isinstance(value, CACHE):
        return _with_attributes_of(value, lru_cache(**value.cache_parameters())(*parts))
    if type(value) is partial:
        function, *arguments = parts
        count = len(value.args)
        named = zip(value.keywords, arguments[count:], strict=True)
        return _with_attributes_of(value, partial(function, *arguments[:count], **dict(named)))
    make = getattr(value, "_make", type(value))  # of a named tuple
    return make(parts)


def _with_attributes_of(original: Any, copied: Any) -> Any:
    """Return a copy with the attributes that the original has beside those of the copy."""
    vars(copied).update(vars(original) | vars(copied))
    return copied
