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
        if isinstance(node, Tensor):
            value = node.detach().cpu().resolve_conj().contiguous()
            chain.update(f"{value.dtype}{list(value.shape)}".encode())
            chain.update(value.flatten().view(torch.uint8).numpy().data)
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
