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

import torch
from torch import Tensor

from zdp_bench.privacy.accounting import tight_epsilon
from zdp_bench.privacy.mechanism import Block, Mechanism

COUNT = "unclipped shares"  # the block's name; no parameter has a space in its own
COUNT_SHARE = 0.01  # s
JOINT_BOUND = 1 / math.sqrt(1 - COUNT_SHARE)
SCALE = 2 * math.sqrt(COUNT_SHARE / (1 - COUNT_SHARE))  # a
RATE = 0.2  # η
LEAST, MOST = 1e-12, 1e12  # of a bound; see `config.types.NORM`


def count_block(std: float) -> Block:
    """Return the block of the count, with the least noise that another block has."""
    return Block(COUNT, (1,), "float64", JOINT_BOUND, std, "real")


def count_unclipped(norms: Tensor, bound: float, each: bool) -> dict[str, Tensor]:
    """Return a·(bᵢ − ½) of each share, [B, 1], or summed up, [1].

    Of norms [B, L] of layers that are clipped at C/√L each, b is the mean.
    """
    layers = norms if norms.dim() == 2 else norms.unsqueeze(1)
    limit = bound / math.sqrt(layers.shape[1])
    centred = (layers <= limit).double().mean(dim=1) - 0.5
    centred = torch.where(layers.isfinite().all(dim=1), centred, 0.0)
    return {COUNT: SCALE * (centred.unsqueeze(1) if each else centred.sum().view(1))}


def adapt_bound(
    bound: float, noisy: dict[str, Tensor], quantile: float, expected_batch_size: float
) -> float:
    """Remove the noisy count from a release; return the bound for the next step."""
    unclipped = 0.5 + float(noisy.pop(COUNT)) / (SCALE * expected_batch_size)
    most = math.log(2)
    moved = bound * math.exp(min(most, max(-most, RATE * (quantile - unclipped))))
    return min(MOST, max(LEAST, moved))


def epsilon_without_count(mechanism: Mechanism, releases: int, delta: float) -> float:
    """Return the tight ε that as many releases of the gradients alone would have."""
    alone = Mechanism.of_z(mechanism.z * JOINT_BOUND, mechanism.sampling)
    return tight_epsilon(alone, releases, delta)
