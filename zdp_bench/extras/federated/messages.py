"""Pack numbers, strings and tensors into messages between server and nodes, without loss.

All tensors of a precision are concatenated into one array, complex tensors as their real views; the
layout lists their names, dtypes and shapes in order. A message therefore has few arrays, whatever
the model: Flower sends each array as a request of its own. Flower has no complex arrays.
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

from zdp_bench.privacy.noise import real_view

VALUES, ARRAYS, LAYOUT = "values", "arrays", "layout"
SECRET = "secret"  # name of the value of a request that its answer has to repeat
MAX_COUNT = 10**9  # largest valid number of examples, steps or rounds
MAX_ROUNDS = 1_000_000  # a server that requests more would only keep a node busy
MAX_LENGTH = 256  # of a string from a node, in characters
MAX_HEADER = 4096  # bytes of a serialised array beyond its numbers


class Malformed(ValueError):  # noqa: N818 - what a node sends, not a fault of ours
    """A malformed message; its text completes a sentence such as 'node 1: its answer ...'."""


def content(
    values: Mapping[str, int | float | str | bool], tensors: Mapping[str, Tensor] | None = None
) -> RecordDict:
    """Return the content of a message with these values and tensors."""
    if tensors is None:
        return RecordDict({VALUES: ConfigRecord(dict(values))})
    flat_arrays: dict[str, list[np.ndarray]] = {}  # by dtype
    for value in tensors.values():
        flat = _real(value).reshape(-1)
        flat_arrays.setdefault(str(flat.dtype), []).append(flat)
    arrays = {dtype: Array(np.concatenate(flats)) for dtype, flats in flat_arrays.items()}
    return RecordDict(
        {
            VALUES: ConfigRecord({**values, LAYOUT: layout(tensors)}),
            ARRAYS: ArrayRecord(arrays),
        }
    )


def values_of(message: Message) -> dict[str, Any]:
    """Return the numbers and strings in a message, including the layout of its tensors."""
    return dict(message.content.config_records.get(VALUES) or {})


def checked_values(message: Message, kinds: Mapping[str, type[Any]]) -> dict[str, Any]:
    """Return the named values of a message, after a check of their types and ranges.

    Args:
        message: the message of a node.
        kinds: the type of each required value. An int is a count from 0 to `MAX_COUNT`; a str is
            printable, with at most `MAX_LENGTH` characters.

    Raises:
        Malformed: a value is missing or invalid.
    """
    values = values_of(message)
    checked: dict[str, Any] = {}
    for name, kind in kinds.items():
        if name not in values:
            raise Malformed(f"has no {name}")
        value: Any = values[name]
        if type(value) is not kind:
            raise Malformed(f"has {name} of type {type(value).__name__}")
        if kind is int and not 0 <= value <= MAX_COUNT:
            raise Malformed(f"has {name}={value}, which is not from 0 to {MAX_COUNT:,}")
        if kind is str and (len(value) > MAX_LENGTH or not value.isprintable()):
            raise Malformed(f"has a {name} that is not a short printable string")
        checked[name] = value
    return checked


def tensors_of(message: Message, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a message's tensors, each with the shape, dtype and device of its parameter.

    Raises:
        Malformed: the message does not have exactly the tensors of `parameters`.
    """
    sent_layout = str(values_of(message).get(LAYOUT, "")).split("; ")
    expected_layout = layout(parameters).split("; ")
    for sent, expected in zip_longest(sent_layout, expected_layout, fillvalue="nothing"):
        if sent != expected:
            raise Malformed(
                f"does not fit the model: {sent[:MAX_LENGTH]!r} where {expected!r} was expected"
            )
    counts = Counter[str]()
    for value in parameters.values():
        counts[_precision(value)] += math.prod(_real_shape(value))
    arrays: dict[str, Array] = dict(message.content.array_records.get(ARRAYS) or {})
    if set(arrays) != set(counts):
        raise Malformed(
            "does not fit the model: its numbers are not of the precisions in its layout"
        )
    numbers = {dtype: _read_numbers(arrays[dtype], dtype, count) for dtype, count in counts.items()}
    return dict(_split(numbers, parameters))


def _read_numbers(
    array: Array,
    dtype: str,
    count: int,
) -> np.ndarray:
    """Return the `count` numbers of an array; a size that a node states is not trusted."""
    size = count * np.dtype(dtype).itemsize
    if size <= len(array.data) <= size + MAX_HEADER:
        try:
            numbers = array.numpy()
        except Exception as error:  # untrusted bytes: NumPy may raise anything
            raise Malformed(f"cannot be read: {type(error).__name__}") from None
        fits = isinstance(numbers, np.ndarray) and numbers.shape == (count,)
        if fits and str(numbers.dtype) == dtype:
            return numbers
    raise Malformed("does not fit the model: its numbers do not match its layout")


def layout(tensors: Mapping[str, Tensor]) -> str:
    """Return the names, dtypes and shapes of tensors, in order, as one line."""
    items = []
    for name, value in tensors.items():
        dtype = str(value.dtype).removeprefix("torch.")
        items.append(f"{name} {dtype} {list(value.shape)}")
    return "; ".join(items)


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 digest of the layout and the bits of tensors."""
    chain = hashlib.sha256(layout(tensors).encode())
    for value in tensors.values():
        chain.update(np.ascontiguousarray(_real(value)).data)
    return chain.hexdigest()


def _precision(value: Tensor) -> str:
    """Return the name of a tensor's dtype; for a complex tensor, that of its real part."""
    return str(value.real.dtype).removeprefix("torch.")


def _real_shape(value: Tensor) -> tuple[int, ...]:
    """Return the shape of a tensor's real view."""
    return (*value.shape, 2) if value.is_complex() else tuple(value.shape)


def _real(value: Tensor) -> np.ndarray:
    return real_view(value.detach().cpu().resolve_conj()).numpy()


def _split(
    arrays: Mapping[str, np.ndarray],
    parameters: Mapping[str, Tensor],
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and tensor of each parameter, split from the concatenated arrays."""
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
