"""Train a model of timm privately: `python timm_model.py`."""

from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import TensorDataset

import zdp_bench


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """One loss per example, never a mean."""
    return F.cross_entropy(outputs, targets, reduction="none")


def train(folder: Path, name: str = "test_convnext", epochs: int = 2) -> float:
    """Train on random images, to be replaced by yours, and return ε.

    With `pretrained=True` ε covers your images, and not those that the weights came from.
    """
    dataset = TensorDataset(torch.randn(128, 3, 32, 32), torch.arange(128) % 10)
    model = timm.create_model(name, num_classes=10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    private = zdp_bench.make_private(
        model,
        optimizer,
        dataset,
        loss=loss,
        epochs=epochs,
        batch_size=32,
        target_epsilon=8.0,
        max_grad_norm=1.0,
        delta=1e-3,
        ledger=folder / "ledger.jsonl",
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, private.steps)
    private.resume(schedule)
    for batch in private.batches():
        private.step(batch)
        schedule.step()
        private.save(schedule)
    private.close()
    return private.epsilon


if __name__ == "__main__":
    print(f"ε = {train(Path('timm-run')):.2f}")
