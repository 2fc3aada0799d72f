"""Tensors, arrays and tables are restored; those that cannot be copied may not be written."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from tests.gradients.outside_state.holders import in_an_array
from zdp_bench.errors import UserError
from zdp_bench.gradients import outside_state
from zdp_bench.gradients.outside_state import numbers, preserve_outside_state

REFUSED = "outside of the model, of shape .* was changed by the model or the loss"


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.complex128),
        *(torch.bool, torch.int16, torch.int64),
    ],
)
@pytest.mark.parametrize(
    "write",
    [
        lambda memory: memory.logical_not_() if memory.dtype == torch.bool else memory.add_(1),
        lambda memory: memory.data.fill_(1),
        lambda memory: memory[1:].data.fill_(1),
    ],
    ids=["in place", "data", "data of a view"],
)
def test_a_large_tensor_that_is_written_is_refused(
    monkeypatch: pytest.MonkeyPatch, write: Callable[[Tensor], Any], dtype: torch.dtype
) -> None:
    monkeypatch.setattr(numbers, "MAX_NUMBERS", 2)
    memory = torch.zeros(3, dtype=dtype)
    with pytest.raises(UserError, match=REFUSED), preserve_outside_state(memory):
        write(memory)


def test_a_large_tensor_that_is_written_in_inference_mode_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(numbers, "MAX_NUMBERS", 2)
    with torch.inference_mode():
        memory = torch.zeros(3)
        with pytest.raises(UserError, match=REFUSED), preserve_outside_state(memory):
            memory.add_(1)


class OwnTensor(Tensor):
    pass


@pytest.mark.parametrize(
    "make",
    [
        lambda values: values.to_sparse(),
        lambda values: values.to(torch.uint16),
        lambda values: values.to(torch.float8_e5m2),
        lambda values: values.as_subclass(OwnTensor),
        lambda values: torch.nested.nested_tensor([values, values], layout=torch.jagged),
    ],
    ids=["sparse", "uint16", "float8", "a subclass", "nested"],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_unusual_tensor_that_is_written_is_refused(make: Callable[[Tensor], Tensor]) -> None:
    tensor = make(torch.ones(2))
    with pytest.raises(UserError, match=REFUSED), preserve_outside_state(tensor):
        tensor.copy_(tensor.clone())
    with preserve_outside_state(tensor) as restore:
        tensor.clone()
        assert not restore()


def test_of_very_many_tensors_the_last_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outside_state, "MAX_COPIES", 2)
    values = np.zeros(1)
    means = [torch.zeros(1) for _ in range(4)]
    for mean in means:
        with contextlib.suppress(UserError), preserve_outside_state(values, *means):
            mean.add_(1)
    assert sum(means) == 2  # the others were restored
    with preserve_outside_state(values, *means), pytest.raises(ValueError, match="read-only"):
        values[0] = 1


def test_a_large_array_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbers, "MAX_NUMBERS", 1)
    remember = in_an_array(np.zeros(2))
    with preserve_outside_state(remember) as restore:
        with pytest.raises(ValueError, match="read-only"):
            remember(1.0)
        assert not restore()
    assert remember(1.0) == 1


def test_a_large_array_and_its_view_can_be_written_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(numbers, "MAX_NUMBERS", 1)
    values = np.zeros(4)
    view = values[1:]
    for arrays in ([values, view], [view, values]):
        with preserve_outside_state(arrays):
            assert not values.flags.writeable
            assert not view.flags.writeable
        assert values.flags.writeable
        assert view.flags.writeable


def add_to_all(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        tensor.add_(1)


def test_after_an_error_everything_else_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbers, "MAX_NUMBERS", 2)
    large, small = torch.zeros(3), torch.zeros(1)
    for tensors in ([large, small], [small, large]):
        with pytest.raises(UserError, match=REFUSED), preserve_outside_state(tensors):
            add_to_all(tensors)
        assert small == 0


def test_after_a_failed_search_arrays_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbers, "MAX_NUMBERS", 1)

    class Broken:
        @property
        def __dict__(self) -> Any:
            raise RuntimeError

    values = np.zeros(2)
    with pytest.raises(RuntimeError), preserve_outside_state(Broken(), values):
        pass
    values[0] = 1


def test_a_backward_pass_after_restoring_fails_rather_than_use_restored_numbers() -> None:
    scratch = torch.ones(2)
    inputs = torch.ones(2, requires_grad=True)
    with preserve_outside_state(scratch) as restore:
        scratch.copy_(torch.tensor([3.0, 4.0]))
        output = (inputs * scratch).sum()
        restore()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward()


def test_what_is_not_written_is_not_touched() -> None:
    weights = torch.tensor([1.0, float("nan")], requires_grad=True)
    with torch.inference_mode():
        features = torch.ones(2)
    values = np.array([1.0, np.nan])
    values.flags.writeable = False
    versions = weights._version
    with preserve_outside_state(lambda: (weights, features, values)) as restore:
        assert not restore()
    assert weights._version == versions


def test_a_tensor_whose_numbers_share_memory_is_not_copied() -> None:
    number = torch.zeros(1)
    with pytest.raises(UserError, match=REFUSED), preserve_outside_state(number.expand(2)):
        number.add_(1)


def test_a_tensor_of_one_number_is_restored_whatever_its_stride() -> None:
    tensor = torch.zeros(3).as_strided((1,), (0,))
    with preserve_outside_state(tensor):
        tensor.add_(1)
    assert not tensor.any()


def test_a_small_change_beside_a_nan_is_undone() -> None:
    tensor = torch.tensor([8.0, float("nan")])
    with preserve_outside_state(tensor) as restore:
        tensor[0] += 1e-5
        assert restore()
        assert not restore()
    assert float(tensor[0]) == 8.0


def test_state_of_the_largest_size_is_still_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (numbers.MAX_NUMBERS, outside_state.MAX_COPIES) == (16_777_216, 1000)
    monkeypatch.setattr(numbers, "MAX_NUMBERS", 2)
    tensor, values = torch.zeros(2), np.zeros(2)
    with preserve_outside_state(tensor, values):
        tensor.add_(1)
        values += 1
    assert not tensor.any()
    assert not values.any()


def test_an_array_that_was_resized_has_its_shape_again() -> None:
    values = np.arange(4.0)
    with preserve_outside_state(values) as restore:
        values.resize(6, refcheck=False)
        assert restore()
        assert values.tolist() == [0.0, 1.0, 2.0, 3.0]


class Managed:
    _mgr = None


@pytest.mark.parametrize(
    ("value", "is_table"),
    [
        (pd.Series([1.0]), True),
        (pd.DataFrame({"a": [1.0]}), True),
        (pd.Index([1.0]), False),
        (Managed(), False),
    ],
)
def test_a_table_is_one_of_pandas(value: Any, is_table: bool) -> None:
    assert numbers.is_table(value) == is_table


STACK = torch.eye(3)
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda x: x,
    "with NaN": lambda x: torch.where(x == 0, torch.nan, x),
    "complex": lambda x: x * (1 + 1j),
    "integers": lambda x: x.long(),
    "sparse": Tensor.to_sparse,
    "rows": Tensor.to_sparse_csr,
    "columns": Tensor.to_sparse_csc,
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.5, 0, torch.qint8),
    "float8": lambda x: x.to(torch.float8_e4m3fn),
    "nested": lambda x: torch.nested.nested_tensor([*x]),
}


@pytest.mark.filterwarnings(
    "ignore:Sparse .* tensor support", "ignore:.*nested tensors", "ignore:torch.quantize_per_tensor"
)
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_tensors_of_any_kind_are_compared(kind: Callable[[Tensor], Tensor]) -> None:
    assert numbers.are_equal(kind(STACK), kind(STACK.clone()))
    assert not numbers.are_equal(kind(STACK), kind(2 * STACK))


def test_tensors_of_other_shapes_or_types_differ() -> None:
    assert not numbers.are_equal(STACK, STACK[:1])
    assert not numbers.are_equal(STACK, STACK.double())
    assert numbers.are_equal(STACK.to("meta"), STACK.to("meta"))


def test_neither_a_graph_nor_other_numbers_in_memory_count() -> None:
    for kind in ("dense", "sparse", "float8"):
        assert numbers.are_equal(KINDS[kind](STACK), KINDS[kind](STACK.clone()).requires_grad_())
    float8 = STACK.to(torch.float8_e4m3fn)
    assert numbers.are_equal(float8[:2], float8[:2].clone())


def test_a_conjugate_or_negated_view_has_the_checksum_of_its_numbers() -> None:
    pairs = torch.view_as_complex(torch.randn(3, 2))
    for view in (pairs.conj(), pairs.conj().imag):
        assert numbers._checksum_of(view) == numbers._checksum_of(view.resolve_conj().resolve_neg())


@pytest.mark.parametrize(
    "memory",
    [torch.zeros(2), torch.zeros(2, dtype=torch.complex64), array("d", [0.0]), np.zeros(1)],
    ids=["tensor", "complex", "array of Python's", "array"],
)
def test_the_sign_of_zero_is_restored(memory: Any) -> None:
    with preserve_outside_state(memory) as restore:
        memory[0] = -0.0
        assert restore()
        assert not restore()
    assert not np.signbit(np.asarray(memory).real).any()


def test_an_array_with_nan_has_not_changed() -> None:
    """NaN is not equal to itself, so that the array seemed to change all the time."""
    with preserve_outside_state(array("d", [float("nan")])) as restore:
        assert not restore()
