"""One step with Opacus, on a network of real layers, and on one with a complex layer.

For complex weights Opacus puts σ/√2 on each part, or in secure mode no noise on the imaginary one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn

SIGMA = 0.5
EXAMPLES = [(torch.zeros(4, dtype=torch.complex64), i % 3) for i in range(7)]
CLAIMED = {"noise_multiplier": SIGMA, "sample_rate": 1.0, "steps": 1}


class RealAndImaginary(nn.Module):
    """Real and imaginary parts as features."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(x).flatten(1)


class Modulus(nn.Module):
    """|x|"""

    def forward(self, x: Tensor) -> Tensor:
        return x.abs()


def real_layer(examples: list[tuple[Tensor, int]], seed: int) -> dict[str, Tensor]:
    """A real layer that sees both parts of the complex inputs."""
    torch.manual_seed(0)  # the same first weights in every run
    return _step(nn.Sequential(RealAndImaginary(), nn.Linear(8, 3, bias=False)), examples, seed)


def complex_layer(examples: list[tuple[Tensor, int]], seed: int) -> dict[str, Tensor]:
    """A complex layer, with the same claim."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 3, bias=False, dtype=torch.complex64)
    return _step(nn.Sequential(layer, Modulus()), examples, seed)


def _step(model: nn.Module, examples: list[tuple[Tensor, int]], seed: int) -> dict[str, Tensor]:
    private = GradSampleModule(model)
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5),
        noise_multiplier=SIGMA,
        max_grad_norm=1.0,
        expected_batch_size=len(EXAMPLES),
        generator=torch.Generator().manual_seed(seed),
    )
    x, y = torch.stack([x for x, _ in examples]), torch.tensor([y for _, y in examples])
    F.cross_entropy(private(x), y).backward()
    optimizer.step()
    return model.state_dict()
