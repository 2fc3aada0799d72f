"""Nothing that a model or a loss stores outside of its modules reaches another example."""

from __future__ import annotations

import contextlib
import csv
import functools
import importlib
import itertools
import logging
import re
import sqlite3
import struct
import sys
import threading
import types
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.gradients.harness import loss
from tests.gradients.outside_state.holders import (
    HOLDERS,
    BesideALock,
    Hospital,
    InAClass,
    Largest,
    OnlyOne,
    WithMethodsOfFunctools,
    WithPrivateNames,
    WithSlots,
    in_a_cache,
    in_a_closure,
    in_a_default,
    in_a_global,
    in_a_global_that_is_new,
    in_a_list,
    in_a_module_imported_in_the_function,
    in_an_attribute_of_a_function,
    in_an_iterator_of_lists,
)
from tests.modules import Made
from zdp_bench import clipped_sum
from zdp_bench.errors import UserError
from zdp_bench.gradients import per_example, reference
from zdp_bench.gradients.outside_state import content, objects, preserve_outside_state

every_holder = pytest.mark.parametrize("make", HOLDERS.values(), ids=HOLDERS.keys())


@every_holder
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is")
def test_state_is_restored(make: Callable[[], Largest]) -> None:
    remember = make()
    with preserve_outside_state(remember) as restore:
        assert not restore()
        assert remember(7.0) == 7
        assert remember(2.0) == 7
        assert restore() or make is in_a_cache
        assert remember(3.0) == 3
    assert remember(1.0) == 1
    with preserve_outside_state(remember):
        assert remember(9.0) == 9
    assert remember(0.0) == 1  # what was there before stays


def largest_of_a_generator() -> Largest:
    def remember() -> Any:
        value = largest = 0.0
        while True:
            value = yield largest
            largest = max(largest, value)

    generator = remember()
    next(generator)
    return generator.send


def two_numbers() -> Iterator[float]:
    yield 6.0
    yield 7.0


def largest_of_an_accumulation() -> Largest:
    values: list[float] = []
    # It cannot be pickled, because it holds functions without a name.
    largest = itertools.accumulate(iter(lambda: values[-1], None), lambda a, b: max(a, b))

    def remember(value: float) -> float:
        values.append(value)
        return next(largest)

    return remember


class Countdown:
    """A sequence of the old kind, which only has items."""

    def __getitem__(self, index: int) -> float:
        return 9.0 - index


def advance(iterator: Any, read: Callable[[Any], float] = float) -> Largest:
    return lambda value: max(read(next(iterator)), value)


def advance_an_nditer() -> Largest:
    numbers = np.nditer(np.arange(6.0, 9.0))
    next(numbers)  # which only begins
    return advance(numbers)


def cycle_after_a_pass(values: list[Any]) -> Iterator[Any]:
    cycle = itertools.cycle(values)
    for _ in [*values, "the first again"]:
        next(cycle)
    return cycle


def cursor_of_a_closed_database() -> sqlite3.Cursor:
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        return connection.execute("select 1")


@pytest.mark.parametrize(
    "iterator",
    [
        iter(memoryview(b"abc")),
        re.finditer("[0-9]", "678"),
        map(len, re.finditer("[0-9]", "678")),
        # Their items cannot be pickled, and since Python 3.14 neither can they.
        cycle_after_a_pass([lambda: 1, lambda: 2]),
        itertools.tee([lambda: 1, lambda: 2])[0],
    ],
    ids=["memoryview", "finditer", "map", "cycle", "tee"],
)
def test_an_iterator_that_does_not_tell_its_position_is_refused(iterator: Any) -> None:
    refusal = pytest.raises(
        UserError, match=r"can advance an iterator .*: hold a list of its items instead"
    )
    with refusal, preserve_outside_state(lambda: next(iterator)):
        pass


