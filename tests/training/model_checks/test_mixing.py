"""What mixes samples is found by running, in three samples or in larger batches, and the layer
that does is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.training.model_checks.models import (
    CLASSES,
    IMAGES,
    VECTORS,
    Layer,
    check,
    convolutional,
    mlp,
)
from zdp_bench.errors import UserError
from zdp_bench.training.model_checks import SAMPLES, mixing


@pytest.fixture(autouse=True)
def time_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is."""
    monkeypatch.setattr(mixing, "SECONDS", 1e9)


class BatchWideNorm(nn.Module):
    """What torchcvnn's LayerNorm does: statistics over the batch as well."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean()) / x.std()


class MixesInItsOwnForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) - self.first(x).mean(dim=0))


class Attention(nn.Module):
    """batch_first left at False: attends over the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x.unsqueeze(1), x.unsqueeze(1), x.unsqueeze(1))[0].squeeze(1)


MIXING: dict[str, tuple[Callable[[], nn.Module], Tensor, str]] = {
    "batch norm": (
        lambda: convolutional(nn.Identity(), nn.BatchNorm2d(8)),
        IMAGES,
        r"layer '1\.1' \(BatchNorm2d\).*replace_batchnorm=group",
    ),
    "batch norm of vectors": (
        lambda: mlp(nn.BatchNorm1d(8, track_running_stats=False)),
        VECTORS,
        r"layer '1' \(BatchNorm1d\)",
    ),
    "statistics of the batch": (
        lambda: nn.Sequential(BatchWideNorm(), mlp()),
        VECTORS,
        r"layer '0' \(BatchWideNorm\).*per-sample layer",
    ),
    "attention over samples": (
        lambda: mlp(Attention()),
        VECTORS,
        r"layer '1\.attention' \(MultiheadAttention\)|layer '1' \(Attention\)",
    ),
    "a forward of its own": (
        lambda: nn.Sequential(nn.Identity(), MixesInItsOwnForward()),
        VECTORS,
        r"layer '1' \(MixesInItsOwnForward\)",
    ),
    "the model's forward": (MixesInItsOwnForward, VECTORS, r"the model \(MixesInItsOwnForward\)"),
}


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_samples_is_found_and_named(name: str) -> None:
    model, inputs, sentence = MIXING[name]
    torch.manual_seed(0)
    with pytest.raises(UserError, match=sentence):
        check(model(), inputs)


SINS: dict[str, Callable[[Tensor], Tensor]] = {
    "the mean": lambda x: x - x.mean(dim=0),
    "a mean that no gradient passes": lambda x: x - x.mean(dim=0).detach(),
    "the size of the batch": lambda x: x / len(x),
    "the largest": lambda x: x / x.abs().max(),
    "all before": lambda x: torch.cumsum(x, dim=0),
    "other numbers' places": lambda x: x.t().reshape(x.shape),
    "back to front": lambda x: x.flip(0),
    "the neighbour": lambda x: x + 0.1 * x.roll(1, dims=0),
    "the first one": lambda x: x + 1e-3 * x[:1],
    "the last one learns of the first": lambda x: torch.cat([x[:-1], x[-1:] + x[:1]]),
}


def above(limit: int, mix: Callable[[Tensor], Tensor]) -> nn.Module:
    """A layer that mixes where more samples come than `limit`, and else passes them on."""
    return Layer(lambda x: mix(x) if len(x) > limit else x)


@pytest.mark.parametrize(("limit", "records"), [(0, SAMPLES), (4, 21)])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("sin", SINS)
def test_ways_to_mix(sin: str, dropout: float, limit: int, records: int) -> None:
    model = mlp(nn.Dropout(dropout), above(limit, SINS[sin]))
    with pytest.raises(UserError, match=r"layer '2' \(Layer\) lets one sample see another"):
        check(model, records=records)


@pytest.mark.parametrize("limit", [4, 100])
def test_a_layer_that_mixes_above_so_many_samples_passes_below(limit: int) -> None:
    model = mlp(above(limit, SINS["the mean"]))
    check(model, records=limit)
    with pytest.raises(UserError, match=r"^layer '1' \(Layer\) lets one sample see another,"):
        check(model, records=limit + 1)


def test_a_single_leak_among_many_layers_is_found_at_its_place() -> None:
    layers: list[nn.Module] = [nn.Linear(8, 8) for _ in range(6)]
    layers.insert(4, Layer(lambda x: x + 1e-3 * x.mean(dim=0)))
    with pytest.raises(UserError, match=r"layer '5' \(Layer\)"):
        check(mlp(*layers))


class Mixed(torch.autograd.Function):
    """Forward, every sample for itself; backward, not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient * (1 + x.abs().mean())


class MixedAboveFour(Mixed):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return Mixed.backward(ctx, gradient) if len(gradient) > 4 else gradient


class Divided(Mixed):
    """By how many samples there are, which is private too."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient / len(gradient) if len(gradient) > 4 else gradient


@pytest.mark.parametrize(
    ("function", "records"), [(Mixed, SAMPLES), (MixedAboveFour, 20), (Divided, 20)]
)
def test_what_mixes_in_its_backward_pass_only_is_found(
    function: type[torch.autograd.Function], records: int
) -> None:
    with pytest.raises(
        UserError, match=r"layer '0' \(Linear\) lets one sample see another in its gradient"
    ):
        check(mlp(Layer(function.apply)), records=records)


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


def compared(monkeypatch: pytest.MonkeyPatch, records: int) -> list[int]:
    """The sizes of the larger batches that samples were compared in."""
    sizes: list[int] = []
    compare = mixing._compare

    def spy(model: nn.Module, inputs: Tensor, *rest: Any) -> None:
        sizes.append(len(inputs))
        compare(model, inputs, *rest)

    monkeypatch.setattr(mixing, "_compare", spy)
    check(mlp(), records=records)
    assert sizes[:SAMPLES] == [SAMPLES] * SAMPLES
    return sizes[SAMPLES:]


def test_every_sample_is_compared_where_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compared(monkeypatch, 40) == [12, 40, 40, 40, 40, 40]


def test_a_slow_model_is_compared_in_three_samples_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(mixing, "SECONDS", 0.0)
    with caplog.at_level("INFO"):
        assert compared(monkeypatch, 40) == []
    assert f"in batches of {SAMPLES}, not of 40" in caplog.text


def test_no_more_are_compared_than_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zdp_bench.training.batches.available_memory", lambda: 2**13)
    assert 3 < max(compared(monkeypatch, 2048)) < 200


def test_where_memory_runs_out_the_last_batch_that_fitted_counts() -> None:
    def greedy(x: Tensor) -> Tensor:
        if len(x) > 20:
            raise MemoryError("can't allocate memory")
        return x

    model, inputs = mlp(Layer(greedy)), torch.randn(60, 5)
    assert mixing.check_growing_batches(model, inputs, took=0.1) == 12
