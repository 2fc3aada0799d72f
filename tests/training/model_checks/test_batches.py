"""What mixes only in larger batches than three is found in one of the size that the run draws, or
in a smaller one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.training.model_checks.models import VECTORS, Layer, check, mlp
from zdp_bench.errors import UserError
from zdp_bench.training.model_checks import SAMPLES, batches


@pytest.fixture(autouse=True)
def time_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is."""
    monkeypatch.setattr(batches, "SECONDS", 1e9)


def above(limit: int, mixing: Callable[[Tensor], Tensor]) -> nn.Module:
    """A layer that mixes where more samples come than `limit`, and else passes them on."""
    return Layer(lambda x: mixing(x) if len(x) > limit else x)


def without_mean(x: Tensor) -> Tensor:
    return x - x.mean(dim=0)


@pytest.mark.parametrize("limit", [4, 100])
def test_a_layer_that_mixes_above_so_many_samples_is_found_and_named(limit: int) -> None:
    with pytest.raises(
        UserError,
        match=r"^layer '1' \(Layer\) lets one sample see another,.*per-sample layer there",
    ):
        check(mlp(above(limit, without_mean)), records=limit + 1)
    check(mlp(above(limit, without_mean)), records=limit)


class Mixed(torch.autograd.Function):
    """Forward, every sample for itself; backward, not, where there are more than four."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient * (1 + x.abs().mean()) if len(x) > 4 else gradient


class Divided(Mixed):
    """By how many samples there are, which is private too."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient / len(gradient) if len(gradient) > 4 else gradient


@pytest.mark.parametrize("function", [Mixed, Divided], ids=lambda function: function.__name__)
def test_what_mixes_in_its_backward_pass_only_is_found(
    function: type[torch.autograd.Function],
) -> None:
    with pytest.raises(
        UserError, match=r"layer '0' \(Linear\) lets one sample see another in its gradient"
    ):
        check(mlp(Layer(function.apply)), records=20)


SINS: dict[str, Callable[[Tensor], Tensor]] = {
    "a mean that no gradient passes": lambda x: x - x.mean(dim=0).detach(),
    "the size of the batch": lambda x: x / len(x),
    "back to front": lambda x: x.flip(0),
    "the neighbour": lambda x: x + 0.1 * x.roll(1, dims=0),
    "the first one": lambda x: x + 1e-3 * x[:1],
    "the last one learns of the first": lambda x: torch.cat([x[:-1], x[-1:] + x[:1]]),
}


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("sin", SINS)
def test_ways_to_mix(sin: str, dropout: bool) -> None:
    model = mlp(nn.Dropout(0.5 if dropout else 0.0), above(4, SINS[sin]))
    with pytest.raises(UserError, match=r"layer '2' \(Layer\) lets one sample see another"):
        check(model, records=21)


def test_what_is_kept_of_large_batches_only_is_found() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("average", torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 4:
                self.average = x.detach().mean(dim=0)
            return x

    with pytest.raises(UserError, match=r"layer '1' \(Keeps\) keeps.*'average'"):
        check(mlp(Keeps()), records=20)


def test_a_model_that_takes_no_such_batch_is_told_where() -> None:
    def picky(x: Tensor) -> Tensor:
        if len(x) > 10:
            raise ValueError("ten at most")
        return x

    with pytest.raises(
        UserError, match=r"one sample and 12 of shape \[5\]: layer '1' \(Layer\) says: ten at most"
    ):
        check(mlp(Layer(picky)), records=12)


def looked_at(monkeypatch: pytest.MonkeyPatch, records: int, inputs: Tensor = VECTORS) -> list[int]:
    """The sizes of the batches that samples were compared in."""
    sizes: list[int] = []
    compare = batches._compare

    def spy(model: nn.Module, inputs: Tensor, group: int, *how: bool) -> None:
        sizes.append(len(inputs))
        compare(model, inputs, group, *how)

    monkeypatch.setattr(batches, "_compare", spy)
    check(mlp(), inputs, records=records)
    return sizes


def test_every_sample_is_compared_where_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert looked_at(monkeypatch, 40) == [12, 40, 40, 40, 40, 40]


def test_where_gradients_take_too_long_outputs_are_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batches, "SECONDS", 10.0)
    model, inputs = mlp(above(4, without_mean)), torch.randn(40, 5)
    assert (
        batches.check_growing_batches(model, inputs, SAMPLES, took=100.0, backward=True) == SAMPLES
    )
    with pytest.raises(UserError, match=r"layer '1' \(Layer\) lets one sample see another, so"):
        batches.check_growing_batches(model, inputs, SAMPLES, took=0.1, backward=False)


def test_a_slow_model_is_compared_in_smaller_batches_or_none(
    monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(batches, "SECONDS", 0.0)
    with caplog.at_level("INFO"):
        assert looked_at(monkeypatch, 40) == []
    assert f"in batches of {SAMPLES}, not of 40" in caplog.text


@pytest.mark.parametrize(
    ("took", "sizes"),
    [
        (0.1, [(3, 12), (12, 40), (40, None)]),
        (0.8, [(3, 7), (7, 17)]),
        (1.1, [(3, None), (30, 40)]),
        (9.0, [(3, None)]),
    ],
)
def test_batches_grow_as_far_as_two_seconds_go(
    took: float, sizes: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "SECONDS", 2.0)
    assert [(size, batches.next_size(size, took, 40)) for size, _ in sizes] == sizes


def test_no_more_are_compared_than_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zdp_bench.training.micro_batches.available_memory", lambda: 2**13)
    assert 3 < max(looked_at(monkeypatch, 2048)) < 200


def test_where_memory_runs_out_the_last_batch_that_fitted_counts() -> None:
    def greedy(x: Tensor) -> Tensor:
        if len(x) > 20:
            raise MemoryError("can't allocate memory")
        return x

    assert (
        batches.check_growing_batches(
            mlp(Layer(greedy)), torch.randn(60, 5), SAMPLES, took=0.1, backward=True
        )
        == 12
    )
