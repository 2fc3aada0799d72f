"""Batches from any torch Dataset with a length."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate

from zdp_bench.errors import UserError, first_line
from zdp_bench.gradients import Batch
from zdp_bench.gradients.parts import leaves_of, map_leaves, pack, unpack
from zdp_bench.training.checkpoint import state_digest

DIGESTED = 256  # examples at once
NUMBERS = (bool, int, float, complex, str, bytes, np.generic)


def _copy_item(item: Any) -> Any:
    """Return an item whose tensors and arrays have memory of their own."""
    if isinstance(item, Tensor):
        return item.clone()
    if isinstance(item, np.ndarray):
        return item.copy()
    if isinstance(item, dict):
        return {key: _copy_item(value) for key, value in item.items()}
    if type(item) in (tuple, list):
        return type(item)(_copy_item(value) for value in item)
    return item if isinstance(item, NUMBERS) else copy.deepcopy(item)


@dataclass(frozen=True)
class Items:
    """The examples of a map-style dataset, with items (input, target) by index.

    Either may be a tensor, a number, an array, or a tuple or dictionary of them.
    """

    dataset: Any

    def __post_init__(self) -> None:
        is_stream = isinstance(self.dataset, IterableDataset)
        has_items = hasattr(self.dataset, "__len__") and hasattr(self.dataset, "__getitem__")
        if is_stream or not has_items:
            raise UserError(
                f"dataset: {type(self.dataset).__name__} has no length or no items by index, so "
                "nothing can be drawn from it by Poisson sampling: give a map-style Dataset."
            )
        if len(self.dataset) == 0:
            raise UserError("dataset: it has no example.")

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, indices: Sequence[int] | np.ndarray) -> Batch:
        """Return the examples at `indices`, one at least: inputs [B, ...], targets [B, ...]."""
        # Copied at once, because a dataset may fill the same tensor with each item.
        items = [_copy_item(self.dataset[int(index)]) for index in indices]
        if not isinstance(items[0], tuple | list) or len(items[0]) != 2:
            raise UserError(
                f"dataset: an item is {type(items[0]).__name__}, where a pair (input, target) is "
                "needed; several inputs go into a tuple or a dictionary: ((a, b), target)."
            )
        try:
            inputs, targets = map(pack, default_collate(items))
        except (RuntimeError, TypeError) as error:
            raise UserError(
                f"dataset: its items do not make one batch: {first_line(error)} Give all of them "
                "one shape (pad them in the dataset) and tensors, numbers or arrays."
            ) from None
        for part in (inputs, targets):
            if strange := [leaf for leaf in leaves_of(part) if not isinstance(leaf, Tensor)]:
                raise UserError(
                    f"dataset: an item holds {strange[0]!r}, where tensors, numbers or arrays are "
                    "needed: give each class or word a number."
                )
        if len(items) > 1 and _dtypes((inputs, targets)) != self._own_dtypes:
            raise UserError(
                "dataset: its items do not make one batch: some have another dtype than the first. "
                "Convert them in the dataset."
            )
        return inputs, targets

    @cached_property
    def _own_dtypes(self) -> list[torch.dtype]:
        return _dtypes(self.batch([0]))

    def empty_batch(self) -> Batch:
        """Return a batch of no examples, of the first and last item's shapes and dtypes."""
        both = self.batch([0, len(self) - 1])
        inputs, targets = (map_leaves(lambda leaf: leaf[:0], part) for part in both)
        return inputs, targets

    def describe(self) -> str:
        """Return the dtype and shape of a batch of inputs: 'float32 [n, 3, 32, 32]'."""
        leaves = leaves_of(self.empty_batch()[0])
        parts = [f"{leaf.dtype} {['n', *leaf.shape[1:]]}" for leaf in leaves]
        return " and ".join(parts).replace("torch.", "").replace("'", "")

    def digest(self) -> str:
        """Return the SHA-256 of all examples in order; reads each of them once."""
        chain = hashlib.sha256()
        for start in range(0, len(self), DIGESTED):
            inputs, targets = self.batch(range(start, min(start + DIGESTED, len(self))))
            part = state_digest({"inputs": unpack(inputs), "targets": unpack(targets)})
            chain.update(part.encode())
        return chain.hexdigest()


def _dtypes(batch: Batch) -> list[torch.dtype]:
    return [leaf.dtype for part in batch for leaf in leaves_of(part)]
