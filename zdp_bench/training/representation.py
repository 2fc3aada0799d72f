"""The configured representation: built, checked against the data, applied, and read from a record.

`representation=NAME` is a public, fixed transform of one example in front of the model; see
`zdp_bench/representations`.
"""

from __future__ import annotations

import re

import torch

from zdp_bench.config.schema import Run
from zdp_bench.data import Splits
from zdp_bench.data.files import cards
from zdp_bench.errors import UserError
from zdp_bench.representations import Representation, build, refuse_changing, represent_splits
from zdp_bench.training.machine import pick_device


def build_representation(
    config: Run,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> Representation:
    """Return the configured representation for examples of this shape and dtype."""
    chosen = config.representation
    assert chosen is not None
    if config.dataset.options.get("augment"):
        raise refuse_changing(chosen.name)
    if config.trainer.augmentations:
        raise UserError(
            f"trainer.augmentations={config.trainer.augmentations} with representation="
            f"{chosen.name}: an example's representation is computed once, so all its views would "
            "be equal. Remove the key."
        )
    found = build(chosen.name, chosen.options, shape, dtype)
    for facts in (found.facts, *found.facts.get("parts", [])):
        known = str(facts.get("trained_on", ""))
        if known and shares_data(known, config.dataset.name):
            raise UserError(
                f"representation={chosen.name}: its weights were trained on {known}, which this "
                f"run should keep private (dataset={config.dataset.name}), and no ε would cover "
                "that. Use weights from other data."
            )
    return found


def shares_data(trained_on: str, private: str) -> bool:
    """True if the stated training data of weights may be the private data set.

    A data set's own name means that one and what its card says it reads; in other words,
    'Fashion MNIST, train', a name within the other is enough.
    """
    known, own = _plain(trained_on), _plain(private)
    uses = {_plain(card.name): _plain(card.uses) for card in cards()}
    left, right = ({name, uses.get(name) or name} for name in (known, own))
    if known in uses and own in uses:
        return bool(left & right)
    return any(a in b or b in a for a in left for b in right)


def _plain(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())


def represent_data(config: Run, data: Splits) -> Splits:
    """Return the data set with each example's representation in its place, if one is configured."""
    if config.representation is None:
        return data
    inputs = data.test.batch(torch.arange(1))[0]
    found = build_representation(config, tuple(inputs.shape[1:]), inputs.dtype)
    key = f"{data.digest}:{config.dataset.name}:{sorted(config.dataset.options.items())}"
    return represent_splits(found, data, key, pick_device(config.device))
