"""Functions of a model, such as its hooks, whose closures refer to the model itself."""

from __future__ import annotations

from functools import partial
from types import CellType, FunctionType
from typing import Any

from torch import nn

from zdp_bench.gradients.outside_state.content import are_same, read_cell
from zdp_bench.gradients.program.ours import HOOKS


def refer_to_copies(model: nn.Module, memo: dict[int, Any]) -> None:
    """Let the hooks and functions of a deep copy refer to the copy.

    `copy.deepcopy` shares functions with the original, so that a hook of a copy would write into
    the original. A function that refers to nothing copied stays the same, also to `is`.

    Args:
        model: the original.
        memo: the copies of it and its parts, by the id of the original, as `copy.deepcopy` leaves
            them.
    """
    functions = _Functions(memo)
    for module in model.modules():
        copied = memo.get(id(module), module)
        if copied is module:
            continue
        for holder in (vars(copied), *(vars(copied)[kind] for kind in HOOKS)):
            for name, value in [*holder.items()]:
                if isinstance(value, FunctionType | partial):
                    holder[name] = functions.copy_of(value)


class _Functions:
    """Copies of functions that refer to copied objects."""

    def __init__(self, memo: dict[int, Any]) -> None:
        self.memo = memo
        self.functions: dict[int, FunctionType] = {}  # by the id of the original
        self.cells: dict[int, CellType] = {}

    def copy_of(self, value: Any) -> Any:
        """Return the copy of a function or other object, or itself if there is none."""
        if isinstance(value, partial):
            function = self.copy_of(value.func)
            is_same = function is value.func
            return value if is_same else partial(function, *value.args, **value.keywords)
        if not isinstance(value, FunctionType):
            return self.memo.get(id(value), value)
        if id(value) not in self.functions:
            self.functions[id(value)] = value  # where it calls itself
            self.functions[id(value)] = self._copy(value)
        return self.functions[id(value)]

    def _copy(self, function: FunctionType) -> FunctionType:
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
