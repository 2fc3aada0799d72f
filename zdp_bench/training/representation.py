"""The configured representation: built, checked against the data, applied, and read from a record.

`representation=NAME` is a public, fixed transform of one example in front of the model; see
`zdp_bench/representations`.
"""

from __future__ import annotations

import torch

from zdp_bench.config.schema import Run
from zdp_bench.data import Splits
from zdp_bench.errors import UserError
from zdp_bench.representations import Representation, build, represent_splits
from zdp_bench.training.machine import pick_device
from zdp_bench.training.public_start import find_card


def build_representation(config: Run, shape: tuple[int, ...], dtype: torch.dtype) -> Representation:
    """Return the configured representation for examples of this shape and dtype.

    Raises:
        UserError: it does not take such examples, its weights are not there, or they were trained
            on the data set that is to stay private.
    """
    chosen = config.representation
    assert chosen is not None
    found = build(chosen.name, chosen.options, shape, dtype)
    own = find_card(config.dataset.name)
    private = {config.dataset.name, own.uses if own else ""}
    known = str(found.facts.get("trained_on") or "")
    if known and {name.replace("_", "") for name in private} & {known.lower().replace("_", "")}:
        raise UserError(
            f"representation={chosen.name}: its weights were trained on {known}, which this run is "
            "to keep private, and no ε would cover that. Take weights of other data."
        )
    return found


def represent_data(config: Run, data: Splits) -> Splits:
    """Return the data set with each example's representation in its place, if one is configured.

    Raises:
        UserError: see `build_representation` and `represent_splits`.
    """
    if config.representation is None:
        return data
    inputs = data.test.batch(torch.arange(1))[0]
    found = build_representation(config, tuple(inputs.shape[1:]), inputs.dtype)
    key = f"{data.digest}:{config.dataset.name}:{sorted(config.dataset.options.items())}"
    return represent_splits(found, data, key, pick_device(config.device))
