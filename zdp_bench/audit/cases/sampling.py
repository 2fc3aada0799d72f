"""Batches drawn more often than the mechanism says."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from zdp_bench.audit.release import Release
from zdp_bench.privacy.mechanism import Block, Mechanism, Sampling
from zdp_bench.privacy.noise import stream
from zdp_bench.training.setup import Plan

RATE = 0.1
SHARP = 0.05  # the noise multiplier
DELTA = 1.1 * RATE  # beyond it, next to nothing can be told if an example is drawn at the rate


def release_sampled(seed: int, too_many: float = 1.0) -> Release:
    """One step's share of an example in very little noise: all that shows is whether it was drawn.

    Args:
        too_many: examples are drawn so many times as often as the mechanism says.
    """
    plan = Plan(Sampling("poisson", RATE * too_many, 4 * RATE * too_many, 4), 1, 1)

    def release(present: bool, count: int) -> Tensor:
        rng = np.random.default_rng(stream(seed, "audit", "sampled", int(present)))
        noise = rng.standard_normal(count) * SHARP
        keys = (f"{seed}:{int(present)}:{trial}" for trial in range(count))
        drawn = np.array([present and 0 in plan.draw(key, 0)[0] for key in keys])
        return torch.from_numpy(drawn + noise).unsqueeze(1)

    return release


def subsampled_mechanism() -> Mechanism:
    """Return the claim: one Gaussian release of a Poisson batch at `RATE`."""
    block = Block("share", (1,), "float64", 1.0, SHARP, "real")
    return Mechanism((block,), Sampling("poisson", RATE, 4 * RATE, 4))
