"""`Items`: batches of the examples in any map-style dataset.

Clipping bounds what an example does through its own gradient, not what it does to other items. If
an item depends on those read before it, one example can change all later ones. Such state may be
anywhere, so `require_independent` reads items twice, after different ones.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import math
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from zdp_bench.errors import UserError, first_line
from zdp_bench.gradients import Batch
from zdp_bench.gradients.losses import are_alike, preserve_random_state, set_seed
from zdp_bench.gradients.parts import leaves_of, map_leaves, pack, unpack
from zdp_bench.nn.state import state_digest

DIGEST_BATCH = 256  # number of examples that are hashed at once
# Number of items that are read twice: at least, at most, and no more after this time.
MIN_REREAD = 8
MAX_REREAD = 1000
REREAD_SECONDS = 2.0
MAX_ENTRIES = 1000  # of a list in a dataset, such as the datasets of a ConcatDataset
DICTIONARIES = (dict, OrderedDict, defaultdict)  # a user's own kind may not be copied
IMMUTABLE = (bool, int, float, complex, str, bytes, np.generic)
MAX_INTEGER = 2**63 - 1  # of a tensor of int64
DTYPES = {  # those with which torch computes; it only stores others, such as float8
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
}


def _copy_item(item: Any) -> Any:
    """Return a copy of an item that shares no memory with it, in types that torch can batch."""
    if isinstance(item, Tensor):
        return item.clone()
    if isinstance(item, np.ndarray):
        return item.astype(item.dtype.newbyteorder("="))  # files may have another byte order
    if isinstance(item, complex):
        return np.complex128(item)
    if isinstance(item, int) and not -MAX_INTEGER - 1 <= item <= MAX_INTEGER:
        raise UserError(
            "dataset: an item contains an integer that does not fit in 64 bits: number classes "
            "from 0, and convert quantities to floats."
        )
    if isinstance(item, dict):
        return {key: _copy_item(value) for key, value in item.items()}
    if type(item) in (tuple, list):
        return type(item)(_copy_item(value) for value in item)
    return item if isinstance(item, IMMUTABLE) else copy.deepcopy(item)


def _keys_of(part: Any) -> Any:
    """Return the keys of all dictionaries in a part of an item, in order, nested as they are."""
    if isinstance(part, Tensor):  # most parts are; for them, the next line would be slow
        return None
    if isinstance(part, Mapping):
        return [(key, _keys_of(value)) for key, value in part.items()]
    if isinstance(part, tuple | list):
        return [_keys_of(value) for value in part]
    return None


@dataclass(frozen=True)
class Items:
    """The examples of a map-style dataset.

    Attributes:
        dataset: Dataset with a length, whose items are (input, target). Both may be a tensor, a
            number, an array, or a tuple or dictionary of these.
    """

    dataset: Any

    def __len__(self) -> int:
        return len(self.dataset)

    def batch(self, indices: Sequence[int] | np.ndarray) -> Batch:
        """Return the examples at the given indices.

        Args:
            indices: Indices of the examples, at least one.

        Returns:
            Inputs [B, ...] and targets [B, ...]. If an item has several inputs, they are packed
            into one object (`gradients.parts`).

        Raises:
            UserError: An item is not a pair, or the items do not form a batch of tensors.
        """
        rows = _rows_of_tensors(self.dataset, indices)
        if rows is not None:
            return rows
        self._seed_transforms()
        # Copy each item before the next is read, because a dataset may reuse one tensor for all.
        items = [_copy_item(self.dataset[int(index)]) for index in indices]
        if not isinstance(items[0], tuple | list) or len(items[0]) != 2:
            is_tuple = isinstance(items[0], tuple | list)
            length = f" and length {len(items[0])}" if is_tuple else ""
            raise UserError(
                f"dataset: an item is of type {type(items[0]).__name__}{length}, but a pair "
                "(input, target) is needed. Several inputs go into a tuple or dictionary, such as "
                "((a, b), target)."
            )
        # `default_collate` would drop some keys, and order them as in the first item of the batch.
        if any(_keys_of(item) != self._first_keys for item in items):
            raise UserError(
                "dataset: its items do not form a batch: some have other keys, keys in another "
                "order, or more or fewer parts, than the first. Give every item the same."
            )
        try:
            inputs, targets = map(pack, default_collate(items))
        except (RuntimeError, TypeError, ValueError) as error:
            raise UserError(
                f"dataset: its items do not form a batch: {first_line(error)} All items must have "
                "the same shape (pad them in the dataset) and contain tensors, numbers or arrays."
            ) from None
        for leaf in [*leaves_of(inputs), *leaves_of(targets)]:
            if not isinstance(leaf, Tensor):
                raise UserError(
                    f"dataset: an item contains {leaf!r}, which is not a tensor, number or array: "
                    "encode classes and words as numbers."
                )
            if leaf.dtype not in DTYPES:
                raise UserError(
                    f"dataset: an item contains a tensor of {leaf.dtype}, with which torch does "
                    "not compute: convert it in the dataset, such as to float32."
                )
        if len(items) > 1 and _dtypes((inputs, targets)) != self._first_dtypes:
            raise UserError(
                "dataset: its items do not form a batch: some have a different dtype from the "
                "first. Convert them in the dataset."
            )
        return inputs, targets

    def _seed_transforms(self) -> None:
        """Seed random transforms that have generators of their own, from torch's."""
        for seed in self._seed_functions:
            seed(seed=int(torch.randint(2**32, ())))

    @cached_property
    def _seed_functions(self) -> list[Callable[..., Any]]:
        """The methods that seed random transforms, in the dataset and in datasets inside it."""
        methods = []
        for dataset in _datasets_in(self.dataset):
            attributes = getattr(dataset, "__dict__", {}).values()
            for entry in [dataset, *chain.from_iterable(map(_entries_of, attributes))]:
                method = _seed_function(entry)
                if method is not None:
                    methods.append(method)
        return methods

    @cached_property
    def _first_keys(self) -> Any:
        """The keys of the first item."""
        return _keys_of(self.dataset[0])

    @cached_property
    def _first_dtypes(self) -> list[torch.dtype]:
        """The dtypes of the first item."""
        return _dtypes(self.batch([0]))

    def empty_batch(self) -> Batch:
        """Return a batch of zero examples with the shapes and dtypes of the items."""
        # Reading the last item too detects a dataset whose items differ.
        first_and_last = self.batch([0, len(self) - 1])
        inputs, targets = (map_leaves(lambda leaf: leaf[:0], part) for part in first_and_last)
        return inputs, targets

    def require_independent(self) -> None:
        """Reject a dataset in which an item depends on those that were read before it.

        Of up to 1,000 items, spread over the dataset, each is read twice, after different items, at
        varying distances and with the same seed of the global random generators. Slow items are
        read for up to 2 seconds, but at least 8 of them. If a dictionary of the dataset has other
        keys afterwards, it may be a cache, and these items are read once more without its new
        entries, in reverse. This does not detect items that are computed from other items, or other
        caches of such items.

        Raises:
            UserError: An item differed when it was read again.
        """
        order = _spread(len(self), MAX_REREAD)
        caches = _find_caches(self.dataset)
        end = time.monotonic() + REREAD_SECONDS
        with preserve_random_state():
            first_read = self._read_seeded(order[0])
            for count, (index, other) in enumerate(pairwise([*order, order[0]]), start=1):
                other_read = self._read_seeded(other)
                if count % 4 == 0:  # a change at every third read shows at another distance
                    self._read_seeded(order[0])
                if not _are_same(first_read, self._read_seeded(index)):
                    raise UserError(
                        f"dataset: item {index:,} differs when it is read again after other items, "
                        "although torch's, NumPy's and random's global generators had the same "
                        "seed. It depends on what was read before, so that one example can change "
                        "others, or its random numbers come from elsewhere, as from "
                        "np.random.default_rng() or os.urandom, which looks the same: draw them "
                        "from the global generators, or seed your own from these in __getitem__, "
                        "and keep no state between items."
                    )
                first_read = other_read
                if count >= MIN_REREAD and time.monotonic() > end:
                    break
            if any(cache.has_other_keys() for cache in caches):
                self._require_same_uncached(caches, order[count - 1 :: -1])

    def _require_same_uncached(self, caches: list[_Cache], indices: list[int]) -> None:
        """Reject items that differ without what the items read so far have left in caches."""
        for index in indices:
            cached = self._read_seeded(index)
            try:
                with _exchanged(caches):
                    uncached = self._read_seeded(index)
            except Exception:  # the dataset reads it under another name, which is not exchanged
                continue
            if not _are_same(cached, uncached):
                names = ", ".join(f"'{cache.name}'" for cache in caches if cache.has_other_keys())
                raise UserError(
                    f"dataset: item {index:,} differs without what other items left in {names}, so "
                    "one example can change others: give each item its own key in a cache, such as "
                    "its index, or cache nothing."
                )

    def _read_seeded(self, index: int) -> Batch:
        """Return an example, read with a fixed seed of the global random generators."""
        set_seed(index)
        return self.batch([index])

    def describe(self) -> str:
        """Return the dtype and shape of a batch of inputs, such as 'float32 [n, 3, 32, 32]'."""
        leaves = leaves_of(self.empty_batch()[0])
        parts = [f"{leaf.dtype} {['n', *leaf.shape[1:]]}" for leaf in leaves]
        return " and ".join(parts).replace("torch.", "").replace("'", "")

    def digest(self) -> str:
        """Return the SHA-256 of all examples in order. Each is read once."""
        hashed = hashlib.sha256()
        for start in range(0, len(self), DIGEST_BATCH):
            end = min(start + DIGEST_BATCH, len(self))
            inputs, targets = self.batch(range(start, end))
            part = state_digest({"inputs": unpack(inputs), "targets": unpack(targets)})
            hashed.update(part.encode())
        return hashed.hexdigest()


