"""Batches of a data set."""

import os
import random
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from tests.library.conftest import Make
from tests.library.small import data
from zdp_bench.errors import UserError
from zdp_bench.gradients.parts import leaves_of
from zdp_bench.library import examples
from zdp_bench.library.examples import Items


class OneBuffer:
    """A data set whose items are all the same tensor or array, filled anew with each."""

    def __init__(self, buffer: Any, item_of: Any) -> None:
        self.buffer, self.item_of = buffer, item_of

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        self.buffer[:] = index
        return self.item_of(self.buffer), index


@pytest.mark.parametrize("buffer", [torch.zeros(3), np.zeros(3, dtype=np.float32)])
@pytest.mark.parametrize(
    "item_of", [lambda x: x, lambda x: (x, 1), lambda x: {"x": x}, lambda x: ([x], x)]
)
def test_items_that_share_memory_stay_apart(buffer: Any, item_of: Any) -> None:
    """All examples were copies of the last, so one example moved the sum by n bounds."""
    inputs, targets = Items(OneBuffer(buffer, item_of)).batch([3, 1, 4])
    assert targets.tolist() == [3, 1, 4]
    assert leaves_of(inputs)[0][:, 0].tolist() == [3, 1, 4]


class ItemByItem:
    """A data set that reads the items of another one."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


IMAGES = torch.randn(6, 2, 3, 4)


@pytest.mark.parametrize(
    "inputs",
    [
        IMAGES,
        IMAGES.to(memory_format=torch.channels_last),
        IMAGES.transpose(1, 3),
        IMAGES[:, :, :, :0],
        IMAGES.bfloat16(),
        torch.randn(6, 4, dtype=torch.complex64).conj(),
        torch.arange(6).to(torch.uint16),
        torch.arange(6) > 2,
    ],
)
@pytest.mark.parametrize("inner", [None, [5, -2, 0, 0], np.array([3, 1, 2]), torch.arange(4)])
def test_rows_of_tensors_are_the_batch_of_the_items(inputs: torch.Tensor, inner: Any) -> None:
    dataset: Any = TensorDataset(inputs, torch.arange(6))
    if inner is not None:
        dataset = Subset(Subset(dataset, range(6)), inner)
    rows, item_by_item = (Items(kind).batch([2, 0]) for kind in (dataset, ItemByItem(dataset)))
    for leaf, expected in zip(rows, item_by_item, strict=True):
        assert leaf.dtype == expected.dtype
        assert leaf.stride() == expected.stride()
        assert torch.equal(leaf, expected)


@pytest.mark.parametrize(
    "indices",
    [
        [True, False, True],
        torch.tensor([True, False, True]),
        np.array([True, False]),
        [1.0, 2.7],
        ["1", "2"],
        torch.tensor([True, True]).nonzero(),
        np.argwhere([True, True]),
    ],
)
def test_indices_that_are_no_integers_are_left_to_the_items(indices: Any) -> None:
    """A mask was read as rows 1 and 0."""
    subset = Subset(TensorDataset(IMAGES, torch.arange(6)), indices)

    def shapes(dataset: Any) -> Any:
        try:
            return [leaf.shape for leaf in Items(dataset).batch([0, 1])]
        except (UserError, IndexError, TypeError) as error:
            return str(error)

    assert shapes(subset) == shapes(ItemByItem(subset))


@pytest.mark.parametrize("count", [1, 3])
def test_a_tensor_dataset_without_pairs_is_refused(count: int) -> None:
    with pytest.raises(UserError, match="a pair \\(input, target\\) is needed"):
        Items(TensorDataset(*[IMAGES] * count)).batch([0])


@pytest.mark.parametrize(
    "items",
    [
        [({"a": 1.0}, 0), ({"b": 1.0}, 0)],
        [({"a": 1.0}, 0), ({"a": 1.0, "b": 1.0}, 0)],
        [((1.0, 2.0), 0), ((1.0,), 0)],
        [({"a": 1.0, "b": 2.0}, 0), ({"b": 1.0, "a": 2.0}, 0)],
    ],
)
def test_items_with_other_keys_are_refused(items: list[Any]) -> None:
    """The keys of the first item that is drawn would decide what the batch holds."""
    for order in ([0, 1], [1, 0]):
        with pytest.raises(UserError, match="some have other keys"):
            Items(items).batch(order)
    with pytest.raises(UserError, match="some have other keys"):
        Items(items).batch([1])  # a batch without the first


class Changing(Dataset[Any]):
    """A data set whose items are what a function returns for their index and for what it kept."""

    def __init__(self, read: Callable[[int, dict[str, Any]], Any], length: int = 60) -> None:
        self.read, self.length = read, length
        self.kept: dict[str, Any] = {
            "numpy": np.random.default_rng(0),
            "torch": torch.Generator().manual_seed(0),
            "buffer": torch.zeros(4),
            "cache": {},
        }

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.read(index, self.kept), index % 3


def row(index: int) -> torch.Tensor:
    return torch.arange(4.0) + 7 * index % 5


def previous_if_corrupt(index: int, kept: dict[str, Any]) -> torch.Tensor:
    if index == 23 and "previous" in kept:
        return kept["previous"]
    kept["previous"] = row(index)
    return kept["previous"]


def running_mean(index: int, kept: dict[str, Any]) -> torch.Tensor:
    kept["mean"] = 0.9 * kept.get("mean", 0.0) + 0.1 * row(index)
    return row(index) - kept["mean"]


def padded_in_a_buffer(index: int, kept: dict[str, Any]) -> torch.Tensor:
    kept["buffer"][: 1 + index % 4] = row(index)[: 1 + index % 4]
    return kept["buffer"]


def counted(index: int, kept: dict[str, Any]) -> list[int]:
    kept["count"] = kept.get("count", 0) + 1
    return [kept["count"], 0, 0, 0]


def flipped_at_every_third_read(index: int, kept: dict[str, Any]) -> torch.Tensor:
    kept["count"] = kept.get("count", 0) + 1
    return row(index).flip(0) if kept["count"] % 3 == 0 else row(index)


DEPENDENT: dict[str, Any] = {
    "every third": flipped_at_every_third_read,
    "numpy's generator": lambda i, kept: row(i) + kept["numpy"].normal(),
    "torch's generator": lambda i, kept: row(i) + torch.randn(4, generator=kept["torch"]),
    "running mean": running_mean,
    "previous if corrupt": previous_if_corrupt,
    "padded in a buffer": padded_in_a_buffer,
    "counted": counted,
}
NEW_ENTROPY: dict[str, Any] = {
    "an unseeded generator": lambda i, _: row(i) + np.random.default_rng().normal(),
    "the system's numbers": lambda i, _: row(i) + random.SystemRandom().random(),
    "the system's bytes": lambda i, _: row(i) + os.urandom(1)[0],
}


def cached(index: int, kept: dict[str, Any]) -> torch.Tensor:
    return kept["cache"].setdefault(index, row(index) + torch.randn(4))


def own_generator_seeded_anew(index: int, kept: dict[str, Any]) -> torch.Tensor:
    kept["torch"].manual_seed(int(torch.randint(2**62, ())))
    return row(index) + torch.randn(4, generator=kept["torch"])


INDEPENDENT: dict[str, Any] = {
    "torch": lambda i, _: row(i) + torch.randn(4),
    "numpy": lambda i, _: row(i) + np.random.randn(),
    "random": lambda i, _: row(i) + random.random(),
    "cached": cached,
    "seeded anew": own_generator_seeded_anew,
    "not finite": lambda i, _: row(i) * float("nan"),
    "whole": lambda i, _: [i, 0, 0, 0],
}


@pytest.mark.parametrize("name", DEPENDENT)
def test_items_that_depend_on_those_before_are_refused(make: Make, name: str) -> None:
    """One example moved the sum by up to nine bounds, through the items read after it."""
    with pytest.raises(UserError, match=r"^dataset: item \d+ differs when it is read again"):
        make(dataset=Changing(DEPENDENT[name]))


@pytest.mark.parametrize("name", NEW_ENTROPY)
def test_numbers_from_elsewhere_are_refused_for_a_reason_that_holds(name: str) -> None:
    """They look like state; that another item changes them must not be stated as a fact."""
    with pytest.raises(UserError, match=r"or its random numbers come from elsewhere") as refused:
        Items(Changing(NEW_ENTROPY[name])).require_independent()
    assert "np.random.default_rng() or os.urandom" in str(refused.value)


@pytest.mark.parametrize("name", INDEPENDENT)
def test_items_that_draw_from_global_generators_or_are_cached_are_accepted(name: str) -> None:
    Items(Changing(INDEPENDENT[name])).require_independent()


class Grade(IntEnum):
    LOW = 0
    HIGH = 1


class Cached(Dataset[Any]):
    """A data set that keeps rows under the key of a function, as under the name of a file."""

    def __init__(self, key_of: Callable[[int], Any], length: int = 60) -> None:
        self.key_of, self.length = key_of, length
        self.cache: dict[Any, torch.Tensor] = {}
        self.alias: dict[Any, torch.Tensor] = {}
        self.num_misses = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        key = self.key_of(index)
        if key not in self.cache:
            self.num_misses += 1
            self.cache[key] = row(index)
        return self.cache[key] + torch.randn(4), 0


@pytest.mark.parametrize("place", ["dataset", "concatenated", "subset"])
def test_a_cache_in_which_items_share_a_key_is_refused(place: str) -> None:
    """Whichever example was read first was returned for all of its key (8.7 bounds)."""
    cached = Cached(lambda index: 8 if index == 52 else index)
    whole: Any = {
        "dataset": cached,
        "concatenated": ConcatDataset([data(), cached]),
        "subset": Subset(cached, range(1, 60)),
    }[place]
    with pytest.raises(UserError, match=r"differs without what other items left in 'cache'"):
        Items(whole).require_independent()


def test_a_cache_with_a_key_for_each_item_is_accepted_and_kept() -> None:
    cached = Cached(lambda index: index)
    cache = cached.cache
    Items(cached).require_independent()
    assert cached.cache is cache
    assert sorted(cache) == list(range(60))
    assert cached.num_misses == 120
    Items(cached).require_independent()  # nothing new is cached, so nothing is read without it
    assert cached.num_misses == 120


def test_a_cache_under_two_names_is_accepted() -> None:
    class Aliased(Cached):
        def __getitem__(self, index: int) -> Any:
            super().__getitem__(index)
            return self.alias[index] + torch.randn(4), 0

    aliased = Aliased(lambda index: index)
    aliased.alias = aliased.cache
    Items(aliased).require_independent()


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (np.array([1, 2], ">f4"), torch.float32),  # as in FITS, IDX and NIfTI files
        (np.array([1, 2], ">i2"), torch.int16),
        (1 + 2j, torch.complex128),
        (np.complex64(1 + 2j), torch.complex64),
        (2**63 - 1, torch.int64),
        (Grade.HIGH, torch.int64),
    ],
)
def test_numbers_of_all_types_form_a_batch(value: Any, dtype: torch.dtype) -> None:
    items = Items([(torch.zeros(3), value)] * 3)
    items.require_independent()
    _, targets = items.batch([0, 1])
    assert targets.dtype == dtype
    assert targets[1].tolist() == np.asarray(value).tolist()


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (2**63, "integer that does not fit in 64 bits"),
        ({"code": -(2**70)}, "integer that does not fit in 64 bits"),
        (torch.zeros(2).to(torch.float8_e4m3fn), r"torch\.float8_e4m3fn.*convert it"),
        (np.zeros(2, "datetime64[s]"), "do not form a batch"),
    ],
)
def test_numbers_that_torch_does_not_compute_with_are_refused(value: Any, sentence: str) -> None:
    items = Items([(value, 0)] * 3)
    with pytest.raises(UserError, match=sentence):
        items.require_independent()


class Shift:
    """A random transform as MONAI's: it has a generator, which `set_random_state` seeds."""

    def __init__(self) -> None:
        self.generator = np.random.RandomState(0)

    def set_random_state(self, seed: int) -> None:
        self.generator = np.random.RandomState(seed)

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        return values + self.generator.randn()


