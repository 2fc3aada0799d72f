"""What functions hold: variables of closures, default values and the global variables they name."""

from __future__ import annotations

import gc
import re
import sys
import types
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from zdp_bench.gradients.outside_state.content import (
    MISSING,
    Content,
    content_of,
    is_library,
    read_cell,
)

RUNS_STRINGS = {"eval", "exec"}
NAME = re.compile(r"[^\W\d]\w*")


@content_of.register
def _(function: types.FunctionType) -> Content:
    parts = [
        *(function.__closure__ or ()),
        *(function.__defaults__ or ()),
        function.__kwdefaults__,
        function.__dict__,
    ]
    namespace = function.__globals__
    if not is_library(namespace.get("__name__")):
        names = _names_in(function.__code__)
        parts.append(_Variables(namespace, names))
        for name in names:  # a module may be imported in the function
            parts.append(sys.modules.get(name))
            parts.append(sys.modules.get(f"{namespace.get('__package__')}.{name}"))
    return Content(parts)


@lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> frozenset[str]:
    """Return the names of global variables and attributes in a function and in those within it.

    Strings are included, because the code may look a variable or module up by its name. So are
    the names within them if they may be code.
    """
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, str):
            names.add(constant)
            if not RUNS_STRINGS.isdisjoint(code.co_names):
                names.update(NAME.findall(constant))
        elif isinstance(constant, types.CodeType):
            names |= _names_in(constant)
    return frozenset(names)


@dataclass(frozen=True)
class _Variables:
    """The global variables that a function names."""

    namespace: dict[str, Any]
    names: frozenset[str]


@content_of.register
def _(variables: _Variables) -> Content:
    namespace = variables.namespace
    values = {name: namespace.get(name, MISSING) for name in variables.names}

    def restore() -> bool:
        changed = [name for name in values if namespace.get(name, MISSING) is not values[name]]
        for name in changed:
            if values[name] is MISSING:
                del namespace[name]
            else:
                namespace[name] = values[name]
        return bool(changed)

    return Content(values.values(), restore)


@content_of.register
def _(cell: types.CellType) -> Content:
    value = read_cell(cell)

    def restore() -> bool:
        if read_cell(cell) is value:
            return False
        if value is MISSING:
            del cell.cell_contents
        else:
            cell.cell_contents = value
        return True

    return Content([value], restore)


@content_of.register(type(lru_cache(len)))
def _(function: Any) -> Content:
    parts = [*_parts_of_cache(function), function.__dict__]
    entries = _ids_of_entries(function)

    def clear() -> bool:
        nonlocal entries
        if _ids_of_entries(function) != entries:  # misses may be as many as before, after a clear
            function.cache_clear()
            entries = _ids_of_entries(function)
        return False  # a smaller cache affects no result

    return Content(parts, clear)


def _ids_of_entries(function: Any) -> set[int]:
    return {id(part) for part in _parts_of_cache(function) if part is not function.__dict__}


def _parts_of_cache(function: Any) -> list[Any]:
    """Return the cached function and what its cache holds, but not the cache's own dictionary.

    A cache of limited size points to the entries of its dictionary, so Python would crash if that
    were cleared.
    """
    size = function.cache_info().currsize
    is_limited = function.cache_info().maxsize is not None
    parts = []
    for part in gc.get_referents(function):  # with the results of a cache of limited size
        is_own = type(part) is dict and part is not function.__dict__ and len(part) == size
        if is_own and (not is_limited or all(map(_is_entry, part.values()))):
            parts.extend([*part.keys(), *part.values()])
        else:
            parts.append(part)
    return parts


def _is_entry(value: Any) -> bool:
    return type(value).__name__ == "_lru_list_elem"
