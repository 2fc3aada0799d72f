"""Whose examples are whose, in a training whose unit is not the example."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from zdp_bench.errors import UserError, require
from zdp_bench.training.plan import Patients

Unit = Sequence[Any] | Callable[[int], Any]


def find_owners(unit: Unit | None, examples: int, max_records: int | None) -> Patients | None:
    """Return the examples of each owner; None if an example is its own unit.

    Args:
        unit: each example's owner: a column, [n], or a function of the example's index. Owners are
            strings, numbers, or tuples of them: what compares by identity would never be the same
            owner twice.

    Raises:
        UserError: it is neither, has another length, or an owner is missing or cannot be compared.
    """
    if unit is None:
        rule = "is read with unit= only; add that, or leave it out"
        require(max_records is None, "max_records", max_records, rule)
        return None
    require(
        max_records is None or (isinstance(max_records, int) and max_records >= 1),
        "max_records",
        max_records,
        "must be a whole number, 1 or more",
    )
    if isinstance(unit, str | Mapping) or not (callable(unit) or hasattr(unit, "__len__")):
        raise UserError(
            f"unit={unit!r}: give the owner of each example, as a column of {examples:,} owners or "
            "as a function of an example's index."
        )
    column = [unit(index) for index in range(examples)] if callable(unit) else list(unit)
    if len(column) != examples:
        raise UserError(
            f"unit: it names the owners of {len(column):,} examples, and the dataset has "
            f"{examples:,}."
        )
    numbers: dict[Hashable, int] = {}
    owners = [
        numbers.setdefault(_comparable(owner, index), len(numbers))
        for index, owner in enumerate(column)
    ]
    return Patients.of(np.array(owners), max_records)


def owners_digest(owners: Patients | None) -> str:
    """Return the SHA-256 of who owns what; empty without owners."""
    if owners is None:
        return ""
    return hashlib.sha256(owners.examples.tobytes() + owners.starts.tobytes()).hexdigest()


def _comparable(owner: Any, index: int) -> Hashable:
    """Return an owner that equals itself in another example."""
    if hasattr(owner, "item"):  # a number of torch's or numpy's
        owner = owner.item()
    parts = owner if isinstance(owner, tuple) else (owner,)
    for part in parts:
        if not isinstance(part, str | bytes | int | float) or part != part:  # NaN
            raise UserError(
                f"unit: the owner of example {index:,} is {owner!r}, which is missing or cannot be "
                "compared: give strings or numbers, one for every example."
            )
    return owner
