"""The graph that autograd has recorded behind a tensor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor


def graph_nodes(tensor: Tensor) -> Iterator[Any]:
    """Yield each of autograd's nodes that a tensor was computed by, once."""
    seen = set()
    waiting: list[Any] = [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [earlier for earlier, _ in node.next_functions]