@pytest.mark.parametrize(
    "make",
    [
        lambda: sys.__stderr__,
        cursor_of_a_closed_database,
        lambda: zip([1], iter([2]), strict=True),
        lambda: np.nditer(np.zeros(2)),
        lambda: re.compile("[0-9]"),
        threading.Lock,
        lambda: logging.getLogger("users"),
        lambda: np.dtype("f4"),
        lambda: (number for number in (1, 2)),
    ],
    ids=["file", "cursor", "zip", "nditer", "re", "lock", "logger", "dtype", "generator"],
)
def test_what_an_honest_model_may_hold_is_accepted(make: Callable[[], Any]) -> None:
    with preserve_outside_state(make()) as restore:
        assert not restore()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (largest_of_a_generator, r"\(generator\) outside of the model was advanced"),
        (lambda: advance(two_numbers()), r"\(generator\) outside of the model was advanced"),
        (
            lambda: advance(iter(range(6, 99))),
            r"\(range_iterator\) outside of the model was advanced",
        ),
        (lambda: advance(iter([6, 7, 8])), r"\(list_iterator\) outside of the model was advanced"),
        (
            lambda: advance(map(float, [6, 7])),
            r"\(list_iterator\) outside of the model was advanced",
        ),
        (in_an_iterator_of_lists, r"\(cycle\) outside of the model was advanced"),
        (largest_of_an_accumulation, r"\(accumulate\) outside of the model was advanced"),
        (lambda: advance(itertools.count(6)), r"\(count\) outside of the model was advanced"),
        (
            lambda: advance(iter(deque([6, 7]))),
            r"\(_deque_iterator\) outside of the model was advanced",
        ),
        (
            lambda: advance(iter(array("d", [6, 7]))),
            r"\(arrayiterator\) outside of the model was advanced",
        ),
        (
            lambda: advance(np.arange(6.0, 9.0).flat),
            r"\(flatiter\) outside of the model was advanced",
        ),
        (
            lambda: advance(np.ndenumerate([6, 7]), lambda pair: float(pair[1])),
            r"\(flatiter\) outside of the model was advanced",
        ),
        (advance_an_nditer, r"\(nditer\) outside of the model was advanced"),
        (
            lambda: advance(csv.DictReader(["a", "6"]), lambda row: float(row["a"])),
            r"\(reader\) outside of the model was advanced",
        ),
        (
            lambda: advance(struct.iter_unpack("d", bytes(8)), sum),
            r"\(unpack_iterator\) outside of the model was",
        ),
        (lambda: advance(iter(Countdown())), r"\(iterator\) outside of the model was advanced"),
    ],
)
def test_what_cannot_be_set_back_is_refused_once_it_has_changed(
    make: Callable[[], Largest], message: str
) -> None:
    remember = make()
    with preserve_outside_state(remember) as restore:
        assert not restore()
    with pytest.raises(UserError, match=message), preserve_outside_state(remember):
        remember(7.0)


def test_a_generator_at_its_end_cannot_change_and_one_that_comes_to_it_has_changed() -> None:
    numbers = two_numbers()
    with (
        pytest.raises(UserError, match=r"\(generator\) outside of the model was"),
        preserve_outside_state(numbers),
    ):
        assert list(numbers) == [6.0, 7.0]
    with preserve_outside_state(numbers) as restore:
        assert not list(numbers)
        assert not restore()


@pytest.fixture(autouse=True)
def _forget() -> Any:
    shared = (in_a_global, in_a_global_that_is_new, in_a_default, in_an_attribute_of_a_function)
    classes = (InAClass, WithPrivateNames, WithMethodsOfFunctools, OnlyOne, Hospital)
    with preserve_outside_state(*shared, *classes, in_a_module_imported_in_the_function):
        yield


