"""Split examples by who owns them: a patient, a speaker."""

from __future__ import annotations

from collections import Counter

import numpy as np


def hold_out_owners(owners: list[str], test_share: float, seed: int) -> np.ndarray:
    """Return True for the test examples: whole owners, drawn until `test_share` of the examples."""
    people = sorted(set(owners))
    counts = Counter(owners)
    test: set[str] = set()
    taken = 0
    for index in np.random.default_rng(seed).permutation(len(people)):
        if taken >= test_share * len(owners):
            break
        test.add(people[index])
        taken += counts[people[index]]
    return np.array([person in test for person in owners])


def most_of_one(owners: list[str], testing: np.ndarray) -> int:
    """Return the most training examples of any one owner."""
    training = (name for name, held in zip(owners, testing, strict=True) if not held)
    return max(Counter(training).values())
