"""Who owns examples, patients or what a data set calls its unit: found, counted, split by them."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable

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


def require_one_spelling(where: str, what: str, names: Iterable[str]) -> None:
    """Refuse names that differ in their spelling alone: each would count as another owner.

    That is letter case, spaces, invisible characters, the form of Unicode, zeros before a number at
    the end, or the `.0` that pandas adds to one.

    Raises:
        UserError: names two of them.
    """
    spelt: dict[str, str] = {}
    for name in sorted(names):
        alike = spelt.setdefault(_plain(name), name)
        if alike != name:
            raise UserError(
                f"{where}: {what} {alike!r} and {what} {name!r} differ in case, spaces, zeros or "
                f"Unicode form alone, and would count as two; write every {what} in one way."
            )


def _plain(name: str) -> str:
    """Return what names of one owner have in common: 'P 007' -> 'p7', '7.0' -> '7'."""
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())
    text = "".join(c for c in text if c.isprintable() and not c.isspace())
    return re.sub(r"^([^\d.,]*)0*(\d+)(\.0*)?$", r"\1\2", text)
