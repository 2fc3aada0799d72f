"""Build the configured representation, check it against the data, and apply it.

`representation=NAME` is a public, fixed transform of one example in front of the model; see
`zdp_bench/representations`.
"""

from __future__ import annotations

import itertools
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
    fit: bool = True,
) -> Representation:
    """Return the configured representation for examples of this shape and dtype.

    See `representations.build` for `fit`.
    """
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
    representation = build(chosen.name, chosen.options, shape, dtype, fit)
    for facts in (representation.facts, *representation.facts.get("parts", [])):
        trained_on = str(facts.get("trained_on", ""))
        if trained_on and shares_data(trained_on, config.dataset.name):
            raise UserError(
                f"representation={chosen.name}: its weights were trained on {trained_on}, which "
                f"this run should keep private (dataset={config.dataset.name}), and no ε would "
                "cover that. Use weights from other data."
            )
    return representation


def shares_data(trained_on: str, private: str) -> bool:
    """Return True if the stated training data of weights may be the private data set.

    The name of a data set stands for the data set and what it reads by its card. Any other text,
    such as 'Fashion MNIST, train', matches if one name contains the other. 'folder' is the name of
    anyone's own data, so it matches no text.
    """
    public, own = _plain(trained_on), _plain(private)
    uses = {_plain(card.name): card.uses for card in cards()}
    names = {trained_on, uses.get(public) or trained_on}
    own_names = {private, uses.get(own) or private}
    if own == "folder" or (public in uses and own in uses):
        return not {*map(_plain, names)}.isdisjoint(map(_plain, own_names))
    return any(_contains(a, b) or _contains(b, a) for a, b in itertools.product(names, own_names))


def _contains(text: str, name: str) -> bool:
    """Return True if a text contains a name in any spelling. 'CIFAR-100' lacks 'cifar10'."""
    letters = _plain(name)
    pattern = r"[\W_]*".join(letters)
    if letters[-1:].isdigit():
        pattern += r"(?!\d)"
    return re.search(pattern, text.lower()) is not None


def _plain(name: str) -> str:
    return re.sub(r"[\W_]", "", name.lower())  # letters and digits of any script


def represent_data(config: Run, data: Splits) -> Splits:
    """Return the data set with each example replaced by its representation, if configured."""
    if config.representation is None:
        return data
    inputs, _ = data.test.batch(torch.arange(1))
    representation = build_representation(config, tuple(inputs.shape[1:]), inputs.dtype)
    options = sorted(config.dataset.options.items())
    key = f"{data.digest}:{config.dataset.name}:{options}"
    return represent_splits(representation, data, key, pick_device(config.device))
