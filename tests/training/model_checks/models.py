"""Small models and layers to be checked, and the check itself with an algorithm that asks nothing
of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zdp_bench.algorithms import Problem
from zdp_bench.nn import surgery
from zdp_bench.privacy.mechanism import Sampling
from zdp_bench.registry import lookup
from zdp_bench.training import model_checks

CLASSES = 4
IMAGES = torch.zeros(0, 2, 6, 6)
VECTORS = torch.zeros(0, 5)
COMPLEX = torch.zeros(0, 5, dtype=torch.complex64)
LABELS = torch.zeros(0, dtype=torch.int64)
NOTHING_FOUND: Any = model_checks.Checked([], None, None)  # type: ignore[arg-type]


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def check(
    model: nn.Module, inputs: Tensor = VECTORS, loss: Callable[..., Tensor] = cross_entropy
) -> list[str]:
    problem = Problem(model, loss, Sampling("poisson", 0.1, 8.0, 80))
    algorithm = lookup("algorithm", "zeta_dp_sgd")(problem, noise_multiplier=1.0, max_grad_norm=1.0)
    return model_checks.check(model, algorithm, loss, (inputs, LABELS)).fixed_state


def mlp(*middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), *middle, nn.Linear(8, CLASSES))


def convolutional(*middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 8, 3), nn.Sequential(*middle), nn.ReLU(), nn.Flatten(), nn.Linear(128, CLASSES)
    )


class Layer(nn.Module):
    """A layer made of a function, so that each sin is one line."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def clean() -> dict[str, tuple[nn.Module, Tensor]]:
    """Models that keep samples apart, each with inputs of its shape."""
    torch.manual_seed(0)
    return {
        "mlp": (mlp(nn.ReLU()), VECTORS),
        "layer norm": (mlp(nn.LayerNorm(8)), VECTORS),
        "dropout": (mlp(nn.Dropout(0.5)), VECTORS),
        "group norm": (convolutional(nn.GroupNorm(2, 8)), IMAGES),
        "instance norm": (convolutional(nn.InstanceNorm2d(8, affine=True)), IMAGES),
        "batch norm in evaluation": (
            convolutional(surgery.FrozenBatchNorm(nn.BatchNorm2d(8))),
            IMAGES,
        ),
        "fold and unfold": (mlp(Layer(lambda x: torch.tanh(x.view(-1, 2)).view(-1, 8))), VECTORS),
        "complex": (lookup("model", "complex_mlp")((5,), CLASSES, hidden=[6]), COMPLEX),
        "real": (lookup("model", "real_mlp")((5,), CLASSES, hidden=[6]), VECTORS),
    }
