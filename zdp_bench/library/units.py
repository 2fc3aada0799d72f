"""`Units`: the unit of privacy of a training in your own loop, an example or an owner."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from zdp_bench.data.owner_names import require_named
from zdp_bench.errors import UserError, require, wrong_type
from zdp_bench.training.plan import Patients

Unit = Sequence[Any] | Callable[[int], Any]  # the owner of each example
# Stated instead of the owners' digest if their number is private, because the digest reveals it.
PRIVATE_OWNERS = "owners"


@dataclass(frozen=True, eq=False)
class Units:
    """The units that the steps of a training draw: examples or owners.

    Attributes:
        owners: Examples of each owner; None if the unit is an example.
        count: Number of units.
        max_owned: Largest number of a unit's examples in a step.
        digest: Digest of which owner has which examples; empty without owners.
        stated: What the ledger and an export state about owners: `digest`, or `PRIVATE_OWNERS` if
            the number of owners is private.
    """

    owners: Patients | None
    count: int
    max_owned: int
    digest: str
    stated: str


def find_units(
    unit: Unit | None, num_examples: int, max_examples: int | None, number_is_private: bool
) -> Units:
    """Return the units that the steps of a training draw.

    Args:
        unit: Owner of each example: a column, [n], or a function of the example's index. Owners are
            strings, numbers, or tuples of them. None if the unit is an example.
        num_examples: Number of examples n.
        max_examples: Largest number of an owner's examples in a step; None for no limit.
        number_is_private: Whether the number of units must not affect anything that is stated.

    Raises:
        UserError: An owner is missing or has two spellings, or `max_examples` is missing although
            the number of an owner's examples is private.
    """
    owners = find_owners(unit, num_examples, max_examples)
    if owners is None:
        return Units(owners=None, count=num_examples, max_owned=1, digest="", stated="")
    digest = _digest(owners)
    if not number_is_private:
        return Units(owners, owners.count, owners.largest, digest, stated=digest)
    rule = (
        "is required with sample_rate and unit, because the number of an owner's examples is "
        "private: choose it without looking at the data"
    )
    require(max_examples is not None, "max_examples", max_examples, rule)
    assert max_examples is not None
    return Units(owners, owners.count, max_examples, digest, stated=PRIVATE_OWNERS)


def find_owners(unit: Unit | None, num_examples: int, max_examples: int | None) -> Patients | None:
    """Return the examples of each owner; None if the unit is an example.

    See `find_units` for the arguments and errors.
    """
    if unit is None:
        rule = "has an effect with unit= only: add unit=, or remove max_examples"
        require(max_examples is None, "max_examples", max_examples, rule)
        return None
    # A set has no order, and a table's entries are the names of its columns.
    is_other = isinstance(unit, str | bytes | Mapping | Set | type) or hasattr(unit, "columns")
    is_column = hasattr(unit, "__len__") and getattr(unit, "ndim", 1) > 0
    if is_other or not (callable(unit) or is_column):
        raise wrong_type(
            "unit",
            unit,
            f"a column of {num_examples:,} owners",
            'give the owner of each example, such as table["patient"] or, of two parts, '
            'table[["site", "patient"]].to_numpy(), or a function of the example\'s index',
        )
    column = [unit(index) for index in range(num_examples)] if callable(unit) else list(unit)
    if len(column) != num_examples:
        raise UserError(
            f"unit: it names the owners of {len(column):,} examples, but the dataset has "
            f"{num_examples:,}."
        )
    number_of: dict[tuple[Any, ...], int] = {}  # parts of an owner -> number, in order of examples
    owner_numbers = []
    for index, owner in enumerate(column):
        parts = _comparable_parts(owner, index)
        owner_numbers.append(number_of.setdefault(parts, len(number_of)))
    types = sorted({" and ".join(type(part).__name__ for part in parts) for parts in number_of})
    if len(types) > 1:
        raise UserError(
            f"unit: owners are of several types ({', '.join(types)}), so that one owner could "
            "count as two: use strings for all, or whole numbers for all."
        )
    for names in zip(*number_of, strict=True):  # one part of each owner, such as all sites
        texts = [_to_text(name) for name in names]
        require_named("unit", "owner", (texts[number] for number in owner_numbers))
    return Patients.of(np.array(owner_numbers), max_examples)


def _to_text(name: Any) -> Any:
    return name.decode(errors="replace") if isinstance(name, bytes) else name


def _digest(owners: Patients) -> str:
    """Return the SHA-256 of which owner has which examples."""
    content = owners.examples.tobytes() + owners.starts.tobytes()
    return hashlib.sha256(content).hexdigest()


def _as_python(value: Any) -> Any:
    """Return the Python values in a tensor, an array or a NumPy number, with dates as text.

    `tolist` would return dates as numbers, even a missing date.
    """
    if isinstance(value, np.generic | np.ndarray) and value.dtype.kind in "mM":
        value = value.astype(str)
    return value.tolist() if hasattr(value, "tolist") else value


def _comparable_parts(owner: Any, index: int) -> tuple[Any, ...]:
    """Return an owner as a tuple of strings or numbers, which compare by value.

    Tensors compare by identity, so the same owner would count as another one in each example. A
    row of an array is a tuple of its numbers.

    Raises:
        UserError: The owner of example `index` is missing or does not compare by value.
    """
    if hasattr(owner, "tolist"):  # a tensor, an array or a NumPy number
        values = _as_python(owner)
        owner = tuple(values) if isinstance(values, list) else values
    parts = owner if isinstance(owner, tuple) else (owner,)
    parts = tuple(map(_as_python, parts))
    for part in parts:
        # NaN does not equal itself.
        if not isinstance(part, str | bytes | int | float) or part != part:
            raise UserError(
                f"unit: the owner of example {index:,} is {owner!r}: every example needs an owner "
                "that is a string or a number, such as str(date) for a date."
            )
    return parts
