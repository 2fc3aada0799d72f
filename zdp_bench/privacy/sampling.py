"""Which records a step sees, and by what chance each is changed. Every draw is a pure function of the random stream of the step:
a resumed run draws the same.

With cryptographic randomness (`privacy.noise.SecureRandom`) there is no stream: a step that is drawn again sees other records.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import ECB


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


def chance_of(indices: np.ndarray, numbers: int, key: bytes) -> np.ndarray:
    """Each record's own random numbers, whoever is drawn beside it: [B, numbers], uniform in [0, 1).

    By the record's index and not by its place in the batch: one record more would move all that follow to other numbers, and
    whoever knows the seed would see more than one share change. AES under the step's `key` of 128 bits, of (record, place).
    """
    blocks = np.empty((len(indices), -(-numbers // 2), 2), dtype="<u8")  # 128 bits make two numbers
    blocks[..., 0], blocks[..., 1] = np.asarray(indices)[:, None], np.arange(blocks.shape[1])
    bits = np.frombuffer(Cipher(AES(key), ECB()).encryptor().update(blocks.tobytes()), dtype="<u8")
    return ((bits >> np.uint64(11)) * 2.0**-53).reshape(len(indices), 2 * blocks.shape[1])[
        :, :numbers
    ]
