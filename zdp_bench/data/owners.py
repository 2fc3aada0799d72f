"""Who owns examples, patients or what a data set calls its unit: found, counted, split by them.

Neighbouring data sets differ by one example or owner. Whatever follows from a position in the data
set changes for all that stand behind it, so examples and owners are known by their content or name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from zdp_bench.data import DatasetInfo, Source, Splits
from zdp_bench.errors import UserError

DIGESTED = 1024  # examples at once


def owners_of(data: Splits, setting: str) -> np.ndarray:
    """Return the number of each training example's patient, [n].

    Args:
        setting: the one that needs to know, for the error.

    Raises:
        UserError: the data set does not say whose examples are whose.
    """
    if data.examples_per_patient == 1:
        return np.arange(len(data.train))
    if data.train.groups is None:
        raise UserError(
            f"{setting}: a patient owns up to {data.examples_per_patient} examples of this data "
            "set, which does not state which ones, so they cannot be kept together."
        )
    return data.train.groups.numpy()


def identify_examples(source: Source) -> list[bytes]:
    """Return what identifies each example, whoever else is there: a digest of its content, [n].

    The content is input and target, without augmentation. Equal examples have equal digests.
    """
    digests = []
    for start in range(0, len(source), DIGESTED):
        indices = torch.arange(start, min(start + DIGESTED, len(source)))
        inputs, targets = source.batch(indices)
        rows = zip(_rows_of_bytes(inputs), _rows_of_bytes(targets), strict=True)
        for input_bytes, target_bytes in rows:
            content = blake2b(input_bytes, digest_size=16)
            content.update(target_bytes)
            digests.append(content.digest())
    return digests


def _rows_of_bytes(values: Tensor) -> np.ndarray:
    """Return the bytes of each example's values: [B, ...] -> uint8 [B, bytes]."""
    rows = values.resolve_conj().resolve_neg().contiguous().view(len(values), -1)
    return rows.view(torch.uint8).numpy()


def identify_owners(data: Splits, setting: str) -> tuple[np.ndarray, list[bytes]]:
    """Return the owner of each training example, counted from 0, [n], and what identifies each.

    That is the owner's name, or its number in `groups` if the data set gives no names; the content
    of the example if there are no groups. How many examples others own makes no difference.

    Args:
        setting: the one that needs to know, for the error of `owners_of`.
    """
    numbers, owner_of = np.unique(owners_of(data, setting), return_inverse=True)
    groups = data.train.groups
    if groups is None:
        return owner_of, identify_examples(data.train)
    if data.examples_per_patient == 1:  # `owners_of` counts the examples
        numbers = groups.numpy()
    names = [str(number) for number in numbers]
    if data.owner_names:
        names = [data.owner_names[number] for number in numbers]
    return owner_of, [name.encode() for name in names]


def count_owners(data: Splits | DatasetInfo, setting: str) -> int:
    """Return how many patients own the training examples; reject a set that does not say so."""
    owners = data.owners if isinstance(data, DatasetInfo) else data.train.groups
    if owners is None:
        raise UserError(
            f"{setting}: this data set does not state who owns which example (its training part "
            "has no groups), so only ε per example is known. Remove the key."
        )
    return owners if isinstance(owners, int) else len(owners.unique())


def place_owners(parts: dict[str, list[int]]) -> tuple[dict[str, slice], Tensor]:
    """Place parts one behind the other in one array, and number their owners.

    Args:
        parts: of each part, how many examples each owner has.

    Returns:
        the rows of each part, and the owner of each row, [n].
    """
    rows, start = {}, 0
    for part, counts in parts.items():
        rows[part] = slice(start, start + sum(counts))
        start += sum(counts)
    every = torch.tensor([count for counts in parts.values() for count in counts])
    return rows, torch.arange(len(every)).repeat_interleave(every)


def pick_test_owners(
    owners: Sequence[str],
    classes: Sequence[str],
    test_share: float,
    seed: int,
) -> set[str]:
    """Return the owners to test on: those whose keyed hash is below `test_share`.

    Of each class, the owner with the least hash is among them. So an owner that is trained on has
    no influence on where any other goes.

    Args:
        owners, classes: of each file.
    """
    key = str(seed).encode()
    hashes = {}
    for owner in owners:
        digest = blake2b(owner.encode(), digest_size=8, key=key).digest()
        hashes[owner] = int.from_bytes(digest)
    least: dict[str, str] = {}  # of each class
    for owner, label in zip(owners, classes, strict=True):
        least[label] = min(least.get(label, owner), owner, key=hashes.__getitem__)
    limit = test_share * 2**64
    below = {owner for owner, value in hashes.items() if value < limit}
    return below | set(least.values())


def hold_out_owners(
    owners: list[str],
    test_share: float,
    seed: int,
) -> np.ndarray:
    """Return True for the test examples: whole owners, drawn until `test_share` of the examples.

    Who is drawn depends on who is there: for a release, whose list of owners is public.
    """
    counts = Counter(owners)
    names = sorted(counts)
    held: set[str] = set()
    examples = 0
    for index in np.random.default_rng(seed).permutation(len(names)):
        if examples >= test_share * len(owners):
            break
        held.add(names[index])
        examples += counts[names[index]]
    return np.array([owner in held for owner in owners])
