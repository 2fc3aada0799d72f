"""Hold out the examples of whole owners from the training part, for validation.

Validation examples are public: they influence what is trained, and no ε covers them.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import torch

from zdp_bench.data import DatasetInfo, Part, Splits
from zdp_bench.data.owners import identify_owners
from zdp_bench.errors import UserError
from zdp_bench.privacy.sampling import place_each

KEY = "dataset.validation_share"
DEFAULT = 0.1  # fraction of the owners to hold out if validation examples are needed
PLACES = 10_000
SEED = b"validation owner"


def pick_owners(data: Splits, share: float) -> np.ndarray:
    """Return whether each training example is held out, [n].

    The hash of an owner's name decides, or of its number if owners have no names, or of the
    example's content if there are no owners. So adding or removing an owner does not affect others,
    and every run on a data set holds out the same owners. About `share` of the owners are held out.

    Raises:
        UserError: the data set has validation examples, does not state who owns several examples,
            or has too few owners.
    """
    if data.validation is not None:
        raise UserError(
            f"{KEY}={share:g}: this data set has validation examples of its own. Remove the key."
        )
    owner_of, identities = identify_owners(data, KEY)
    is_owner_held_out = place_each(identities, PLACES, SEED) < round(share * PLACES)
    is_held_out: np.ndarray = is_owner_held_out[owner_of]
    if is_held_out.all() or not is_held_out.any():
        raise UserError(
            f"{KEY}={share:g}: holds out {is_held_out.sum():,} of {len(is_held_out):,} training "
            f"examples, of {len(identities):,} owners; choose another share."
        )
    return is_held_out


def hold_out(
    data: Splits,
    is_held_out: np.ndarray,
    share: float,
) -> Splits:
    """Return the data set with some examples as its validation part.

    Args:
        data: the data set.
        is_held_out: whether each training example is held out, [n].
        share: fraction of the owners that are held out, for the digest of the new data set.
    """
    rows = torch.arange(len(is_held_out))
    chosen = torch.from_numpy(is_held_out)
    notes = [data.notes] if data.notes else []
    return replace(
        data,
        train=Part(data.train, rows[~chosen]),
        validation=Part(data.train, rows[chosen]),
        notes="; ".join([*notes, f"{is_held_out.sum():,} training examples held out to validate"]),
        digest=hashlib.sha256(f"{data.digest}:validation {share!r}".encode()).hexdigest(),
    )


def expect_held_out(info: DatasetInfo, share: float) -> DatasetInfo:
    """Return a data set's expected counts with a part held out, if its files are not there."""
    train = info.train - round(share * info.train)
    owners = info.owners and info.owners - round(share * info.owners)
    return replace(info, train=train, validation=info.train - train, owners=owners)