@pytest.mark.parametrize("make", [in_a_closure, in_a_list, BesideALock, in_a_cache])
@pytest.mark.parametrize("by_loss", [False, True], ids=["by the model", "by the loss"])
def test_an_outlier_changes_no_other_gradient(
    make: Callable[[], Largest],
    by_loss: bool,
) -> None:
    remember = make()

    def scale(values: Tensor) -> Tensor:
        return values / remember(float(values.detach().abs().max().ceil()))

    def scaled_loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return loss(scale(outputs) if by_loss else outputs, targets)

    torch.manual_seed(0)
    model = Made(lambda net, x: net.layer(x if by_loss else scale(x)), layer=nn.Linear(4, 2))
    inputs, targets = torch.rand(3, 4), torch.randn(3)
    if by_loss:
        inputs.div_(4)
    others = []
    for largest in (2.0, 250.0):
        inputs[0, 0] = largest
        gradients = reference.differentiate_in_loop(model, scaled_loss, (inputs, targets))
        others.append({name: gradient[1:] for name, gradient in gradients.items()})
    torch.testing.assert_close(*others, rtol=0, atol=0)


def test_a_recording_holds_nothing_of_the_examples() -> None:
    """A value of the first examples would else become a constant of the program."""
    first: list[float] = []

    def subtract_first(net: Any, x: Tensor) -> Tensor:
        if not first:
            first.append(float(x.detach().mean()))
        return net.layer(x - first[0])

    torch.manual_seed(0)
    model = Made(subtract_first, layer=nn.Linear(4, 2))
    with pytest.raises(UserError, match="output for an example changes once"):
        clipped_sum(model, loss, (torch.randn(3, 4), torch.randn(3)), 1.0)
    assert not first


@pytest.mark.parametrize("has_hook", [False, True])
def test_a_hook_that_one_example_registers_is_removed(has_hook: bool) -> None:
    def hooked(net: Any, x: Tensor) -> Tensor:
        if float(x.max()) > 100:
            net.layer.weight.register_hook(lambda gradient: 10 * gradient)
        return net.layer(x / x.max())

    torch.manual_seed(0)
    model = Made(hooked, layer=nn.Linear(4, 2))
    if has_hook:
        model.layer.weight.register_hook(lambda gradient: 2 * gradient)
    inputs, targets = torch.rand(3, 4), torch.randn(3)
    others = []
    for outlier in (1.0, 200.0):
        inputs[0] = outlier
        gradients = reference.differentiate_in_loop(model, loss, (inputs, targets))
        others.append(gradients["layer.weight"][1:])
    torch.testing.assert_close(*others, rtol=0, atol=0)


def test_a_loss_that_stores_what_vmap_gives_it_is_computed_one_by_one() -> None:
    last: dict[str, Tensor] = {}

    def difference(outputs: Tensor, targets: Tensor) -> Tensor:
        losses = loss(outputs, targets) * (2 if last else 1)
        last["outputs"] = outputs.detach()
        return losses

    model = nn.Linear(4, 2)
    batch = torch.randn(3, 4), torch.randn(3)
    with pytest.raises(UserError, match="loss of an example changes once others are computed"):
        clipped_sum(model, difference, batch, 1.0)
    assert not last


