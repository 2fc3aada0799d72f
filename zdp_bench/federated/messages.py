"""What travels between server and nodes: numbers and words by name, and tensors without loss.

Tensors go as one array for each precision there is, complex ones as their real views, with a layout that says which is where.
So a message is a handful of pieces whatever the model (over the network, each piece is a request), and Flower's own parts, which
know no complex numbers, can handle it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zdp_bench.federated.flower import Array, ArrayRecord, ConfigRecord, Message, RecordDict

VALUES, ARRAYS, LAYOUT = "values", "arrays", "layout"


def content(values: Mapping[str, int | float | str | bool], tensors: Mapping[str, Tensor] | None = None) -> RecordDict:
    """A message's content."""
    if tensors is None:
        return RecordDict({VALUES: ConfigRecord(dict(values))})
    parts: dict[str, list[np.ndarray]] = {}
    for value in tensors.values():
        flat = _real(value).reshape(-1)
        parts.setdefault(str(flat.dtype), []).append(flat)
    arrays = {dtype: Array(np.concatenate(flats)) for dtype, flats in parts.items()}
    return RecordDict({VALUES: ConfigRecord({**values, LAYOUT: layout(tensors)}), ARRAYS: ArrayRecord(arrays)})


def values_of(message: Message) -> dict[str, Any]:
    """The numbers and words of a message."""
    return {name: value for name, value in message.content.config_records[VALUES].items() if name != LAYOUT}


def tensors_of(message: Message, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a message, each in the shape, dtype and place of the one of that name in `like`.

    Raises:
        ValueError: they are not those of `like`, or not all there.
    """
    there, wanted = str(message.content.config_records[VALUES].get(LAYOUT, "")).split("; "), layout(like).split("; ")
    for one, other in zip(there, wanted, strict=False):
        if one != other:
            raise ValueError(f"'{one}' where '{other}' was expected")
    if len(there) != len(wanted):
        raise ValueError(f"{len(there)} tensors where {len(wanted)} were expected")
    whole = {name: array.numpy() for name, array in message.content.array_records[ARRAYS].items()}
    counts: dict[str, int] = {}
    for value in like.values():
        dtype = _precision(value)
        counts[dtype] = counts.get(dtype, 0) + value.numel() * (2 if value.is_complex() else 1)
    if {name: array.size for name, array in whole.items() if str(array.dtype) == name and array.ndim == 1} != counts:
        raise ValueError("its numbers are not as many as its layout says")
    return dict(_cut(whole, like))


def layout(tensors: Mapping[str, Tensor]) -> str:
    """Names, dtypes and shapes, in order."""
    return "; ".join(f"{name} {str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for name, t in tensors.items())


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of tensors, bit for bit, in their order."""
    chain = hashlib.sha256(layout(tensors).encode())
    for value in tensors.values():
        chain.update(np.ascontiguousarray(_real(value)).data)
    return chain.hexdigest()


def _precision(value: Tensor) -> str:
    return str(value.dtype.to_real() if value.is_complex() else value.dtype).removeprefix("torch.")


def _real(value: Tensor) -> np.ndarray:
    value = value.detach().cpu().resolve_conj()
    return (torch.view_as_real(value) if value.is_complex() else value).numpy()


def _cut(whole: Mapping[str, np.ndarray], like: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors, out of the arrays that they were laid into one after the other."""
    start = dict.fromkeys(whole, 0)
    for name, model in like.items():
        dtype, parts = _precision(model), (2,) if model.is_complex() else ()
        shape = (*model.shape, *parts)
        count = math.prod(shape)
        piece = torch.from_numpy(whole[dtype][start[dtype] : start[dtype] + count].copy()).view(shape)
        start[dtype] += count
        yield name, (torch.view_as_complex(piece) if parts else piece).to(model.device)
