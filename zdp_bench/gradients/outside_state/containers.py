"""What lists, dictionaries and other containers hold."""

from __future__ import annotations

from array import array
from collections import OrderedDict, defaultdict, deque
from typing import Any

from zdp_bench.gradients.outside_state.content import (
    MISSING,
    Content,
    Slot,
    are_same,
    class_and_attributes_of,
    content_of,
)

_FACTORY: Any = vars(defaultdict)["default_factory"]


@content_of.register(tuple)
@content_of.register(frozenset)
def _(values: Any) -> Content:
    return Content([*values, *class_and_attributes_of(values)])


@content_of.register(list)
@content_of.register(deque)
def _(values: Any) -> Content:
    kind: Any = list if isinstance(values, list) else deque  # whose methods no subclass overrides
    items = [*kind.__iter__(values)]

    def restore() -> bool:
        if are_same([*kind.__iter__(values)], items):
            return False
        kind.clear(values)
        kind.extend(values, items)
        return True

    return Content([*items, *class_and_attributes_of(values)], restore)


@content_of.register
def _(values: set) -> Content:
    items = set.copy(values)
    ids = set(map(id, items))

    def restore() -> bool:
        if ids == set(map(id, set.copy(values))):
            return False
        set.difference_update(values, [item for item in set.copy(values) if id(item) not in ids])
        set.update(values, items)
        return True

    return Content([*items, *class_and_attributes_of(values)], restore)


@content_of.register
def _(values: dict) -> Content:
    kind: Any = OrderedDict if isinstance(values, OrderedDict) else dict
    items = list(kind.items(values))
    keys = [key for key, _ in items]
    contents = [content for _, content in items]

    def restore() -> bool:
        has_same_keys = are_same(list(kind.keys(values)), keys)
        if has_same_keys and are_same(list(kind.values(values)), contents):
            return False
        # Only what differs is replaced: another thread may read the globals of a module meanwhile.
        for key in set(kind.keys(values)).difference(keys):
            kind.__delitem__(values, key)
        for key, content in items:
            if kind.get(values, key, MISSING) is not content:
                kind.__setitem__(values, key, content)
        if not are_same(list(kind.keys(values)), keys):  # in another order
            kind.clear(values)
            for key, content in items:
                kind.__setitem__(values, key, content)
        return True

    parts = [*keys, *contents, *class_and_attributes_of(values)]
    if isinstance(values, defaultdict):
        parts.append(Slot(values, _FACTORY))
    return Content(parts, restore)


@content_of.register(bytearray)
@content_of.register(array)
def _(values: Any) -> Content:
    numbers = values[:]

    def restore() -> bool:
        if bytes(values) == bytes(numbers):  # NaN equals NaN, and -0.0 is not 0.0
            return False
        values[:] = numbers
        return True

    return Content((), restore)