class Turn:
    """A random transform as Albumentations', whose `set_random_state` takes no seed."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def set_random_state(self, random_generator: Any, py_random: Any) -> None:
        raise AssertionError

    def set_random_seed(self, seed: int | None) -> None:
        self.generator = np.random.default_rng(seed)

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        return values + self.generator.normal()


@pytest.mark.parametrize(
    "kept",
    [Turn(), [nn.Identity(), Turn()], {"train": Shift()}, (Shift, Shift())],
    ids=["alone", "list", "dictionary", "beside its class"],
)
def test_transforms_are_seeded_wherever_a_dataset_keeps_them(kept: Any) -> None:
    transform = kept
    if isinstance(kept, list | tuple):
        transform = kept[-1]
    elif isinstance(kept, dict):
        transform = kept["train"]
    turned: Any = Changing(lambda index, _: transform(row(index)))
    turned.kept = kept
    items = Items(turned)
    items.require_independent()
    draws = [items.batch([1])[0] for _ in range(2)]
    assert not torch.equal(*draws)


@pytest.mark.parametrize("place", ["dataset", "concatenated", "subset"])
def test_monais_transforms_are_seeded_from_torchs_generator(place: str) -> None:
    """So an item's numbers do not follow from how many items were read before it."""
    shifted: Any = Changing(lambda index, kept: shifted.transform(row(index)))
    shifted.transform = Shift()
    whole = {
        "dataset": shifted,
        "concatenated": ConcatDataset([shifted, shifted]),
        "subset": Subset(shifted, range(9)),
    }[place]
    items = Items(whole)
    items.require_independent()
    draws = [items.batch([1])[0] for _ in range(2)]
    assert not torch.equal(*draws)


def test_reading_again_leaves_the_global_generators_as_they_were() -> None:
    torch.manual_seed(1)
    expected = torch.randn(1)
    torch.manual_seed(1)
    Items(Changing(INDEPENDENT["torch"])).require_independent()
    assert torch.randn(1) == expected


@pytest.mark.parametrize(("seconds", "reads"), [(0.0, 19), (60.0, 2251)])
def test_a_large_data_set_is_read_again_in_part(
    monkeypatch: pytest.MonkeyPatch, seconds: float, reads: int
) -> None:
    monkeypatch.setattr(examples, "REREAD_SECONDS", seconds)
    seen: list[int] = []

    def read(index: int, _: dict[str, Any]) -> float:
        seen.append(index)
        return 0.0

    items = Items(Changing(read, length=100_000))
    items.empty_batch()  # as `make_private` does first
    seen.clear()
    items.require_independent()
    assert len(seen) == reads
    in_order = sorted(set(seen))
    widest = max(np.diff([*in_order, 100_000]))
    assert widest < 4 * 100_000 / len(in_order)
