"""Pack numbers, words and tensors into messages between server and nodes, without loss.

Tensors go as one array per precision, complex ones as their real views, with a layout that says
which is where. So a message has a handful of pieces whatever the model (over the network, each
piece is a request), and Flower, which knows no complex numbers, can handle it.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from torch import Tensor

VALUES, ARRAYS, LAYOUT = "values", "arrays", "layout"
MOST = 10**9  # of whatever a node counts: examples, steps, rounds
LONGEST = 256  # letters of a word from a node
HEADER = 4096  # bytes that an array may be longer than its numbers


class Malformed(ValueError):  # noqa: N818 - what a node sends, not a fault of ours
    """A malformed message; the text completes the sentence 'node 1: its answer ...'."""


def content(
    values: Mapping[str, int | float | str | bool], tensors: Mapping[str, Tensor] | None = None
) -> RecordDict:
    """Return a message's content."""
    if tensors is None:
        return RecordDict({VALUES: ConfigRecord(dict(values))})
    parts: dict[str, list[np.ndarray]] = {}
    for value in tensors.values():
        flat = _real(value).reshape(-1)
        parts.setdefault(str(flat.dtype), []).append(flat)
    arrays = {dtype: Array(np.concatenate(flats)) for dtype, flats in parts.items()}
    return RecordDict(
        {
            VALUES: ConfigRecord({**values, LAYOUT: layout(tensors)}),
            ARRAYS: ArrayRecord(arrays),
        }
    )


def values_of(message: Message) -> dict[str, Any]:
    """Return the numbers and words of a message, and its tensors' layout."""
    return dict(message.content.config_records.get(VALUES) or {})


def checked_values(message: Message, kinds: Mapping[str, type[Any]]) -> dict[str, Any]:
    """Return the values named in `kinds`: counts from 0 to `MOST`, short printable words."""
    values = values_of(message)
    checked: dict[str, Any] = {}
    for name, kind in kinds.items():
        if name not in values:
            raise Malformed(f"has no {name}")
        value: Any = values[name]
        if type(value) is not kind:
            raise Malformed(f"has {name} of type {type(value).__name__}")
        if kind is int and not 0 <= value <= MOST:
            raise Malformed(f"has {name}={value}, which is no count")
        if kind is str and (len(value) > LONGEST or not value.isprintable()):
            raise Malformed(f"has {name} that is no word")
        checked[name] = value
    return checked


def tensors_of(message: Message, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a message's tensors, each with shape, dtype and device of the parameter it is of."""
    sent = str(values_of(message).get(LAYOUT, "")).split("; ")
    expected = layout(parameters).split("; ")
    for item, other in zip_longest(sent, expected, fillvalue="nothing"):
        if item != other:
            raise Malformed(
                f"does not fit the model: {item[:LONGEST]!r} where {other!r} was expected"
            )
    counts = Counter[str]()
    for value in parameters.values():
        counts[_precision(value)] += math.prod(_real_shape(value))
    arrays: dict[str, Array] = dict(message.content.array_records.get(ARRAYS) or {})
    if set(arrays) != set(counts):
        raise Malformed(
            "does not fit the model: its numbers are of other precisions than its layout says"
        )
    whole = {dtype: _numbers(arrays[dtype], dtype, count) for dtype, count in counts.items()}
    return dict(_cut(whole, parameters))


def _numbers(
    array: Array,
    dtype: str,
    count: int,
) -> np.ndarray:
    """Read exactly `count` numbers: the size that a node states is not trusted."""
    size = count * np.dtype(dtype).itemsize
    if size <= len(array.data) <= size + HEADER:
        try:
            numbers = array.numpy()
        except Exception as error:  # bytes of a stranger: whatever numpy makes of them
            raise Malformed(f"cannot be read: {type(error).__name__}") from None
        fits = isinstance(numbers, np.ndarray) and numbers.shape == (count,)
        if fits and str(numbers.dtype) == dtype:
            return numbers
    raise Malformed("does not fit the model: its numbers are not as many as its layout says")


def layout(tensors: Mapping[str, Tensor]) -> str:
    """Return names, dtypes and shapes, in order, as one line."""
    items = []
    for name, value in tensors.items():
        dtype = str(value.dtype).removeprefix("torch.")
        items.append(f"{name} {dtype} {list(value.shape)}")
    return "; ".join(items)


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of tensors, bit for bit, in their order."""
    chain = hashlib.sha256(layout(tensors).encode())
    for value in tensors.values():
        chain.update(np.ascontiguousarray(_real(value)).data)
    return chain.hexdigest()


def _precision(value: Tensor) -> str:
    """Return the name of a tensor's dtype, or of its parts'."""
    return str(value.real.dtype).removeprefix("torch.")


def _real_shape(value: Tensor) -> tuple[int, ...]:
    """Return the shape of a tensor's real view."""
    return (*value.shape, 2) if value.is_complex() else tuple(value.shape)


def _real(value: Tensor) -> np.ndarray:
    value = value.detach().cpu().resolve_conj()
    if value.is_complex():
        value = torch.view_as_real(value)
    return value.numpy()


def _cut(
    arrays: Mapping[str, np.ndarray],
    parameters: Mapping[str, Tensor],
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor), cut from the arrays they were concatenated into."""
    starts = dict.fromkeys(arrays, 0)
    for name, parameter in parameters.items():
        dtype, shape = _precision(parameter), _real_shape(parameter)
        start = starts[dtype]
        starts[dtype] += math.prod(shape)
        flat = torch.from_numpy(arrays[dtype][start : starts[dtype]].copy())
        value = flat.view(shape)
        if parameter.is_complex():
            value = torch.view_as_complex(value)
        yield name, value.to(parameter.device)