@dataclass(eq=False)
class _Cache:
    """A dictionary that is an attribute of a dataset and may be a cache.

    Attributes:
        attributes: All attributes of the dataset, by name.
        name: Name of the attribute.
        other: A copy of the dictionary, or the dictionary itself while the dataset has the copy.
    """

    attributes: dict[str, Any]
    name: str
    other: dict[Any, Any]

    def has_other_keys(self) -> bool:
        """Return True if the dictionary and its copy have different keys."""
        return self.attributes[self.name].keys() != self.other.keys()

    def exchange(self) -> None:
        """Give the dataset the copy instead of the dictionary, or the dictionary back."""
        self.attributes[self.name], self.other = self.other, self.attributes[self.name]


def _find_caches(dataset: Any) -> list[_Cache]:
    """Return the dictionaries that are attributes of a dataset and of those that it reads."""
    caches = []
    for part in _datasets_in(dataset):
        attributes = getattr(part, "__dict__", {})
        for name, value in attributes.items():
            if type(value) in DICTIONARIES:
                caches.append(_Cache(attributes, name, value.copy()))
    return caches


@contextmanager
def _exchanged(caches: list[_Cache]) -> Iterator[None]:
    """Let datasets use the copies of their dictionaries inside the context."""
    for cache in caches:
        cache.exchange()
    try:
        yield
    finally:
        for cache in caches:
            cache.exchange()


