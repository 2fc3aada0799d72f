"""Batches of several tensors, for a model that takes more than one: `model(a, b)`, `model(ids=x)`.

Engines, checks and micro-batches treat a batch as a single tensor. `Parts` provides the methods of
a tensor that they use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import (
    keystr,
    register_pytree_node,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_map_with_path,
)

from zdp_bench.nn import memory_format


class Parts:
    """A batch of B examples: tensors [B, ...] in a tuple or a dictionary, possibly nested.

    Methods are those of a tensor, applied to each of the tensors.
    """

    def __init__(self, tree: Any) -> None:
        self.tree = tree

    @property
    def leaves(self) -> list[Tensor]:
        """The tensors, in order."""
        if self._is_flat:
            return list(self.tree)
        return tree_leaves(self.tree)

    @property
    def by_path(self) -> dict[str, Tensor]:
        """The tensors by their path in the tree, such as "['ids']" or "[0]['mask']"."""
        pairs, _ = tree_flatten_with_path(self.tree)
        return {keystr(path): leaf for path, leaf in pairs}

    def arrange_as(self, other: Parts) -> Parts:
        """Return the same tensors, with the keys of dictionaries in the order of another batch."""
        by_path = self.by_path
        return Parts(tree_map_with_path(lambda path, _: by_path[keystr(path)], other.tree))

    @property
    def _is_flat(self) -> bool:
        """True for a tuple of tensors; for these, torch's tree functions take ten times as long."""
        return type(self.tree) is tuple and all(isinstance(part, Tensor) for part in self.tree)

    def map(self, function: Callable[[Tensor], Tensor]) -> Parts:
        """Return the function's results for the tensors, in the same structure."""
        if self._is_flat:
            return Parts(tuple(map(function, self.tree)))
        return Parts(tree_map(function, self.tree))

    def __len__(self) -> int:
        return len(self.leaves[0])

    def __getitem__(self, index: Any) -> Parts:
        return self.map(lambda leaf: leaf[index])

    def __setitem__(self, index: Any, values: Parts) -> None:
        values_by_path = values.by_path
        for path, leaf in self.by_path.items():
            leaf[index] = values_by_path[path]

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
        leaves = iter(other.arrange_as(self).leaves)
        return self.map(lambda leaf: leaf.expand_as(next(leaves)))


# Lets torch.func map over the tensors in `Parts`.
register_pytree_node(Parts, lambda parts: ([parts.tree], None), lambda trees, _: Parts(*trees))


def pack(tree: Any) -> Tensor:
    """Return a tensor unchanged, and `Parts` of anything else.

    At the top level, a mapping becomes a dictionary and a sequence a tuple. `Parts` are typed as a
    tensor, because they are used like one.
    """
    if isinstance(tree, Tensor | Parts):
        return cast(Tensor, tree)
    if isinstance(tree, Mapping):
        return cast(Tensor, Parts(dict(tree)))
    if isinstance(tree, Sequence):
        return cast(Tensor, Parts(tuple(tree)))
    return cast(Tensor, Parts(tree))


def unpack(packed: Any) -> Any:
    """Return the value that `pack` packed."""
    return packed.tree if isinstance(packed, Parts) else packed


def map_leaves(
    function: Callable[[Tensor], Tensor],
    packed: Tensor,
) -> Tensor:
    """Apply a function to a tensor, or to each tensor in `Parts`."""
    if isinstance(packed, Parts):
        return cast(Tensor, packed.map(function))
    return function(packed)


def describe(packed: Tensor) -> str:
    """Describe inputs for a message, such as "float32 inputs of shape [8, 3]"."""
    dtypes = [str(leaf.dtype).removeprefix("torch.") for leaf in leaves_of(packed)]
    return f"{' and '.join(dtypes)} inputs of shape {shapes(packed)}"


def advice_on_parts(packed: Tensor) -> str:
    """Return advice to add to an error about a list or tuple; empty for a single tensor."""
    entries = unpack(packed)
    if not isinstance(entries, tuple):
        return ""
    return (
        f" A list or tuple of {len(entries)} reaches a model as an argument for each entry, and a "
        "loss as a tuple: if it stands for one tensor, let the dataset return that."
    )


def shapes(packed: Tensor) -> str:
    """Return the shapes for a message, such as "[8, 3]" or "[8, 3] and [8]"."""
    return " and ".join(str(list(leaf.shape)) for leaf in leaves_of(packed))


def leaves_of(packed: Tensor) -> list[Tensor]:
    """Return the tensors of `Parts`, or a tensor in a list."""
    return packed.leaves if isinstance(packed, Parts) else [packed]


def leaves_by_path(packed: Tensor) -> dict[str, Tensor]:
    """Return the tensors of `Parts` by their path, or a tensor with an empty path."""
    return packed.by_path if isinstance(packed, Parts) else {"": packed}


def arrange_as(packed: Tensor, other: Tensor) -> Tensor:
    """Return a batch with the keys of its dictionaries in the order of another batch.

    The batches must have the same keys.
    """
    if isinstance(packed, Parts) and isinstance(other, Parts):
        return cast(Tensor, packed.arrange_as(other))
    return packed


def clone_contiguous(leaf: Tensor) -> Tensor:
    """Return a contiguous copy of a tensor."""
    return leaf.clone(memory_format=torch.contiguous_format)


def arrange_memory(packed: Tensor, other: Tensor) -> Tensor:
    """Return a batch whose tensors have the memory format of those of another batch.

    The batches must have the same structure, and may have different numbers of examples.
    """
    others = iter(leaves_of(other))

    def arrange(leaf: Tensor) -> Tensor:
        like = next(others)
        if like.is_contiguous():
            return leaf.contiguous()
        return memory_format.arrange_as(leaf, [0, *memory_format.memory_order(like)])

    return map_leaves(arrange, packed)


@contextmanager
def takes_parts(model: nn.Module) -> Iterator[None]:
    """Make the model accept `Parts` inside the context.

    It gets a tuple's entries as positional arguments and a dictionary's as keyword arguments.
    """

    def spread_arguments(
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

    handle = model.register_forward_pre_hook(spread_arguments, with_kwargs=True, prepend=True)
    try:
        yield
    finally:
        handle.remove()
