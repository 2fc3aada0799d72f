"""Draw the examples of a step, and the uniform numbers by which each is augmented.

Every draw is a pure function of the step's random stream, so a resumed run draws the same examples.
With cryptographic randomness (`privacy.noise.SecureRandom`), a step that is repeated draws other
examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import ECB


class Random(Protocol):
    """The methods of numpy's Generator that a draw needs."""

    def random(self, size: int) -> np.ndarray: ...
    def choice(
        self,
        examples: int,
        /,
        size: int,
        replace: bool,
    ) -> np.ndarray: ...


def poisson(
    examples: int,
    sample_rate: float,
    rng: Random,
) -> np.ndarray:
    """Draw every example independently with probability `sample_rate`. The batch may be empty."""
    return np.flatnonzero(rng.random(examples) < sample_rate)


def place_each(
    identities: Sequence[bytes],
    places: int,
    key: bytes,
) -> np.ndarray:
    """Return a place in 0 … `places` − 1 for each identity, [n], by its hash under `key`.

    Formal guarantees: the place of an identity is a function of (identity, places, key) alone, so
    adding or removing another identity does not change it. Equal identities share a place. The
    number of distinct identities at a place is binomial: n/places on average, ± √(n/places).
    """
    hashes = [blake2b(identity, digest_size=8, key=key).digest() for identity in identities]
    return (_uniforms(b"".join(hashes)) * places).astype(np.int64)


def _uniforms(bits: bytes) -> np.ndarray:
    """Return a number in [0, 1) for every 8 bytes, from their highest 53 bits, [n]."""
    words = np.frombuffer(bits, dtype="<u8")
    return (words >> np.uint64(11)) * 2.0**-53


def subsets(identities: Sequence[bytes], cycle: int) -> np.ndarray:
    """Return the index of each example's or owner's subset, in 0 … `cycle` − 1, [n].

    The assignment is public, and the same in every run (see `place_each`). One example or owner
    more or less affects only the steps of its own subset. Subsets differ in size, but the divisor
    of a step's sum does not depend on that.
    """
    return place_each(identities, cycle, b"cyclic sampling.")


def uniform(
    examples: int,
    batch_size: int,
    rng: Random,
) -> np.ndarray:
    """Draw a fixed-size batch without replacement, [batch_size]."""
    return rng.choice(examples, size=batch_size, replace=False)


def shuffled(
    examples: int,
    batch_size: int,
    position: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """Return the `position`-th batch, from 0, of an epoch's permutation. The last may be short.

    Args:
        examples: number of training examples.
        batch_size: number of examples in a batch.
        position: index of the batch in the epoch.
        rng: the epoch's generator. Each batch needs a new one with the same seed.
    """
    first = position * batch_size
    permutation = rng.permutation(examples)
    return permutation[first : first + batch_size]


def uniforms_of(
    indices: np.ndarray,
    numbers: int,
    key: bytes,
) -> np.ndarray:
    """Return random numbers for each example, [B, numbers], uniform in [0, 1).

    They are the AES encryption, under the step's `key` of 128 bits, of the example's index in the
    training set, not of its position in the batch. Otherwise, one more example would change the
    numbers of all examples after it, and anyone who knows the seed would see more than one share
    change.
    """
    pairs = -(-numbers // 2)  # 128 bits make two numbers
    blocks = np.empty((len(indices), pairs, 2), dtype="<u8")
    blocks[:, :, 0] = np.asarray(indices)[:, None]
    blocks[:, :, 1] = np.arange(pairs)
    cipher = Cipher(AES(key), ECB()).encryptor()
    uniforms = _uniforms(cipher.update(blocks.tobytes()))
    return uniforms.reshape(len(indices), 2 * pairs)[:, :numbers]
