"""A private training loop with Opacus."""

import torch
import torch.nn.functional as F
from opacus import PrivacyEngine
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def train(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    batch_size: int,
    epochs: int,
    noise_multiplier: float,
    delta: float,
) -> float:
    """Train `model` in place and return its ε."""
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=batch_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine = PrivacyEngine()
    private, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=noise_multiplier,
        max_grad_norm=1.0,
    )
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(private(x), y).backward()
            optimizer.step()
    return engine.get_epsilon(delta)
