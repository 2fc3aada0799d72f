"""What DP-SGD releases: gradients that are clipped at a bound, the same at every step.

`adaptive_bound` and `class_means` have the two other releases, each a class like `FixedBound`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from zdp_bench.algorithms import Problem, mean, parameter_block
from zdp_bench.gradients import Batch, ClippedSum, Engine, Shares, clipped_sum, reference
from zdp_bench.gradients.clipping import groups, trainable
from zdp_bench.privacy.mechanism import Block, Mechanism


@dataclass(frozen=True)
class Clipping:
    """How gradients are clipped, whatever the bound.

    Attributes:
        problem: the model, its loss, and how examples are sampled.
        per_layer: each of the L layers at C/√L; else the whole gradient at C.
        gamma: of automatic clipping (Bu et al. 2022), if any.
        engine: computes clipped sums.
        complex_scale: multiplies the gradients of complex parameters.
        complex_divisor: divides σC, for the noise on each of their parts.
    """

    problem: Problem
    per_layer: bool
    gamma: float | None
    engine: Engine
    complex_scale: float
    complex_divisor: float

    def blocks(
        self,
        bound: float,
        noise_multiplier: float,
    ) -> list[Block]:
        """Return the blocks of all parameters, whose shares are bounded together."""
        std = noise_multiplier * bound
        blocks = []
        for name, parameter in trainable(self.problem.model).items():
            if parameter.is_complex():
                part = std / self.complex_divisor
                blocks.append(parameter_block(name, parameter, bound, part, "circular"))
            else:
                blocks.append(parameter_block(name, parameter, bound, std, "real"))
        return blocks

    def clipped_sum(
        self,
        batch: Batch,
        bound: float,
        shares: Shares | None,
        into: dict[str, Tensor] | None = None,
    ) -> ClippedSum:
        """Return the sum of clipped gradients, and the norms before: `gradients.clipped_sum`."""
        return clipped_sum(
            self.problem.model,
            self.problem.loss,
            batch,
            bound,
            per_layer=self.per_layer,
            gamma=self.gamma,
            complex_scale=self.complex_scale,
            engine=self.engine,
            shares=shares,
            into=into,
        )

    def clipped(
        self,
        batch: Batch,
        bound: float,
        shares: Shares | None,
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return each clipped gradient, [B, *shape] by name, and the norms before, [B, groups]."""
        gradients = reference.share_gradients(
            self.problem.model,
            self.problem.loss,
            batch,
            shares,
            complex_scale=self.complex_scale,
        )
        together = groups(self.problem.model, bound, self.per_layer)
        return reference.clip(gradients, together, self.gamma)


class FixedBound:
    """Gradients clipped at C.

    Formal guarantees: a share is at most C; z = noise_multiplier.
    """

    is_mean = True  # the step's gradient is the mean of the release
    sets_weights = False  # the release gives the weights, and not a gradient, for the step to come

    def __init__(
        self,
        clipping: Clipping,
        noise_multiplier: float,
        max_grad_norm: float,
    ) -> None:
        self.clipping = clipping
        self.noise_multiplier = noise_multiplier
        self.max_grad_norm = max_grad_norm
        self.carried: dict[str, float] = {}  # see `Algorithm.carried`

    def blocks(self) -> list[Block]:
        """Return the blocks of a release; one bound holds for all."""
        return self.clipping.blocks(self.max_grad_norm, self.noise_multiplier)

    def accumulate(
        self,
        total: dict[str, Tensor],
        batch: Batch,
        shares: Shares | None,
    ) -> None:
        """Add the clipped shares of a batch to `total`."""
        self.clipping.clipped_sum(batch, self.max_grad_norm, shares, into=total)

    def contributions(
        self,
        batch: Batch,
        shares: Shares | None,
    ) -> dict[str, Tensor]:
        """Return the clipped shares, [B, *shape] by the block's name."""
        clipped, _ = self.clipping.clipped(batch, self.max_grad_norm, shares)
        return clipped

    def postprocess(
        self,
        noisy: dict[str, Tensor],
        expected_batch_size: float,
    ) -> dict[str, Tensor]:
        """Return the gradient, or the weights, from the noisy sum."""
        return mean(noisy, expected_batch_size)

    def report(
        self,
        mechanism: Mechanism,
        releases: int,
        delta: float,
    ) -> dict[str, Any]:
        """Return what a record's `privacy` section says of it."""
        return {}
