"""Who owns the training examples: patients, or what a data set calls its unit."""

from __future__ import annotations

import numpy as np

from zdp_bench.data import DatasetInfo, Splits
from zdp_bench.errors import UserError


def owners_of(data: Splits, asked: str) -> np.ndarray:
    """Return the number of each training example's patient, [n].

    Args:
        asked: the setting that needs to know, for the error.

    Raises:
        UserError: the data set does not say whose examples are whose.
    """
    if data.examples_per_patient == 1:  # groups may be files, each with examples of many
        return np.arange(len(data.train))
    if data.train.groups is None:
        raise UserError(
            f"{asked}: a patient owns up to {data.examples_per_patient} records "
            "of this data set, and it does not say which, so that they cannot be kept together."
        )
    return data.train.groups.numpy()


def count_owners(data: Splits | DatasetInfo, asked: str) -> int:
    """Return how many patients own the training examples.

    Raises:
        UserError: as `owners_of`.
    """
    if isinstance(data, Splits):
        return len(np.unique(owners_of(data, asked)))
    if data.owners is not None:
        return data.owners
    if data.examples_per_patient > 1:
        raise UserError(
            f"{asked}: a patient owns up to {data.examples_per_patient} records of this data set, "
            "and it does not say how many patients there are."
        )
    return data.train
