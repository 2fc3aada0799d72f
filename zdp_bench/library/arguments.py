"""Check the arguments of `make_private` before anything is built or read.

Each function raises `UserError` for an argument that cannot be used.
"""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from zdp_bench.config.plugins import plugin_keys
from zdp_bench.errors import UserError, require, unknown
from zdp_bench.library.model_check import require_module
from zdp_bench.library.optimizers import Several, require_held
from zdp_bench.privacy.mechanism import MAX_COUNT
from zdp_bench.training.build import require_step

MAX_SEED = 2**64 - 1
# Libraries that wrap the user's optimizer in an object with the attribute `optimizer`.
WRAPPING_LIBRARIES = {"lightning", "pytorch_lightning", "accelerate"}


def require_trainable(model: nn.Module) -> None:
    """Reject a model that private steps cannot train."""
    require_module(model)
    if isinstance(model, DistributedDataParallel):
        raise UserError(
            "model: give the module itself, not its DistributedDataParallel wrapper, which would "
            "average unclipped gradients: make_private sums the clipped gradients of all processes."
        )
    for name, parameter in model.named_parameters():
        if parameter.is_conj() or parameter.is_neg():
            raise UserError(
                f"parameter '{name}' is a conjugate or negative view, which optimizers cannot "
                "update: materialize it, as in nn.Parameter(z.conj().resolve_conj())."
            )
    if not model.training:
        raise UserError("the model is in eval mode: call model.train() before make_private.")


def require_loss(loss: Any) -> None:
    """Reject a loss that cannot be called."""
    if not callable(loss):
        raise UserError(
            f"loss={loss!r}: give a function of (outputs, targets) that returns one loss per "
            'example, such as torch.nn.CrossEntropyLoss(reduction="none").'
        )


def require_whole(key: str, value: Any, min_value: int, max_value: int) -> None:
    """Reject a value that is not a whole number from `min_value` to `max_value`."""
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    rule = f"must be a whole number from {min_value} to {max_value:,}"
    require(is_whole and min_value <= value <= max_value, key, value, rule)


def require_whole_or_none(key: str, value: Any, min_value: int, max_value: int) -> None:
    """Reject a value that is neither None nor a whole number within the limits."""
    if value is not None:
        require_whole(key, value, min_value, max_value)


def require_number(key: str, value: Any) -> None:
    """Reject a value that is not a real number."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    require(is_number, key, value, "must be a number")


def require_sampling(
    batch_size: int | None, sample_rate: float | None, expected_batch: float | None
) -> None:
    """Reject a sampling rate that is out of range, given twice or not, or without its divisor."""
    if (batch_size is None) == (sample_rate is None):
        raise UserError("give batch_size or sample_rate, and not both.")
    if (sample_rate is None) != (expected_batch is None):
        raise UserError(
            "sample_rate and expected_batch go together: each step divides the noisy sum by "
            "expected_batch."
        )
    if sample_rate is not None:
        require_number("sample_rate", sample_rate)
        rule = f"must be at least {1 / MAX_COUNT:g} and at most 1"
        require(1 / MAX_COUNT <= sample_rate <= 1, "sample_rate", sample_rate, rule)
    if expected_batch is not None:
        require_number("expected_batch", expected_batch)
        rule = f"must be above 0 and at most {MAX_COUNT:,}"
        require(0 < expected_batch <= MAX_COUNT, "expected_batch", expected_batch, rule)


def require_randomness(seed: int | None, secure: bool) -> None:
    """Reject a seed that is out of range, or that is combined with `secure`."""
    require_whole_or_none("seed", seed, 0, MAX_SEED)
    rule = "secure=True uses the operating system's randomness; remove the seed"
    require(seed is None or not secure, "seed", seed, rule)


def require_options(algorithm: str, options: Iterable[str], arguments: Iterable[str]) -> None:
    """Reject keyword arguments that neither `make_private` nor the algorithm has.

    Args:
        algorithm: Name of the algorithm.
        options: Names of the keyword arguments that are not arguments of `make_private`.
        arguments: Names of the arguments of `make_private`, for the error.
    """
    keys = plugin_keys("algorithm", algorithm)
    for name in options:
        if name not in keys:
            raise unknown("make_private: argument", name, {*keys, *arguments} - {"options"})


def check_optimizer(model: nn.Module, optimizers: Any) -> Any:
    """Return one optimizer, or several in one (`Several`).

    Args:
        model: The model.
        optimizers: An optimizer, or a list or tuple of them.

    Raises:
        UserError: A value is not a torch optimizer, an optimizer cannot take a private step, or
            together they do not have each trained parameter exactly once.
    """
    if isinstance(optimizers, list | tuple):
        optimizer: Any = Several(tuple(_unwrap(member) for member in optimizers))
    else:
        optimizer = _unwrap(optimizers)
    require_held(dict(model.named_parameters()), optimizer)
    return optimizer


def _unwrap(optimizer: Any) -> torch.optim.Optimizer:
    """Return the torch optimizer that a training library may have wrapped."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(
            f"optimizer: {type(optimizer).__name__} is not an optimizer of torch.optim: create one "
            "from the model's parameters. Step a scheduler yourself, after private.step."
        )
    library = type(optimizer).__module__.partition(".")[0]
    if library in WRAPPING_LIBRARIES:
        optimizer = getattr(optimizer, "optimizer", optimizer)
    try:
        require_step(optimizer)
    except ValueError as error:
        raise UserError(f"optimizer: {error}") from None
    return optimizer
