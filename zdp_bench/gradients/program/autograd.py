"""The graph that autograd has recorded for a tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
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


def find_sources(tensor: Tensor, sources: Mapping[str, Tensor]) -> set[str]:
    """Return the names of the tensors that a tensor depends on in autograd's graph."""
    if not sources or not tensor.requires_grad:
        return set()
    gradients = torch.autograd.grad(
        tensor, [*sources.values()], torch.ones_like(tensor), retain_graph=True, allow_unused=True
    )
    pairs = zip(sources, gradients, strict=True)
    return {name for name, gradient in pairs if gradient is not None}
