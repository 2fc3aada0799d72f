"""Split data into a training and a test part in which all classes have the same frequency."""

from __future__ import annotations

import math

import numpy as np


def stratified_split(
    labels: np.ndarray, test_share: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the training and the test part, in random order.

    They are the same as those of scikit-learn's `train_test_split(..., stratify=labels)`, which
    takes a second to import. Each part must have at least as many examples as there are classes.

    Args:
        labels: label of each example [n], with at least two examples per class.
        test_share: fraction of the examples to test on; their number is rounded up.
        seed: seed of the draw.
    """
    _, classes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    num_test = math.ceil(test_share * len(labels))
    random = np.random.RandomState(seed)
    train_counts = _allocate(counts, len(labels) - num_test, random)
    test_counts = _allocate(counts - train_counts, num_test, random)
    in_order = np.argsort(classes, kind="stable")
    train, test = [], []
    indices_of_classes = np.split(in_order, np.cumsum(counts)[:-1])
    for members, to_train, to_test in zip(
        indices_of_classes, train_counts, test_counts, strict=True
    ):
        shuffled = members[random.permutation(len(members))]
        train.append(shuffled[:to_train])
        test.append(shuffled[to_train : to_train + to_test])
    return random.permutation(np.concatenate(train)), random.permutation(np.concatenate(test))


def _allocate(counts: np.ndarray, total: int, random: np.random.RandomState) -> np.ndarray:
    """Distribute a total over the classes in proportion to their counts, in whole numbers.

    The classes with the largest remainders are rounded up; among equal ones, the seed chooses.
    """
    exact = counts / counts.sum() * total
    taken = np.floor(exact)
    missing = int(total - taken.sum())
    remainders = exact - taken
    for remainder in np.unique(remainders)[::-1]:
        if missing == 0:
            break
        (equal,) = np.where(remainders == remainder)
        raised = random.choice(equal, size=min(len(equal), missing), replace=False)
        taken[raised] += 1
        missing -= len(raised)
    return taken.astype(int)
