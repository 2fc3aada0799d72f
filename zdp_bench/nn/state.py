"""A digest of a module's state, by which two states are compared."""

from __future__ import annotations

import hashlib
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor


def state_digest(*states: dict[str, Any]) -> str:
    """Return the SHA-256 of state dictionaries. It covers every bit, but not the devices."""
    chain = hashlib.sha256()

    def take(node: Any) -> None:
        if isinstance(node, Tensor) and (parts := _parts_of(node)):
            chain.update(f"{node.layout}{node.dtype}".encode())
            take(parts)
        elif isinstance(node, Tensor):
            value = node.detach().cpu().resolve_conj().resolve_neg().contiguous()
            chain.update(f"{value.dtype}{list(value.shape)}".encode())
            numbers = value.as_strided([value.numel()], [1])  # a stride of size 1 may be another
            chain.update(numbers.view(torch.uint8).numpy().data)
        elif isinstance(node, dict):
            for key in sorted(node, key=str):
                chain.update(f"{key!r}:".encode())
                take(node[key])
        elif isinstance(node, list | tuple | deque):
            for entry in node:
                take(entry)
        elif isinstance(node, np.ndarray):  # its text has eight digits, and not every number
            chain.update(f"{node.dtype.str}{node.shape}".encode())
            take(node.tolist() if node.dtype.hasobject else node.tobytes())
        else:
            chain.update(repr(node).encode())
        chain.update(b";")

    for state in states:
        take(state)
    return chain.hexdigest()


def _parts_of(tensor: Tensor) -> list[Tensor]:
    """Return the ordinary tensors that hold a sparse, quantized or nested tensor; else none."""
    if tensor.is_nested:
        return [*tensor.unbind()]
    if tensor.is_quantized:
        return [tensor.int_repr(), tensor.dequantize()]
    if tensor.layout == torch.strided:
        return []
    entries = tensor.detach().to_sparse_coo().coalesce()
    return [torch.tensor(tensor.shape), entries.indices(), entries.values()]
