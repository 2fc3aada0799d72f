"""Identify and count the owners of examples, and split data sets by owner.

Owners are patients, or whatever a data set calls its unit.

Neighbouring data sets differ by one example or owner. Removing one shifts the positions of all that
follow, so examples are identified by their content and owners by their name, never by position.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from zdp_bench.data import DatasetInfo, Source, Splits
from zdp_bench.data.files import sha256
from zdp_bench.errors import UserError

BATCH = 1024  # examples that are digested at once
MAX_MIDDLE = 2  # of an owner's examples are taken from the middle; see `spread_evenly`

log = logging.getLogger(__name__)


def owners_of(data: Splits, setting: str) -> np.ndarray:
    """Return the number of each training example's owner, [n].

    Args:
        data: the data set.
        setting: the setting that needs owners, for the error.

    Raises:
        UserError: The data set does not say who owns which example.
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
    """Return a digest of each example's input and target, without augmentation, [n].

    The digest does not depend on other examples. Equal examples have equal digests.
    """
    digests = []
    for start in range(0, len(source), BATCH):
        indices = torch.arange(start, min(start + BATCH, len(source)))
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
    """Return the owner of each training example and an identifier of each owner.

    The identifier is the owner's name, its number in `groups` if the data set has no names, or the
    content of its only example if the data set has no groups. It does not depend on other owners.

    Args:
        data: the data set.
        setting: the setting that needs owners, for the error of `owners_of`.

    Returns:
        The index of each example's owner, [n], and the identifier at each index.
    """
    numbers, owner_of = np.unique(owners_of(data, setting), return_inverse=True)
    groups = data.train.groups
    if groups is None:
        return owner_of, identify_examples(data.train)
    if data.examples_per_patient == 1:  # `owners_of` then numbers the examples, not the groups
        numbers = groups.numpy()
    names = [str(number) for number in numbers]
    if data.owner_names:
        names = [data.owner_names[number] for number in numbers]
    return owner_of, [name.encode() for name in names]


def count_owners(data: Splits | DatasetInfo, setting: str) -> int:
    """Return the number of owners of training examples; reject a data set without owners."""
    owners = data.owners if isinstance(data, DatasetInfo) else data.train.groups
    if owners is None:
        raise UserError(
            f"{setting}: this data set does not state who owns which example (its training part "
            "has no groups), so only ε per example is known. Remove the key."
        )
    return owners if isinstance(owners, int) else len(owners.unique())


def place_owners(parts: dict[str, list[int]]) -> tuple[dict[str, slice], Tensor]:
    """Concatenate parts in one array, and number their owners from 0.

    Args:
        parts: number of examples of each owner, by part.

    Returns:
        The rows of each part, and the owner of each row, [n].
    """
    rows = {}
    start = 0
    for part, counts in parts.items():
        rows[part] = slice(start, start + sum(counts))
        start += sum(counts)
    all_counts = torch.tensor([count for counts in parts.values() for count in counts])
    return rows, torch.arange(len(all_counts)).repeat_interleave(all_counts)


def spread_evenly(count: int, chosen: int) -> np.ndarray:
    """Return the indices of `chosen` of an owner's `count` examples, such as slices, [chosen].

    Three or more are spread from the first to the last one. One or two would then be the ends,
    where a scan shows nothing, so they are in the middle of the whole, or of its two halves.
    """
    if chosen <= MAX_MIDDLE:
        return ((np.arange(chosen) + 0.5) * count / chosen).astype(int)
    return np.linspace(0, count - 1, chosen).round().astype(int)


def pick_test_owners(
    owners: Sequence[str],
    classes: Sequence[str],
    test_share: float,
    seed: int,
) -> set[str]:
    """Return the owners to test on, chosen by a keyed hash of their name.

    They are the owners whose hash, as a fraction, is below `test_share`, and the owner with the
    smallest hash of each class. A training owner therefore has no influence on the part of any
    other owner: without it, all others stay where they are.

    Args:
        owners: owner of each file.
        classes: class of each file.
        test_share: expected fraction of the owners to test on.
        seed: key of the hash.
    """
    key = str(seed).encode()
    hashes = {}
    for owner in owners:
        digest = blake2b(owner.encode(), digest_size=8, key=key).digest()
        hashes[owner] = int.from_bytes(digest)
    smallest: dict[str, str] = {}  # class -> its owner with the smallest hash
    for owner, label in zip(owners, classes, strict=True):
        smallest[label] = min(smallest.get(label, owner), owner, key=hashes.__getitem__)
    limit = test_share * 2**64
    below_limit = {owner for owner, value in hashes.items() if value < limit}
    return below_limit | set(smallest.values())


def hold_out_owners(
    owners: list[str],
    test_share: float,
    seed: int,
) -> np.ndarray:
    """Draw whole owners to test on until they own a fraction `test_share` of the examples.

    The draw depends on all owners, so use it only if the list of owners is public, as for a
    release.

    Args:
        owners: owner of each example.

    Returns:
        True for each test example, [n].
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


def warn_of_shared_files(
    paths: Sequence[Path],
    owners: Sequence[str],
    digests: Sequence[str],
    advice: str = "remove one of them",
) -> bool:
    """Return True, and warn once, if files of different owners have the same content.

    Args:
        paths: paths of the files.
        owners: name of each file's owner.
        digests: digest of each file's content.
        advice: what to do about such a file.
    """
    first_of: dict[str, int] = {}  # digest -> index of the first file that has it
    for index, content in enumerate(digests):
        first = first_of.setdefault(content, index)
        if owners[first] != owners[index]:
            log.warning(
                "%s: has the same content as %s, of %s, so that one owner counts as two; %s",
                paths[index],
                paths[first].name,
                owners[first],
                advice,
            )
            return True
    return False


def digest_files(paths: Sequence[Path], owners: Sequence[str]) -> list[str]:
    """Return the SHA-256 of each file; see `warn_of_shared_files` for the owners."""
    digests = [sha256(path) for path in paths]
    warn_of_shared_files(paths, owners, digests)
    return digests
