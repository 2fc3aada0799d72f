"""The same loop with zdp-bench."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import zdp_bench


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """One loss per example, never a mean."""
    return F.cross_entropy(outputs, targets, reduction="none")


def train(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    batch_size: int,
    epochs: int,
    noise_multiplier: float,
    delta: float,
    ledger_file: Path,
) -> float:
    """Train `model` in place and return its ε."""
    with zdp_bench.make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.5),
        TensorDataset(inputs, targets),
        loss=loss,
        epochs=epochs,
        batch_size=batch_size,
        noise_multiplier=noise_multiplier,
        max_grad_norm=1.0,
        delta=delta,
        ledger=ledger_file,
    ) as private:
        private.resume()  # if it was saved before
        for batch in private.batches():
            private.step(batch)
        private.save()
    return private.epsilon
