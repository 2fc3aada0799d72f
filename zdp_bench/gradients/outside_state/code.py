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
    are_same,
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
    cache = _cache_of(function)
    misses, keys, values = function.cache_info().misses, [*cache], [*cache.values()]
    # With the results of a cache of limited size. Python would crash if the dictionary of one were
    # restored, because the cache points to its entries.
    referents = [part for part in gc.get_referents(function) if part is not cache]

    def clear() -> bool:
        nonlocal misses, keys, values
        # Both: a small cache may hold the same entries with other results, and misses may be as
        # many as before once it was cleared.
        has_same_misses = function.cache_info().misses == misses
        if not has_same_misses or not _holds(cache, keys, values):
            function.cache_clear()
            misses, keys, values = 0, [], []
        return False  # a smaller cache affects no result

    return Content([*referents, function.__dict__, *keys, *values], clear)


def _cache_of(function: Any) -> dict[Any, Any]:
    """Return the dictionary in which a cached function keeps its results."""
    dictionaries: list[dict[Any, Any]] = [
        part
        for part in gc.get_referents(function)
        if type(part) is dict and part is not function.__dict__
    ]
    return max(dictionaries, key=_count_entries)  # the others are results


def _count_entries(dictionary: dict[Any, Any]) -> int:
    """Return the number of entries of a cache of limited size, or 0 if it is something else."""
    are_entries = all(type(value).__name__ == "_lru_list_elem" for value in dictionary.values())
    return len(dictionary) if are_entries else 0


def _holds(cache: dict[Any, Any], keys: list[Any], values: list[Any]) -> bool:
    return are_same([*cache], keys) and are_same([*cache.values()], values)
