"""Functions that a model holds, such as hooks, whose closures refer to the model itself."""

from __future__ import annotations

from collections import OrderedDict, deque
from functools import partial
from types import BuiltinMethodType, CellType, FunctionType
from typing import Any

from torch import nn

from zdp_bench.gradients.outside_state.content import (
    are_same,
    attributes_of,
    read_cell,
    slots_of,
)
from zdp_bench.gradients.program.ours import HOOKS

# What `copy.deepcopy` shares with the original, and what may hold it and cannot be changed.
REFERRING = (FunctionType, BuiltinMethodType, partial, tuple, frozenset)
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

    def replace_in(self, copied: Any) -> None:
        """Replace the functions in a copied object by their copies."""
        holders = [copied]
        if type(copied) not in CONTAINERS:
            holders += attributes_of(copied)
            for slot in slots_of(copied):
                value = slot.read()
                if isinstance(value, REFERRING):
                    slot.write(self.copy_of(value))
        if isinstance(copied, nn.Module):  # one that copies itself leaves them out of the memo
            holders += [vars(copied).get(kind) for kind in HOOKS]
        for holder in holders:
            entries: Any = ()
            if isinstance(holder, dict):
                entries = holder.items()
            elif isinstance(holder, list | deque):
                entries = enumerate(holder)
            # Any other object is a copy, or an original that a `__deepcopy__` has kept.
            referring = [entry for entry in entries if isinstance(entry[1], REFERRING)]
            for key, value in referring:
                copied_value = self.copy_of(value)
                if copied_value is not value:
                    holder[key] = copied_value
            if isinstance(holder, set):
                for value in [value for value in holder if isinstance(value, REFERRING)]:
                    copied_value = self.copy_of(value)
                    if copied_value is not value:
                        holder.remove(value)
                        holder.add(copied_value)

    def copy_of(self, value: Any) -> Any:
        """Return the copy of a function or other object, or itself if there is none."""
        if id(value) in self.memo:
            return self.memo[id(value)]
        if not isinstance(value, REFERRING):
            return value
        if id(value) not in self.copies:
            self.copies[id(value)] = value, value  # where it calls itself
            self.copies[id(value)] = value, self._copy(value)
        _, copied = self.copies[id(value)]
        return copied

    def _copy(self, value: Any) -> Any:
        if isinstance(value, FunctionType):
            return self._copy_function(value)
        if isinstance(value, BuiltinMethodType):
            owner = self.copy_of(value.__self__)
            return value if owner is value.__self__ else getattr(owner, value.__name__)
        if type(value) is partial:
            old = [value.func, *value.args, *value.keywords.values()]
            new = [*map(self.copy_of, old)]
            if are_same(new, old):
                return value
            function, *arguments = new
            count = len(value.args)
            named = dict(zip(value.keywords, arguments[count:], strict=True))
            return partial(function, *arguments[:count], **named)
        is_named = isinstance(value, tuple) and hasattr(value, "_make")
        if is_named or type(value) in (tuple, frozenset):
            entries = [*map(self.copy_of, value)]
            make = type(value)._make if is_named else type(value)
            return value if are_same(entries, [*value]) else make(entries)
        return value

    def _copy_function(self, function: FunctionType) -> FunctionType:
        closure = tuple(map(self._cell_of, function.__closure__ or ()))
        defaults = tuple(map(self.copy_of, function.__defaults__ or ()))
        named = function.__kwdefaults__ or {}
        named_copies = {name: self.copy_of(value) for name, value in named.items()}
        new = [*closure, *defaults, *named_copies.values()]
        old = [*(function.__closure__ or ()), *(function.__defaults__ or ()), *named.values()]
        if are_same(new, old):
            return function
        copied = FunctionType(
            function.__code__, function.__globals__, function.__name__, defaults, closure
        )
        copied.__kwdefaults__ = named_copies
        copied.__module__ = function.__module__
        copied.__qualname__ = function.__qualname__
        annotate = getattr(function, "__annotate__", None)
        if annotate is None:
            copied.__annotations__ = function.__annotations__
        else:  # Python 3.14 evaluates annotations when they are read, and names may be missing
            copied.__annotate__ = annotate  # type: ignore[attr-defined]
        copied.__dict__ = function.__dict__  # shared
        return copied

    def _cell_of(self, cell: CellType) -> CellType:
        """Return a cell with the copy of a variable's value, or the same cell if there is none."""
        content = read_cell(cell)
        copied = self.copy_of(content)
        if copied is content:
            return cell
        return self.cells.setdefault(id(cell), CellType(copied))
