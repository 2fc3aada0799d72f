"""What `make_private` refuses before anything is built or read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Real

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from zdp_bench.config.plugins import own_keys
from zdp_bench.errors import UserError, require, unknown
from zdp_bench.gradients.clipping import trainable
from zdp_bench.privacy.mechanism import MOST, Sampling
from zdp_bench.privacy.statement import require_delta
from zdp_bench.training.distributed import Ranks
from zdp_bench.training.plan import Plan

LEAST_PUBLIC = 100  # of fewer units, one more or less moves batch_size / n by over 1 %


def check_arguments(
    model: nn.Module,
    batch_size: int | None,
    sample_rate: float | None,
    expected_batch: float | None,
    epochs: int,
    delta: float,
    micro_batch: int | None,
    seed: int | None,
    secure: bool,
    asked: dict[str, float | None],
) -> None:
    """Refuse values that cannot be meant, and a model that cannot be trained.

    Args:
        asked: noise and bound, by name: their ranges are the algorithm's.
    """
    numbers = {"epochs": epochs, "delta": delta} | asked
    drawn = {
        "batch_size": batch_size,
        "sample_rate": sample_rate,
        "expected_batch": expected_batch,
    }
    for name, value in (numbers | drawn).items():
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        require(is_number or value is None, name, repr(value), "must be a number")
    if (batch_size is None) == (sample_rate is None):
        raise UserError("give batch_size or sample_rate, and not both.")
    if (sample_rate is None) != (expected_batch is None):
        raise UserError(
            "sample_rate and expected_batch go together: the noisy sum is divided by the latter."
        )
    if batch_size is not None:
        require(batch_size >= 1, "batch_size", batch_size, "must be 1 or more")
    if sample_rate is not None and expected_batch is not None:
        require(0 < sample_rate <= 1, "sample_rate", sample_rate, "must lie in (0, 1]")
        in_range = 0 < expected_batch <= MOST
        require(in_range, "expected_batch", expected_batch, "must be above 0, and a size")
    require(epochs >= 1, "epochs", epochs, "must be 1 or more")
    require_delta("delta", delta)
    require(
        micro_batch is None or micro_batch >= 1, "micro_batch", micro_batch, "must be 1 or more"
    )
    require(seed is None or seed >= 0, "seed", seed, "must be 0 or more")
    require(
        seed is None or not secure,
        "seed",
        seed,
        "secure=True takes all randomness from the operating system; leave the seed out",
    )
    if isinstance(model, DistributedDataParallel):
        raise UserError(
            "model: give the module itself, not DistributedDataParallel's wrapper, which would add "
            "up gradients without noise: make_private adds up what the processes clipped."
        )
    if not model.training:
        raise UserError("the model is in eval mode: call model.train() before make_private.")
    if not trainable(model):
        raise UserError("no parameter of the model requires a gradient: there is nothing to train.")


def plan_of(
    batch_size: int | None,
    sample_rate: float | None,
    expected_batch: float,
    epochs: int,
    units: int,
) -> Plan:
    """Return the plan of a training: with `sample_rate` from what was given alone, not from n.

    Args:
        units: n, how many examples or owners there are.

    Raises:
        UserError: `batch_size` is above n, or n is too small to be public.
    """
    if sample_rate is not None:
        sampling = Sampling("poisson", float(sample_rate), float(expected_batch), 0)
        return Plan(sampling, epochs, max(1, round(epochs / sample_rate)))
    assert batch_size is not None
    few = (
        f"its rate is batch_size / n, and with only n = {units:,} to draw from one more or less "
        "changes that rate, which ε takes for public: give sample_rate and expected_batch instead, "
        "neither taken from the data"
    )
    require(units >= LEAST_PUBLIC, "batch_size", batch_size, few)
    too_large = f"the dataset has only {units:,} to draw from"
    require(batch_size <= units, "batch_size", batch_size, too_large)
    return Plan.poisson(units, batch_size / units, epochs)


def check_options(algorithm: str, options: Iterable[str], arguments: Iterable[str]) -> None:
    """Refuse what is neither an argument of `make_private` nor an option of the algorithm."""
    own = own_keys("algorithm", algorithm)
    for name in options:
        if name not in own:
            raise unknown("make_private: argument", name, {*own, *arguments} - {"options"})


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimiser that lacks a parameter that trains."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in trainable(model).items():
        if id(parameter) not in held:
            raise UserError(
                f"parameter '{name}' requires a gradient, but the optimizer does not hold it: make "
                "the optimizer from this model's parameters, or set requires_grad=False on it."
            )


def check_ranks(ranks: Ranks, seed: int | None, facts: Mapping[str, object]) -> None:
    """Refuse processes that would not train the same, and a seed for several of them.

    Rank 0 draws the noise, which covers rank 0's sum alone (`HedgedNoise`), so that a seed would be
    one safeguard short.
    """
    ranks.require_same(facts)
    alone = f"is for one process, and {ranks.size} train together; leave it out"
    require(seed is None or ranks.size == 1, "seed", seed, alone)
