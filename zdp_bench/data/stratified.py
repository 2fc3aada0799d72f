"""A split into a training and a test part with equal shares of every class."""

from __future__ import annotations

import math

import numpy as np


def stratified_split(
    labels: np.ndarray, test_share: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices to train and to test on, in random order.

    They are those of scikit-learn's `train_test_split(..., stratify=labels)`, which takes a second
    to import. Both parts must hold as many examples as there are classes, or more.

    Args:
        labels: [n], two or more of each class.
        test_share: between 0 and 1; the count is rounded up.
    """
    _, classes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    tested = math.ceil(test_share * len(labels))
    random = np.random.RandomState(seed)
    of_training = _share_out(counts, len(labels) - tested, random)
    of_test = _share_out(counts - of_training, tested, random)
    in_order = np.argsort(classes, kind="stable")
    train, test = [], []
    for members, to_train, to_test in zip(
        np.split(in_order, np.cumsum(counts)[:-1]), of_training, of_test, strict=True
    ):
        shuffled = members[random.permutation(len(members))]
        train.append(shuffled[:to_train])
        test.append(shuffled[to_train : to_train + to_test])
    return random.permutation(np.concatenate(train)), random.permutation(np.concatenate(test))


def _share_out(counts: np.ndarray, wanted: int, random: np.random.RandomState) -> np.ndarray:
    """Return how many of each class make up `wanted`: its share, rounded to keep the total.

    The classes with the largest remainders are rounded up; among equal ones, the seed chooses.
    """
    shares = counts / counts.sum() * wanted
    taken = np.floor(shares)
    missing = int(wanted - taken.sum())
    remainders = shares - taken
    for remainder in np.unique(remainders)[::-1]:
        if missing == 0:
            break
        (equal,) = np.where(remainders == remainder)
        raised = random.choice(equal, size=min(len(equal), missing), replace=False)
        taken[raised] += 1
        missing -= len(raised)
    return taken.astype(int)
