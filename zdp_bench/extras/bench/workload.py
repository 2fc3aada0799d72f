"""One model on one batch of random examples: what the sides of a comparison share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zdp_bench.extras.bench.networks import NETWORKS
from zdp_bench.gradients import Batch
from zdp_bench.nn.memory_format import channels_last
from zdp_bench.registry import lookup

BOUND, RATE = 1.0, 1e-3


@dataclass(frozen=True)
class Workload:
    """One model on one batch of random examples, and the optimizer of every side.

    Attributes:
        loss: squares (of [B, 1] outputs), classes, or map (mean square of a map).
    """

    model: str
    input_shape: tuple[int, ...]
    outputs: int
    batch: int
    loss: Literal["squares", "classes", "map"]
    options: dict[str, Any] = field(default_factory=dict)
    optimizer: Literal["sgd", "adam"] = "sgd"

    @property
    def is_complex(self) -> bool:
        return self.model.startswith("complex")

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        make: Callable[..., nn.Module] = NETWORKS.get(self.model) or lookup("model", self.model)
        return make(tuple(self.input_shape), self.outputs, **self.options).to(device())

    def examples(self, last: bool) -> Batch:
        """Return inputs and targets; `last`: maps channels-last, best for convolutions."""
        torch.manual_seed(1)
        dtype = torch.complex64 if self.is_complex else torch.float32
        inputs = torch.randn(self.batch, *self.input_shape, dtype=dtype, device=device())
        inputs = channels_last(inputs) if last and inputs.dim() == 4 else inputs
        if self.loss == "classes":
            return inputs, torch.randint(0, self.outputs, (self.batch,), device=device())
        return inputs, torch.randn(self.batch, self.outputs, device=device())

    def loss_of(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """One loss per example, [B]."""
        if self.loss == "classes":
            return F.cross_entropy(outputs, targets, reduction="none")
        if self.loss == "map":
            return outputs.square().flatten(1).mean(dim=1)
        return (outputs - targets).square().flatten(1).sum(dim=1)

    def optimizer_of(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """torch's own, so that no side has a faster one than another."""
        made = torch.optim.Adam if self.optimizer == "adam" else torch.optim.SGD
        return made(parameters, lr=RATE)


def device() -> torch.device:
    """CUDA if there is a GPU, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def flat(tensors: dict[str, Tensor]) -> Tensor:
    """Join all tensors in one real vector."""
    return torch.cat(
        [
            torch.view_as_real(t.resolve_conj()).flatten() if t.is_complex() else t.flatten()
            for t in tensors.values()
        ]
    )


class Criterion(nn.Module):
    """A loss as Opacus's ghost mode wants it: one number per example, [B], whatever `reduction`
    says.
    """

    reduction = "sum"

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.workload = workload

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.workload.loss_of(outputs, targets)
