"""The release of plain DP-SGD: gradients clipped at a bound that is the same at every step.

The other releases of DP-SGD, in `adaptive_bound` and `class_means`, derive from `FixedBound`.
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
    """How gradients are clipped, for any bound.

    Attributes:
        problem: model, loss and sampling.
        per_layer: clip each of the L layers at C/√L instead of the whole gradient at C.
        gamma: γ of automatic clipping (Bu et al. 2022); None for plain clipping.
        engine: engine that computes clipped sums.
        complex_scale: factor on the gradients of complex parameters.
        complex_divisor: divides σC for the noise on their real and on their imaginary part.
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
        """Return a block for each trainable parameter. The bound holds for all blocks jointly."""
        std = noise_multiplier * bound
        blocks = []
        for name, parameter in trainable(self.problem.model).items():
            if parameter.is_complex():
                part_std = std / self.complex_divisor
                blocks.append(parameter_block(name, parameter, bound, part_std, "circular"))
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
        """Return the sum of clipped gradients and the norms before clipping.

        See `gradients.clipped_sum`.
        """
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
        """Return the clipped gradient of each share and the norms before clipping.

        Returns:
            Gradients [B, *shape] by name, and norms [B, groups], for B shares.
        """
        gradients = reference.share_gradients(
            self.problem.model,
            self.problem.loss,
            batch,
            shares,
            complex_scale=self.complex_scale,
        )
        clip_groups = groups(self.problem.model, bound, self.per_layer)
        return reference.clip(gradients, clip_groups, self.gamma)


class FixedBound:
    """The release of gradients clipped at C.

    Formal guarantees: the norm of a share is at most C; z = noise_multiplier.
    """

    is_mean = True  # the step's gradient is the noisy sum divided by the expected batch size
    sets_weights = False  # True if the next release sets the weights instead of giving a gradient

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
        """Return the blocks of a release. They have one common bound."""
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
        """Return the clipped shares, block name -> [B, *shape]."""
        clipped, _ = self.clipping.clipped(batch, self.max_grad_norm, shares)
        return clipped

    def postprocess(
        self,
        noisy: dict[str, Tensor],
        expected_batch_size: float,
    ) -> dict[str, Tensor]:
        """Return the gradient, or the weights if `sets_weights`, from the noisy sum."""
        return mean(noisy, expected_batch_size)

    def report(
        self,
        mechanism: Mechanism,
        releases: int,
        delta: float,
    ) -> dict[str, Any]:
        """Return the release's entries of a record's `privacy` section."""
        return {}
