"""Functions of a model, such as its hooks, whose closures refer to the model itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import partial
from types import CellType, FunctionType
from typing import Any

from torch import nn

from zdp_bench.gradients.outside_state.content import read_cell
from zdp_bench.gradients.program.ours import HOOKS


class OwnFunctions:
    """Copies of a model's functions, for a deep copy of the model.

    `copy.deepcopy` shares functions with the original, so that a hook of a copy would write into
    the original. A copied function has its own cell for each variable that holds a part of the
    model, or another copied function. Other variables are shared.

    Attributes:
        copies: the copied functions, by the id of the original.
    """

    def __init__(self, model: nn.Module) -> None:
        self.copies: dict[int, FunctionType] = {}
        self._cells: dict[int, tuple[CellType, Any]] = {}  # by the id of the original cell
        functions: dict[int, FunctionType] = {}
        parts: set[int] = set()
        for module in model.modules():
            attributes = vars(module)
            parts.update(id(part) for part in (module, *attributes.values()) if _can_change(part))
            _collect(attributes.values(), functions)
            for kind in HOOKS:
                _collect(attributes[kind].values(), functions)
        for key, function in functions.items():
            self.copies[key] = self._copy(function, parts | functions.keys())

    def _copy(self, function: FunctionType, parts: set[int]) -> FunctionType:
        closure = []
        for cell in function.__closure__ or ():
            content = read_cell(cell)
            if id(content) in parts:
                cell, _ = self._cells.setdefault(id(cell), (CellType(), content))
            closure.append(cell)
        copied = FunctionType(
            function.__code__,
            function.__globals__,
            function.__name__,
            function.__defaults__,
            tuple(closure),
        )
        copied.__kwdefaults__ = function.__kwdefaults__
        copied.__module__ = function.__module__
        copied.__qualname__ = function.__qualname__
        copied.__dict__ = function.__dict__  # shared
        return copied

    def refer_to(self, memo: dict[int, Any]) -> None:
        """Let the functions refer to the copies of the model's parts, by the id of the original."""
        for cell, content in self._cells.values():
            cell.cell_contents = memo.get(id(content), content)
        for function in self.copies.values():
            defaults = function.__defaults__ or ()
            function.__defaults__ = tuple(memo.get(id(value), value) for value in defaults)
            keywords = function.__kwdefaults__ or {}
            function.__kwdefaults__ = {
                name: memo.get(id(value), value) for name, value in keywords.items()
            }


def _can_change(part: Any) -> bool:
    return isinstance(part, list | dict | set | deque) or hasattr(part, "__dict__")


def _collect(values: Iterable[Any], functions: dict[int, FunctionType]) -> None:
    """Add the functions with a closure or default values, also those within others."""
    for value in values:
        function = value.func if isinstance(value, partial) else value
        if not isinstance(function, FunctionType) or id(function) in functions:
            continue
        functions[id(function)] = function
        _collect(map(read_cell, function.__closure__ or ()), functions)
