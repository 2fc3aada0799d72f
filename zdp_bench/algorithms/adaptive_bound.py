"""A clipping bound C that follows a quantile of the gradients' norms (Andrew et al. 2021).

Each step also releases the noisy number of shares that were not clipped. C then moves towards the
bound that leaves the fraction γ = `clip_quantile` of the shares unclipped (their Algorithm 1):

    C  ←  C · exp(−η (b̃ − γ)),   b̃ = ½ + (Σᵢ (bᵢ − ½) + noise) / m,   bᵢ = 1 if ‖gᵢ‖ ≤ C, else 0

with η = 0.2 and the expected batch size m. Here C at most doubles or halves in a step, which the
paper does not require.

The sum is released in units of C, so that the mechanism is the same at every step. A share is then
the vector (clip(gᵢ)/C, a·(bᵢ − ½)) with a norm of at most √(1 + a²/4) = JOINT_BOUND. Every
coordinate gets the same noise, σ·JOINT_BOUND, so z = σ, the configured noise multiplier. The
gradients have the noise multiplier z_Δ = σ/√(1 − s) and the count has σ_b = σ/(2√s). This is their
Theorem 1, z⁻² = z_Δ⁻² + (2σ_b)⁻², in which the count takes the fraction s of 1/z². With
s = COUNT_FRACTION, the noise on the gradients grows by half a percent, and b̃ has a standard
deviation of 5σ/m.

bᵢ − ½ is ±½, or 0 if a share is not finite and contributes nothing. Adding or removing a share
therefore changes the count by ½, and replacing one by 1, just as it changes the sum of clipped
gradients by C and by 2C.
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

COUNT = "unclipped shares"  # name of the count's block; the space rules out a parameter's name
COUNT_FRACTION = 0.01  # s
JOINT_BOUND = 1 / math.sqrt(1 - COUNT_FRACTION)
COUNT_SCALE = 2 * math.sqrt(COUNT_FRACTION / (1 - COUNT_FRACTION))  # a
RATE = 0.2  # η
MIN_BOUND, MAX_BOUND = 1e-12, 1e12  # as in `config.types.NORM`


class AdaptiveBound(FixedBound):
    """The release of gradients clipped at a bound that follows their norms, and of the count.

    Formal guarantees: the norm of a share is at most JOINT_BOUND in units of the current bound;
    z = noise_multiplier.
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
        """The current clipping norm C."""
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
        sums[COUNT] = COUNT_SCALE * count_unclipped(clipped.norms, self.bound).sum(dim=0)
        add_up(total, sums)

    def contributions(
        self,
        batch: Batch,
        shares: Shares | None,
    ) -> dict[str, Tensor]:
        clipped, norms = self.clipping.clipped(batch, self.bound, shares)
        rows = {name: value / self.bound for name, value in clipped.items()}
        rows[COUNT] = COUNT_SCALE * count_unclipped(norms, self.bound)
        return rows

    def postprocess(
        self,
        noisy: dict[str, Tensor],
        expected_batch_size: float,
    ) -> dict[str, Tensor]:
        """Return the mean gradient, no longer in units of C, and update C for the next step."""
        bound = self.bound
        count = float(noisy.pop(COUNT))
        unclipped = 0.5 + count / (COUNT_SCALE * expected_batch_size)
        self.carried["bound"] = adapt_bound(bound, unclipped, self.quantile)
        return mean(noisy, expected_batch_size / bound)

    def report(
        self,
        mechanism: Mechanism,
        releases: int,
        delta: float,
    ) -> dict[str, Any]:
        """Return the current bound, and the tight ε that the gradients would have alone."""
        gradients_alone = Mechanism.of_z(mechanism.z * JOINT_BOUND, mechanism.sampling)
        return {
            "clipping": {
                "quantile": self.quantile,
                "last_bound": self.bound,
                "count_share": COUNT_FRACTION,
                "epsilon_without_count": tight_epsilon(gradients_alone, releases, delta),
            }
        }


def count_unclipped(norms: Tensor, bound: float) -> Tensor:
    """Return bᵢ − ½ of each share, [B, 1].

    Args:
        norms: norms before clipping, [B], or [B, L] if each of L layers is clipped at C/√L. In the
            latter case, bᵢ is the fraction of layers that were not clipped.
        bound: C.
    """
    layer_norms = norms if norms.dim() == 2 else norms.unsqueeze(1)
    layer_bound = bound / math.sqrt(layer_norms.shape[1])
    centred = (layer_norms <= layer_bound).double().mean(dim=1, keepdim=True) - 0.5
    is_finite = layer_norms.isfinite().all(dim=1, keepdim=True)
    return torch.where(is_finite, centred, 0.0)


def adapt_bound(
    bound: float,
    unclipped: float,
    quantile: float,
) -> float:
    """Return the bound for the next step.

    Args:
        bound: the current bound.
        unclipped: noisy fraction b̃ of shares that this step left unclipped.
        quantile: fraction γ that should be left unclipped.
    """
    log_factor = RATE * (quantile - unclipped)
    log_factor = min(math.log(2), max(-math.log(2), log_factor))
    return min(MAX_BOUND, max(MIN_BOUND, bound * math.exp(log_factor)))
