"""Plain, non-private training, for comparison with private rows.

Its ε is infinite, and the ledger states that.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from zdp_bench.algorithms import Algorithm, Problem, parameter_block
from zdp_bench.gradients import Batch, add_up, reference
from zdp_bench.gradients.clipping import trainable
from zdp_bench.nn.memory_format import arrange
from zdp_bench.privacy.mechanism import Mechanism
from zdp_bench.registry import register


@register("algorithm", "sgd")
class SGD(Algorithm):
    """Unclipped gradients without noise, in the same step as all other algorithms."""

    sums_gradients = True

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem, noise_multiplier=0.0)

    def mechanism(self) -> Mechanism:
        blocks = [
            parameter_block(name, parameter, math.inf, 0.0, "none")
            for name, parameter in trainable(self.problem.model).items()
        ]
        return Mechanism(tuple(blocks), self.problem.sampling)

    def accumulate(
        self,
        total: dict[str, Tensor],
        batch: Batch,
    ) -> None:
        inputs, targets = batch
        model = self.problem.model
        parameters = trainable(model)
        outputs = model(arrange(model, inputs))
        loss = self.problem.loss(outputs, targets).sum()
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        add_up(total, dict(zip(parameters, gradients, strict=True)))

    def contributions(self, batch: Batch) -> dict[str, Tensor]:
        return reference.per_sample_gradients(self.problem.model, self.problem.loss, batch)
