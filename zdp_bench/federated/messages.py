"""What travels between server and nodes: numbers and words by name, and tensors without loss."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zdp_bench.federated.flower import Array, ArrayRecord, ConfigRecord, Message, RecordDict

VALUES, ARRAYS = "values", "arrays"


def content(values: Mapping[str, int | float | str | bool], tensors: Mapping[str, Tensor] | None = None) -> RecordDict:
    """A message's content. Complex tensors travel as their real views [..., 2], which is what Flower's own parts can handle."""
    record = RecordDict({VALUES: ConfigRecord(dict(values))})
    if tensors is not None:
        record[ARRAYS] = ArrayRecord({name: Array(_real(value)) for name, value in tensors.items()})
    return record


def values_of(message: Message) -> dict[str, Any]:
    """The numbers and words of a message."""
    return dict(message.content.config_records[VALUES])


def tensors_of(message: Message, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a message, each in the shape, dtype and place of the one of that name in `like`.

    Raises:
        ValueError: names, shapes or dtypes are not those of `like`.
    """
    arrays: Mapping[str, Array] = message.content.array_records.get(ARRAYS, {})
    if list(arrays) != list(like):
        raise ValueError(f"{len(arrays)} tensors where {len(like)} of the model's were expected")
    return {name: _like(name, array.numpy(), like[name]) for name, array in arrays.items()}


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of tensors, bit for bit, in their order."""
    chain = hashlib.sha256()
    for name, value in tensors.items():
        chain.update(name.encode())
        chain.update(np.ascontiguousarray(_real(value)).data)
    return chain.hexdigest()


def _real(value: Tensor) -> np.ndarray:
    value = value.detach().cpu().resolve_conj()
    return (torch.view_as_real(value) if value.is_complex() else value).numpy()


def _like(name: str, array: np.ndarray, like: Tensor) -> Tensor:
    wanted = torch.view_as_real(like.detach().resolve_conj()) if like.is_complex() else like
    value = torch.from_numpy(array if array.flags.writeable else array.copy())
    if value.shape != wanted.shape or value.dtype != wanted.dtype:
        raise ValueError(f"'{name}' is {value.dtype} {list(value.shape)} where {wanted.dtype} {list(wanted.shape)} was expected")
    return (torch.view_as_complex(value) if like.is_complex() else value).to(like.device)
