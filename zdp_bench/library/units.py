"""Whose presence a training in your own loop hides: an example's, or an owner's."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zdp_bench.data.owner_names import require_named
from zdp_bench.errors import UserError, require
from zdp_bench.training.plan import Patients

Unit = Sequence[Any] | Callable[[int], Any]  # each example's owner
# What a ledger says of owners whose number is private: a digest of them would tell it.
PRIVATE_OWNERS = "owners"


@dataclass(frozen=True, eq=False)
class Units:
    """What steps draw from: examples, or owners.

    Attributes:
        owners: the examples of each owner; None if an example is its own unit.
        count: how many there are.
        most_owned: the most examples that one of them brings to a step.
        digest: of who owns what; empty without owners.
        stated: what the ledger and an export say of owners.
    """

    owners: Patients | None
    count: int
    most_owned: int
    digest: str
    stated: str


def find_units(
    unit: Unit | None, examples: int, max_examples: int | None, number_is_private: bool
) -> Units:
    """Return what the steps of a training draw from.

    Args:
        unit: each example's owner: a column, [n], or a function of the example's index. Owners are
            strings, numbers, or tuples of them, which do not compare by identity.
        examples: how many there are.
        max_examples: at most so many examples of an owner.
        number_is_private: nothing that is stated may follow from the number of units.

    Raises:
        UserError: an owner is missing or has two spellings, or `max_examples` is missing where
            owners' sizes are private.
    """
    owners = find_owners(unit, examples, max_examples)
    if owners is None:
        return Units(None, examples, 1, "", "")
    digest = _digest(owners)
    if not number_is_private:
        return Units(owners, owners.count, owners.largest, digest, digest)
    rule = "with sample_rate and unit, it says what an owner brings at most; no data may say it"
    require(max_examples is not None, "max_examples", max_examples, rule)
    assert max_examples is not None
    return Units(owners, owners.count, max_examples, digest, PRIVATE_OWNERS)


def find_owners(unit: Unit | None, examples: int, max_examples: int | None) -> Patients | None:
    """Return the examples of each owner; None if an example is its own unit.

    Args:
        unit: each example's owner: a column, [n], or a function of the example's index. Owners are
            strings, numbers, or tuples of them, which do not compare by identity.
    """
    if unit is None:
        rule = "applies to unit= only; add that, or remove it"
        require(max_examples is None, "max_examples", max_examples, rule)
        return None
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
    numbers: dict[tuple[Any, ...], int] = {}
    owners = [
        numbers.setdefault(_comparable(owner, index), len(numbers))
        for index, owner in enumerate(column)
    ]
    kinds = sorted({" and ".join(type(part).__name__ for part in owner) for owner in numbers})
    if len(kinds) > 1:
        raise UserError(
            f"unit: owners are of several types ({', '.join(kinds)}), and one that is written as "
            "both would count as two: make all strings, or all whole numbers."
        )
    for parts in zip(*numbers, strict=True):
        texts = [p.decode(errors="replace") if isinstance(p, bytes) else p for p in parts]
        require_named("unit", "owner", (texts[number] for number in owners))
    return Patients.of(np.array(owners), max_examples)


def _digest(owners: Patients) -> str:
    """Return the SHA-256 of who owns what."""
    return hashlib.sha256(owners.examples.tobytes() + owners.starts.tobytes()).hexdigest()


def _comparable(owner: Any, index: int) -> tuple[Any, ...]:
    """Return the parts of an owner that equals itself in another example."""
    if hasattr(owner, "item"):  # a number of torch's or numpy's
        owner = owner.item()
    parts = owner if isinstance(owner, tuple) else (owner,)
    for part in parts:
        if not isinstance(part, str | bytes | int | float) or part != part:  # NaN
            raise UserError(
                f"unit: the owner of example {index:,} is {owner!r}, which is missing or cannot be "
                "compared: give strings or numbers, one for every example."
            )
    return parts
