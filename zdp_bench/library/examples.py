"""Batches from any torch Dataset with a length, and the owners of its examples."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate

from zdp_bench.data.owner_names import require_named
from zdp_bench.errors import UserError, first_line, require
from zdp_bench.gradients import Batch
from zdp_bench.gradients.parts import leaves_of, map_leaves, pack, unpack
from zdp_bench.training.checkpoint import state_digest
from zdp_bench.training.plan import Patients

Unit = Sequence[Any] | Callable[[int], Any]  # each example's owner
DIGESTED = 256  # examples at once


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
        items = [self.dataset[int(index)] for index in indices]
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

    def like(self) -> Batch:
        """Return a batch without an example, of the first and the last item's shapes and dtypes."""
        both = self.batch([0, len(self) - 1])
        inputs, targets = (map_leaves(lambda leaf: leaf[:0], part) for part in both)
        return inputs, targets

    def describe(self) -> str:
        """Return the dtype and shape of a batch of inputs: 'float32 [n, 3, 32, 32]'."""
        leaves = leaves_of(self.like()[0])
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


def find_owners(unit: Unit | None, examples: int, max_examples: int | None) -> Patients | None:
    """Return the examples of each owner; None if an example is its own unit.

    Args:
        unit: each example's owner: a column, [n], or a function of the example's index. Owners are
            strings, numbers, or tuples of them, which do not compare by identity.
    """
    if unit is None:
        rule = "applies to unit= only; add that, or remove it"
        require(max_examples is None, "max_examples", max_examples, rule)
        return None
    if isinstance(unit, str | Mapping) or not (callable(unit) or hasattr(unit, "__len__")):
        raise UserError(
            f"unit={unit!r}: give the owner of each example, as a column of {examples:,} owners or "
            "as a function of an example's index."
        )
    column = [unit(index) for index in range(examples)] if callable(unit) else list(unit)
    if len(column) != examples:
        raise UserError(
            f"unit: it names the owners of {len(column):,} examples, and the dataset has "
            f"{examples:,}."
        )
    numbers: dict[tuple[Any, ...], int] = {}
    owners = [
        numbers.setdefault(_comparable(owner, index), len(numbers))
        for index, owner in enumerate(column)
    ]
    kinds = sorted({" and ".join(type(part).__name__ for part in owner) for owner in numbers})
    if len(kinds) > 1:
        raise UserError(
            f"unit: owners are of several types ({', '.join(kinds)}), and one that is written as "
            "both would count as two: make all strings, or all whole numbers."
        )
    for parts in zip(*numbers, strict=True):
        texts = [p.decode(errors="replace") if isinstance(p, bytes) else p for p in parts]
        require_named("unit", "owner", (texts[number] for number in owners))
    return Patients.of(np.array(owners), max_examples)


def owners_digest(owners: Patients | None) -> str:
    """Return the SHA-256 of who owns what; empty without owners."""
    if owners is None:
        return ""
    return hashlib.sha256(owners.examples.tobytes() + owners.starts.tobytes()).hexdigest()


def _comparable(owner: Any, index: int) -> tuple[Any, ...]:
    """Return the parts of an owner that equals itself in another example."""
    if hasattr(owner, "item"):  # a number of torch's or numpy's
        owner = owner.item()
    parts = owner if isinstance(owner, tuple) else (owner,)
    for part in parts:
        if not isinstance(part, str | bytes | int | float) or part != part:  # NaN
            raise UserError(
                f"unit: the owner of example {index:,} is {owner!r}, which is missing or cannot be "
                "compared: give strings or numbers, one for every example."
            )
    return parts
