"""What mixes samples is found by running, and the layer that does is named."""

from __future__ import annotations

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


class BatchWideNorm(nn.Module):
    """What torchcvnn's LayerNorm does: statistics over the batch as well."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean()) / x.std()


class MixedBackward(torch.autograd.Function):
    """Forward, every sample for itself; backward, not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient * (1 + x.abs().mean())


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


def mixing() -> list[tuple[nn.Module, Tensor, str]]:
    torch.manual_seed(0)
    return [
        (
            convolutional(nn.Identity(), nn.BatchNorm2d(8)),
            IMAGES,
            r"layer '1\.1' \(BatchNorm2d\).*replace_batchnorm=group",
        ),
        (mlp(nn.BatchNorm1d(8)), VECTORS, r"layer '1' \(BatchNorm1d\)"),
        (mlp(nn.BatchNorm1d(8, track_running_stats=False)), VECTORS, r"layer '1' \(BatchNorm1d\)"),
        (
            nn.Sequential(BatchWideNorm(), mlp()),
            VECTORS,
            r"layer '0' \(BatchWideNorm\).*per-sample layer",
        ),
        (mlp(Layer(lambda x: x - x[:1])), VECTORS, r"layer '1' \(Layer\)"),
        (mlp(Layer(lambda x: x / x.abs().max())), VECTORS, r"layer '1' \(Layer\)"),
        (mlp(Layer(lambda x: torch.cumsum(x, dim=0))), VECTORS, r"layer '1' \(Layer\)"),
        (mlp(Layer(lambda x: x.flip(0))), VECTORS, r"layer '1' \(Layer\)"),
        (mlp(Layer(lambda x: x / len(x))), VECTORS, r"layer '1' \(Layer\)"),
        (mlp(Layer(lambda x: x.t().reshape(x.shape))), VECTORS, r"layer '1' \(Layer\)"),
        (
            mlp(Attention()),
            VECTORS,
            r"layer '1\.attention' \(MultiheadAttention\)|layer '1' \(Attention\)",
        ),
        (
            nn.Sequential(nn.Identity(), MixesInItsOwnForward()),
            VECTORS,
            r"layer '1' \(MixesInItsOwnForward\)",
        ),
        (MixesInItsOwnForward(), VECTORS, r"the model \(MixesInItsOwnForward\)"),
        (
            mlp(Layer(MixedBackward.apply)),
            VECTORS,
            r"layer '0' \(Linear\) lets one sample see another in its gradient",
        ),
    ]


@pytest.mark.parametrize("which", range(len(mixing())))
def test_what_mixes_samples_is_found_and_named(which: int) -> None:
    model, inputs, sentence = mixing()[which]
    with pytest.raises(UserError, match=sentence):
        check(model, inputs)


def test_a_single_leak_among_many_layers_is_found_at_its_place() -> None:
    layers: list[nn.Module] = [nn.Linear(8, 8) for _ in range(6)]
    layers.insert(4, Layer(lambda x: x + 1e-3 * x.mean(dim=0)))
    with pytest.raises(UserError, match=r"layer '5' \(Layer\)"):
        check(mlp(*layers))
