"""Which records a step sees. Each draw is a pure function of (random stream of the step): a resumed run draws the same."""

from __future__ import annotations

import numpy as np


def poisson(records: int, sample_rate: float, rng: np.random.Generator) -> np.ndarray:
    """Every record independently with probability `sample_rate`; the batch may be empty."""
    return np.flatnonzero(rng.random(records) < sample_rate)


def uniform(records: int, batch_size: int, rng: np.random.Generator) -> np.ndarray:
    """A fixed-size batch drawn without replacement, anew at every step."""
    return rng.choice(records, size=batch_size, replace=False)


def shuffled(records: int, batch_size: int, position: int, rng: np.random.Generator) -> np.ndarray:
    """The `position`-th batch of an epoch's permutation; `rng` must be the epoch's. The last batch may be short."""
    return rng.permutation(records)[position * batch_size : (position + 1) * batch_size]
