"""What `make_private` refuses before anything is built or read."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Real

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from zdp_bench.config.plugins import own_keys
from zdp_bench.errors import UserError, require, unknown
from zdp_bench.gradients.clipping import trainable
from zdp_bench.privacy.delta import require_delta
from zdp_bench.training.distributed import Ranks


def check_arguments(
    model: nn.Module,
    batch_size: int,
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
    numbers = {"batch_size": batch_size, "epochs": epochs, "delta": delta} | asked
    for name, value in numbers.items():
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        require(is_number or value is None, name, repr(value), "must be a number")
    require(batch_size >= 1, "batch_size", batch_size, "must be 1 or more")
    require(epochs >= 1, "epochs", epochs, "must be 1 or more")
    require_delta("delta", delta)
    require(
        micro_batch is None or micro_batch >= 1, "micro_batch", micro_batch, "must be 1 or more"
    )
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


def check_ranks(ranks: Ranks, run: str, seed: int | None) -> None:
    """Refuse processes that would not train the same, and a seed for several of them.

    Rank 0 draws the noise, which covers rank 0's sum alone (`HedgedNoise`), so that a seed would be
    one safeguard short.

    Args:
        run: the digest of mechanism, plan and owners.
    """
    if ranks.max(run != ranks.broadcast(run)):
        raise UserError(
            "the processes do not train the same: give each of them the same model, data set, "
            "owners and arguments."
        )
    alone = f"is for one process, and {ranks.size} train together; leave it out"
    require(seed is None or ranks.size == 1, "seed", seed, alone)
