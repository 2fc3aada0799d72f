"""Which records a step sees. Each draw is a pure function of the random stream of the step: a resumed run draws the same.

With cryptographic randomness (`privacy.noise.SecureRandom`) there is no stream: a step that is drawn again sees other records.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np


class Random(Protocol):
    """What a draw needs of its randomness; numpy's Generator has it."""

    def random(self, size: int) -> np.ndarray: ...
    def choice(self, records: int, /, size: int, replace: bool) -> np.ndarray: ...


def poisson(records: int, sample_rate: float, rng: Random) -> np.ndarray:
    """Every record independently with probability `sample_rate`; the batch may be empty."""
    return np.flatnonzero(rng.random(records) < sample_rate)


def uniform(records: int, batch_size: int, rng: Random) -> np.ndarray:
    """A fixed-size batch drawn without replacement, anew at every step."""
    return rng.choice(records, size=batch_size, replace=False)


def shuffled(records: int, batch_size: int, position: int, rng: np.random.Generator) -> np.ndarray:
    """The `position`-th batch of an epoch's permutation; `rng` must be the epoch's. The last batch may be short."""
    return rng.permutation(records)[position * batch_size : (position + 1) * batch_size]
