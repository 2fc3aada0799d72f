"""A clipping bound C that follows a quantile of the gradients' norms (Andrew et al. 2021).

A step releases one number more, the count of shares that were not clipped, with noise; C then moves
towards the bound that leaves the share `clip_quantile` of them unclipped (their Algorithm 1):

    C  ←  C · exp(−η (b̃ − γ)),   b̃ = ½ + (Σᵢ (bᵢ − ½) + noise) / m,   bᵢ = 1 if ‖gᵢ‖ ≤ C, else 0

with η = 0.2, m the expected batch, and at most twice or half as much in a step (ours).

The mechanism does not change from step to step, because the sum is released in units of C. One
share is then the vector (clip(gᵢ)/C, a·(bᵢ − ½)), of a norm of at most √(1 + a²/4) = JOINT_BOUND,
and every coordinate gets the same noise, σ·JOINT_BOUND: z = σ, the noise multiplier that is asked
for. So the gradients have the noise z_Δ = σ/√(1 − s) and the count σ_b = σ/(2√s), which is their
Theorem 1, z⁻² = z_Δ⁻² + (2σ_b)⁻², where the count takes the part s of 1/z². It is COUNT_SHARE: the
noise on the gradients grows by half a percent, and b̃ has a standard deviation of 5σ/m.

bᵢ − ½ is ±½ (0 of a broken share, which adds nothing to any block): one share more or less moves
the count by ½, a replaced one by 1, just as clipped gradients move by C and by 2C.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from zdp_bench.algorithms import mean
from zdp_bench.algorithms.clipped_gradients import Clipping, FixedBound
from zdp_bench.gradients import Batch, Shares, add_up
from zdp_bench.privacy.accounting import tight_epsilon
from zdp_bench.privacy.mechanism import Block, Mechanism

COUNT = "unclipped shares"  # the block's name; no parameter has a space in its own
COUNT_SHARE = 0.01  # s
JOINT_BOUND = 1 / math.sqrt(1 - COUNT_SHARE)
SCALE = 2 * math.sqrt(COUNT_SHARE / (1 - COUNT_SHARE))  # a
RATE = 0.2  # η
LEAST, MOST = 1e-12, 1e12  # of a bound; see `config.types.NORM`


class AdaptiveBound(FixedBound):
    """Gradients clipped at a bound that follows their norms, and the count of those below it.

    Formal guarantees: a share is at most JOINT_BOUND in units of the bound; z = noise_multiplier.
    """

    is_mean = False

    def __init__(
        self,
        clipping: Clipping,
        noise_multiplier: float,
        first_bound: float,
        quantile: float,
    ) -> None:
        super().__init__(clipping, noise_multiplier, first_bound)
        self.quantile = quantile
        self.carried["bound"] = first_bound

    @property
    def bound(self) -> float:
        """The bound that shares are clipped at now."""
        return self.carried["bound"]

    def blocks(self) -> list[Block]:
        blocks = self.clipping.blocks(JOINT_BOUND, self.noise_multiplier)
        least_std = min(block.std for block in blocks)
        return [*blocks, Block(COUNT, (1,), "float64", JOINT_BOUND, least_std, "real")]

    def accumulate(
        self,
        total: dict[str, Tensor],
        batch: Batch,
        shares: Shares | None,
    ) -> None:
        clipped = self.clipping.clipped_sum(batch, self.bound, shares)
        sums = {name: value / self.bound for name, value in clipped.sums.items()}
        sums[COUNT] = SCALE * count_unclipped(clipped.norms, self.bound).sum(dim=0)
        add_up(total, sums)

    def contributions(
        self,
        batch: Batch,
        shares: Shares | None,
    ) -> dict[str, Tensor]:
        clipped, norms = self.clipping.clipped(batch, self.bound, shares)
        rows = {name: value / self.bound for name, value in clipped.items()}
        rows[COUNT] = SCALE * count_unclipped(norms, self.bound)
        return rows

    def postprocess(
        self,
        noisy: dict[str, Tensor],
        expected_batch_size: float,
    ) -> dict[str, Tensor]:
        """Return the mean in its own units, and move the bound for the next step."""
        bound = self.bound
        count = float(noisy.pop(COUNT))
        unclipped = 0.5 + count / (SCALE * expected_batch_size)
        self.carried["bound"] = adapt_bound(bound, unclipped, self.quantile)
        return mean(noisy, expected_batch_size / bound)

    def report(
        self,
        mechanism: Mechanism,
        releases: int,
        delta: float,
    ) -> dict[str, Any]:
        """Return the bound, and the tight ε that the gradients alone would have."""
        alone = Mechanism.of_z(mechanism.z * JOINT_BOUND, mechanism.sampling)
        return {
            "clipping": {
                "quantile": self.quantile,
                "last_bound": self.bound,
                "count_share": COUNT_SHARE,
                "epsilon_without_count": tight_epsilon(alone, releases, delta),
            }
        }


def count_unclipped(norms: Tensor, bound: float) -> Tensor:
    """Return bᵢ − ½ of each share, [B, 1].

    Of norms [B, L] of layers that are clipped at C/√L each, b is the mean.
    """
    layers = norms if norms.dim() == 2 else norms.unsqueeze(1)
    limit = bound / math.sqrt(layers.shape[1])
    centred = (layers <= limit).double().mean(dim=1, keepdim=True) - 0.5
    is_whole = layers.isfinite().all(dim=1, keepdim=True)
    return torch.where(is_whole, centred, 0.0)


def adapt_bound(
    bound: float,
    unclipped: float,
    quantile: float,
) -> float:
    """Return the bound for the next step, from the share b̃ that this one left unclipped."""
    log_factor = RATE * (quantile - unclipped)
    log_factor = min(math.log(2), max(-math.log(2), log_factor))
    return min(MOST, max(LEAST, bound * math.exp(log_factor)))