def _seed_function(transform: Any) -> Callable[..., Any] | None:
    """Return the method that seeds a random transform of MONAI or Albumentations, or None."""
    if isinstance(transform, type):
        return None
    for name in ("set_random_state", "set_random_seed"):  # of MONAI, of Albumentations
        method = getattr(transform, name, None)
        if inspect.isroutine(method) and "seed" in inspect.signature(method).parameters:
            return method
    return None


def _rows_of_tensors(dataset: Any, indices: Sequence[int] | np.ndarray) -> Batch | None:
    """Return a batch of a `TensorDataset` or of a `Subset` of one; None for other datasets.

    It equals the batch of the items, which are rows of two tensors, and is faster. Indices that are
    not integers, such as a mask, are left to the items.
    """
    if type(dataset) is Subset:
        inner_indices = [dataset.indices[index] for index in indices]
        return _rows_of_tensors(dataset.dataset, inner_indices)
    if type(dataset) is not TensorDataset or len(dataset.tensors) != 2:
        return None
    if any(not _has_plain_rows(tensor) for tensor in dataset.tensors):
        return None
    if not all(map(_is_integer, indices)):
        return None
    rows = torch.from_numpy(np.array(indices, dtype=np.int64))
    inputs, targets = dataset.tensors
    return inputs[rows].contiguous(), targets[rows].contiguous()  # as after `torch.stack`


def _is_integer(index: Any) -> bool:
    """Return True for an integer of Python, NumPy or torch; False for a bool."""
    if isinstance(index, Tensor):
        return index.dim() == 0 and index.dtype == torch.int64
    return type(index) is int or isinstance(index, np.integer)


def _has_plain_rows(tensor: Tensor) -> bool:
    """Return True if torch can select rows of a tensor, and computes with them."""
    return type(tensor) is Tensor and tensor.layout is torch.strided and tensor.dtype in DTYPES


def _entries_of(value: Any) -> list[Any]:
    """Return the first entries of a list, tuple or dictionary, or a list of any other value."""
    if isinstance(value, dict):
        return list(islice(value.values(), MAX_ENTRIES))
    if isinstance(value, list | tuple):
        return list(value[:MAX_ENTRIES])
    return [value]


def _datasets_in(dataset: Any) -> list[Any]:
    """Return a dataset and those that it reads, such as the parts of a ConcatDataset."""
    datasets = [dataset]
    for outer in datasets:  # which grows
        for value in getattr(outer, "__dict__", {}).values():
            inner = [entry for entry in _entries_of(value) if isinstance(entry, Dataset)]
            datasets += [entry for entry in inner if all(entry is not known for known in datasets)]
    return datasets


def _spread(length: int, max_count: int) -> list[int]:
    """Return up to `max_count` different indices below `length`, spread over it, from the first.

    Any part of the list from its start is also spread.
    """
    stride = max(1, round(length * (math.sqrt(5) - 1) / 2))  # successive ones are far apart
    while math.gcd(stride, length) > 1:
        stride += 1
    return [position * stride % length for position in range(min(length, max_count))]


def _are_same(batch: Batch, other: Batch) -> bool:
    """Return True if two batches have the same tensors, apart from the rounding of numbers."""
    pairs = list(zip(_leaves(batch), _leaves(other), strict=False))
    for leaf, other_leaf in pairs:
        is_exact = not (leaf.is_floating_point() or leaf.is_complex())
        if is_exact and not torch.equal(leaf, other_leaf):
            return False
        if not is_exact and not are_alike(leaf, other_leaf, leaf):
            return False
    return _dtypes(batch) == _dtypes(other)


def _leaves(batch: Batch) -> Iterator[Tensor]:
    """Yield each tensor in a batch."""
    for part in batch:
        yield from leaves_of(part)


def _dtypes(batch: Batch) -> list[torch.dtype]:
    """Return the dtype of each tensor in a batch."""
    return [leaf.dtype for leaf in _leaves(batch)]
