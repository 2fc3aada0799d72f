"""Inputs of several tensors, for a model that takes more than one: `model(a, b)`, `model(ids=x)`.

Engines, checks and micro-batches cut a batch like one tensor; `Parts` has what they need of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node, tree_leaves, tree_map


class Parts:
    """Tensors [B, ...] in a tuple or a dictionary, nested or not, as one batch of B examples."""

    def __init__(self, tree: Any) -> None:
        self.tree = tree

    @property
    def leaves(self) -> list[Tensor]:
        if self._is_flat:
            return list(self.tree)
        return tree_leaves(self.tree)

    @property
    def _is_flat(self) -> bool:
        """True for a tuple of tensors, for which torch's own functions take ten times as long."""
        return type(self.tree) is tuple and all(isinstance(part, Tensor) for part in self.tree)

    def map(self, function: Callable[[Tensor], Tensor]) -> Parts:
        """Return the function's results in the same arrangement."""
        if self._is_flat:
            return Parts(tuple(map(function, self.tree)))
        return Parts(tree_map(function, self.tree))

    def __len__(self) -> int:
        return len(self.leaves[0])

    def __getitem__(self, index: Any) -> Parts:
        return self.map(lambda leaf: leaf[index])

    def __setitem__(self, index: Any, values: Parts) -> None:
        for leaf, value in zip(self.leaves, values.leaves, strict=True):
            leaf[index] = value

    @property
    def device(self) -> torch.device:
        return self.leaves[0].device

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves)

    def detach(self) -> Parts:
        return self.map(Tensor.detach)

    def clone(self) -> Parts:
        return self.map(Tensor.clone)

    def pin_memory(self) -> Parts:
        return self.map(Tensor.pin_memory)

    def to(
        self,
        *args: Any,
        **kwargs: Any,
    ) -> Parts:
        return self.map(lambda leaf: leaf.to(*args, **kwargs))

    def unsqueeze(self, dim: int) -> Parts:
        return self.map(lambda leaf: leaf.unsqueeze(dim))

    def split(self, size: int) -> list[Parts]:
        starts = range(0, len(self), size)
        return [self[start : start + size] for start in starts]

    def expand_as(self, other: Parts) -> Parts:
        leaves = iter(other.leaves)
        return self.map(lambda leaf: leaf.expand_as(next(leaves)))


# So that torch.func maps over the tensors inside.
register_pytree_node(Parts, lambda parts: ([parts.tree], None), lambda trees, _: Parts(*trees))


def pack(tree: Any) -> Tensor:
    """Return a tensor as it is, and `Parts` of anything else, which act as a tensor.

    Mappings become dictionaries and sequences tuples, at the top.
    """
    if isinstance(tree, Tensor | Parts):
        return cast(Tensor, tree)
    if isinstance(tree, Mapping):
        return cast(Tensor, Parts(dict(tree)))
    if isinstance(tree, Sequence):
        return cast(Tensor, Parts(tuple(tree)))
    return cast(Tensor, Parts(tree))


def unpack(packed: Any) -> Any:
    """Return what `pack` was given."""
    return packed.tree if isinstance(packed, Parts) else packed


def map_leaves(
    function: Callable[[Tensor], Tensor],
    packed: Tensor,
) -> Tensor:
    """Return the function of a tensor, or of each tensor in `Parts`."""
    if isinstance(packed, Parts):
        return cast(Tensor, packed.map(function))
    return function(packed)


def describe(packed: Tensor) -> str:
    """Return "float32 inputs of shape [8, 3]", for a sentence."""
    dtypes = [str(leaf.dtype).removeprefix("torch.") for leaf in leaves_of(packed)]
    return f"{' and '.join(dtypes)} inputs of shape {shapes(packed)}"


def shapes(packed: Tensor) -> str:
    """Return "[8, 3]", or the shapes of all leaves, for a sentence."""
    return " and ".join(str(list(leaf.shape)) for leaf in leaves_of(packed))


def leaves_of(packed: Tensor) -> list[Tensor]:
    return packed.leaves if isinstance(packed, Parts) else [packed]


@contextmanager
def takes_parts(model: nn.Module) -> Iterator[None]:
    """Have the model take `Parts` within: a tuple's entries in order, a dictionary's by name."""

    def arguments(
        _: nn.Module,
        args: Any,
        kwargs: dict[str, Any],
    ) -> Any:
        if len(args) != 1 or not isinstance(args[0], Parts):
            return None
        tree = args[0].tree
        if isinstance(tree, dict):
            return (), tree | kwargs
        return tree, kwargs

    handle = model.register_forward_pre_hook(arguments, with_kwargs=True, prepend=True)
    try:
        yield
    finally:
        handle.remove()
