"""The graph that autograd has recorded for a tensor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor


def graph_nodes(tensor: Tensor) -> Iterator[Any]:
    """Yield each node of autograd's graph that leads to a tensor, once."""
    seen = set()
    pending: list[Any] = [tensor.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        pending += [input_node for input_node, _ in node.next_functions]
