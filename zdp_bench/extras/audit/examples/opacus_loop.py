"""An epoch with Opacus on a small network, with Poisson batches and with shuffled batches.

Both claim the ε of Poisson batches. That claim relies on an example being left out of all T batches
with probability (1 − q)ᵀ, but a shuffled epoch uses every example. The noise is small here, so that
the audit shows the difference in seconds; at σ = 1, it would need far too many runs.
"""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F
from opacus import PrivacyEngine
from torch import Tensor, nn
from torch.utils.data import DataLoader

SIGMA = 0.1
BATCH = 4  # 9 examples, or 10 with the canary, make 3 batches: Opacus takes a rate of 1/3
EXAMPLES = [(torch.zeros(6), i % 3) for i in range(9)]
CLAIMED = {"noise_multiplier": SIGMA, "sample_rate": 1 / 3, "steps": 3}

logging.getLogger("opacus").setLevel(logging.ERROR)  # it reports every empty first batch


def poisson(examples: list[tuple[Tensor, int]], seed: int) -> dict[str, Tensor]:
    """Train with Poisson batches, as Opacus is meant to be used."""
    return _train(examples, seed, poisson_sampling=True)


def shuffled(examples: list[tuple[Tensor, int]], seed: int) -> dict[str, Tensor]:
    """Train with the loader's shuffled batches, which Opacus accounts for as Poisson batches."""
    return _train(examples, seed, poisson_sampling=False)


def _train(
    examples: list[tuple[Tensor, int]],
    seed: int,
    poisson_sampling: bool,
) -> dict[str, Tensor]:
    torch.manual_seed(0)  # the same initial weights in every run
    model = nn.Sequential(
        nn.Linear(6, 8, bias=False),
        nn.Tanh(),
        nn.Linear(8, 3, bias=False),
    )
    batch_generator = torch.Generator().manual_seed(2 * seed)
    noise_generator = torch.Generator().manual_seed(2 * seed + 1)
    private, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader=DataLoader(
            examples,  # type: ignore[arg-type]
            batch_size=BATCH,
            shuffle=True,
            generator=batch_generator,
        ),
        noise_multiplier=SIGMA,
        max_grad_norm=1.0,
        poisson_sampling=poisson_sampling,
        noise_generator=noise_generator,
    )
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(private(x), y)
        loss.backward()
        optimizer.step()
    return model.state_dict()
