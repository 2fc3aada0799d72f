"""Functions of a model, such as its hooks, that refer to the model itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from functools import partial, update_wrapper
from types import CellType, FunctionType, ModuleType
from typing import Any

from torch import nn

from zdp_bench.gradients.outside_state.content import read_cell
from zdp_bench.gradients.program.ours import HOOKS


class OwnFunctions:
    """Copies of a model's functions, for a deep copy of the model.

    `copy.deepcopy` shares functions with the original, so that a hook of a copy would write into
    the original. A function is copied if a variable of its closure or a default value is a part of
    the model, or another such function. All others stay what they are, so that a forward function
    can compare its activation with `F.relu`. A copied function has its own cell for each such
    variable. Other variables are shared.

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
        own = _find_own(functions, parts)
        for key, function in own.items():
            self.copies[key] = self._copy(function, parts | own.keys())

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
        update_wrapper(copied, function)
        copied.__kwdefaults__ = function.__kwdefaults__
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
    """Return True if a deep copy of a model has a copy of this part of it."""
    if isinstance(part, FunctionType | type | ModuleType):
        return False
    return isinstance(part, list | dict | set | deque) or hasattr(part, "__dict__")


def _find_own(
    functions: dict[int, FunctionType],
    parts: set[int],
) -> dict[int, FunctionType]:
    """Return the functions that refer to a part of the model, or to another that does."""
    own: dict[int, FunctionType] = {}
    num_before = -1
    while len(own) > num_before:
        num_before = len(own)
        for key, function in functions.items():
            variables = map(read_cell, function.__closure__ or ())
            defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
            if any(id(value) in parts or id(value) in own for value in (*variables, *defaults)):
                own[key] = function
    return own


def _collect(values: Iterable[Any], functions: dict[int, FunctionType]) -> None:
    """Add the functions among the values, also those in closures of others."""
    for value in values:
        function = value.func if isinstance(value, partial) else value
        if not isinstance(function, FunctionType) or id(function) in functions:
            continue
        functions[id(function)] = function
        _collect(map(read_cell, function.__closure__ or ()), functions)
