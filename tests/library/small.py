"""A small data set, network and loop that the tests of `make_private` share."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from zdp_bench import Private

EXAMPLES, CLASSES = 60, 3


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def data(changed: float = 0.0) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(EXAMPLES, 4, generator=generator)
    inputs[-1, -1] += changed
    return TensorDataset(inputs, torch.arange(EXAMPLES) % CLASSES)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, CLASSES))


def defaults(model: nn.Module) -> dict[str, Any]:
    """What the tests give `make_private` where nothing else matters."""
    return {
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.5),
        "dataset": data(),
        "loss": loss,
        "epochs": 2,
        "sample_rate": 0.2,
        "expected_batch": 12,
        "max_grad_norm": 0.8,
        "delta": 1e-3,
    }


def train(private: Private, most: int | None = None) -> list[Tensor]:
    """Take the steps that are left, or so many; return the first layer's weights after each."""
    seen = []
    for batch in private.batches():
        private.step(batch)
        seen.append(private.model[0].weight.detach().clone())  # type: ignore[index]
        if len(seen) == most:
            break
    return seen