def test_the_calls_of_a_cross_entropy_are_not_counted() -> None:
    """Their number would tell how many micro-batches, and so how many examples, a step has."""
    calls = 0

    def smoothed(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        smoothing = 0.9 if calls > 2 else 0.0
        return F.cross_entropy(outputs, targets, reduction="none", label_smoothing=smoothing)

    examples = per_example(smoothed)
    outputs, targets = torch.randn(3, 4), torch.tensor([0, 1, 2])
    losses = [examples(outputs, targets) for _ in range(5)]
    assert calls == 0
    assert torch.equal(losses[0], losses[-1])


def test_a_module_with_the_name_of_a_standard_one_is_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "__init__.py").touch()
    text = "largest = [0.0]\ndef remember(value):\n"
    text += "    largest.append(value)\n    return max(largest)\n"
    (tmp_path / "code" / "hospitals.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("code", "code.hospitals"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    content.is_library.cache_clear()
    remember = importlib.import_module("code.hospitals").remember
    with preserve_outside_state(remember):
        remember(5.0)
    assert remember(1.0) == 1
    content.is_library.cache_clear()


@pytest.mark.parametrize("is_installed", [True, False])
def test_a_namespace_package_is_a_library_where_libraries_are_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_installed: bool
) -> None:
    """It has no file, so `cuda`, which comes with torch, was walked in each step: minutes."""
    package = types.ModuleType("driver_bindings")
    package.__path__ = [str((tmp_path / "site" if is_installed else tmp_path) / "driver_bindings")]
    monkeypatch.setitem(sys.modules, "driver_bindings", package)
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path / "site"))
    content.is_library.cache_clear()
    assert content.is_library("driver_bindings.runtime") == is_installed
    content.is_library.cache_clear()


def test_attributes_of_types_in_c_are_no_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cython's functions have a read-only one, and belong to no installed package."""
    monkeypatch.setattr(objects, "is_library", lambda _: False)
    assert not content.slots_of(InAClass.remember)
    assert content.slots_of(WithSlots())


def test_functions_of_libraries_are_not_followed() -> None:
    with preserve_outside_state(torch.nn.functional.cross_entropy, np.mean) as restore:
        assert not restore()


def test_a_cache_is_emptied_each_time_but_is_no_change() -> None:
    square = functools.lru_cache(lambda value: value**2)
    with preserve_outside_state(square) as restore:
        for value in (1.0, 2.0):
            square(value)
            assert not restore()
            assert square.cache_info().currsize == 0


@pytest.mark.parametrize("maxsize", [1, 128, None])
def test_a_cache_that_was_filled_anew_is_emptied(maxsize: int | None) -> None:
    """It has as many misses as before, so its new entry stayed."""
    values = [1.0]
    largest = functools.lru_cache(maxsize)(lambda: max(values))
    largest()
    with preserve_outside_state(largest) as restore:
        for value in (7.0, 9.0):
            values.append(value)
            largest.cache_clear()
            largest()
            restore()
            assert largest() == 1.0


@pytest.mark.parametrize("maxsize", [1, 2, None])
@pytest.mark.parametrize("is_cleared", [False, True])
def test_a_cache_with_the_same_objects_for_other_keys_is_emptied(
    maxsize: int | None, is_cleared: bool
) -> None:
    """It holds the same keys and values as before, and has as many misses."""
    values = [True, False]
    pick = functools.lru_cache(maxsize)(lambda index: values[index % 2])
    pick(0), pick(1)
    with preserve_outside_state(pick) as restore:
        values.reverse()
        if is_cleared:
            pick.cache_clear()
        for index in (2, 0, 1)[is_cleared:]:  # without a clear, they replace those of a small cache
            pick(index)
        restore()
        assert [pick(index) for index in (0, 1, 2)] == [True, False, True]


@pytest.mark.parametrize("maxsize", [2, None])
def test_a_cache_with_the_same_entries_keeps_them(maxsize: int | None) -> None:
    square = functools.lru_cache(maxsize)(lambda value: value**2)
    for value in (2000.0, 3000.0):
        square(value)
    with preserve_outside_state(square) as restore:
        square(2000.0)  # a limited cache orders its entries by their last use
        restore()
        assert square.cache_info().currsize == 2


@pytest.mark.parametrize(
    ("is_initialized", "is_capturing"), [(False, False), (True, False), (True, True)]
)
def test_nothing_is_restored_only_while_a_graph_is_captured(
    monkeypatch: pytest.MonkeyPatch, is_initialized: bool, is_capturing: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_initialized)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
    tensor = torch.zeros(2)
    with preserve_outside_state(tensor):
        tensor.add_(1)
    assert bool(tensor.any()) == is_capturing
