"""Pack numbers, words and tensors into messages between server and nodes, without loss.

Tensors go as one array per precision, complex ones as their real views, with a layout that says
which is where. So a message has a handful of pieces whatever the model (over the network, each
piece is a request), and Flower, which knows no complex numbers, can handle it.
"""

from __future__ import annotations

import hashlib
import math
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
        {VALUES: ConfigRecord({**values, LAYOUT: layout(tensors)}), ARRAYS: ArrayRecord(arrays)}
    )


def values_of(message: Message) -> dict[str, Any]:
    """Return the numbers and words of a message, and its tensors' layout."""
    return dict(message.content.config_records.get(VALUES) or {})


def checked_values(message: Message, kinds: Mapping[str, type[Any]]) -> dict[str, Any]:
    """Return the values named in `kinds`: counts from 0 to `MOST`, short printable words."""
    there, found = values_of(message), dict[str, Any]()
    for name, kind in kinds.items():
        if name not in there:
            raise Malformed(f"has no {name}")
        value: Any = there[name]
        if type(value) is not kind:
            raise Malformed(f"has {name} of type {type(value).__name__}")
        if kind is int and not 0 <= value <= MOST:
            raise Malformed(f"has {name}={value}, which is no count")
        if kind is str and (len(value) > LONGEST or not value.isprintable()):
            raise Malformed(f"has {name} that is no word")
        found[name] = value
    return found


def tensors_of(message: Message, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a message's tensors, each with shape, dtype and device of its namesake in `like`."""
    there = str(values_of(message).get(LAYOUT, "")).split("; ")
    wanted = layout(like).split("; ")
    for one, other in zip_longest(there, wanted, fillvalue="nothing"):
        if one != other:
            raise Malformed(
                f"does not fit the model: {one[:LONGEST]!r} where {other!r} was expected"
            )
    counts: dict[str, int] = {}
    for value in like.values():
        dtype = _precision(value)
        counts[dtype] = counts.get(dtype, 0) + value.numel() * (2 if value.is_complex() else 1)
    arrays: dict[str, Array] = dict(message.content.array_records.get(ARRAYS) or {})
    if set(arrays) != set(counts):
        raise Malformed(
            "does not fit the model: its numbers are of other precisions than its layout says"
        )
    whole = {dtype: _numbers(arrays[dtype], dtype, count) for dtype, count in counts.items()}
    return dict(_cut(whole, like))


def _numbers(array: Array, dtype: str, count: int) -> np.ndarray:
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
    return "; ".join(
        f"{name} {str(t.dtype).removeprefix('torch.')} {list(t.shape)}"
        for name, t in tensors.items()
    )


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of tensors, bit for bit, in their order."""
    chain = hashlib.sha256(layout(tensors).encode())
    for value in tensors.values():
        chain.update(np.ascontiguousarray(_real(value)).data)
    return chain.hexdigest()


def _precision(value: Tensor) -> str:
    return str(value.dtype.to_real() if value.is_complex() else value.dtype).removeprefix("torch.")


def _real(value: Tensor) -> np.ndarray:
    value = value.detach().cpu().resolve_conj()
    return (torch.view_as_real(value) if value.is_complex() else value).numpy()


def _cut(
    whole: Mapping[str, np.ndarray], like: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor), cut from the arrays they were concatenated into."""
    start = dict.fromkeys(whole, 0)
    for name, model in like.items():
        dtype, parts = _precision(model), (2,) if model.is_complex() else ()
        shape, first = (*model.shape, *parts), start[dtype]
        start[dtype] += math.prod(shape)
        piece = torch.from_numpy(whole[dtype][first : start[dtype]].copy()).view(shape)
        yield name, (torch.view_as_complex(piece) if parts else piece).to(model.device)
