"""Rejects arguments of `make_private` that cannot be used, before anything is built or read."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral
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

LARGEST_SEED = 2**64 - 1
WRAPPERS = {"lightning", "pytorch_lightning", "accelerate"}  # around an optimizer of the caller's


def require_trainable(model: nn.Module) -> None:
    """Reject a model that no private step can train."""
    require_module(model)
    if isinstance(model, DistributedDataParallel):
        raise UserError(
            "model: give the module itself, not DistributedDataParallel's wrapper, which would add "
            "up gradients without noise: make_private adds up what the processes clipped."
        )
    for name, parameter in model.named_parameters():
        if parameter.is_conj() or parameter.is_neg():
            raise UserError(
                f"parameter '{name}' is a view that is conjugated when it is read, which no "
                "optimizer can step: make it of a tensor of its own, "
                "nn.Parameter(z.conj().resolve_conj())."
            )
    if not model.training:
        raise UserError("the model is in eval mode: call model.train() before make_private.")


def require_loss(loss: Any) -> None:
    """Reject a loss that cannot be called."""
    if not callable(loss):
        raise UserError(
            f"loss={loss!r}: give a function of (outputs, targets), one loss per example, such as "
            'torch.nn.CrossEntropyLoss(reduction="none").'
        )


def require_whole(key: str, value: Any, least: int, most: int) -> None:
    """Reject a value that is neither None nor a whole number from `least` to `most`."""
    if value is None:
        return
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    rule = f"must be a whole number from {least} to {most:,}"
    require(is_whole and least <= value <= most, key, value, rule)


def require_epochs(epochs: int) -> None:
    """Reject a number of epochs out of range."""
    require(1 <= epochs <= MAX_COUNT, "epochs", epochs, f"must be a number from 1 to {MAX_COUNT:,}")


def require_sampling(
    batch_size: int | None, sample_rate: float | None, expected_batch: float | None
) -> None:
    """Reject a rate that is given twice, not at all, or by half."""
    if (batch_size is None) == (sample_rate is None):
        raise UserError("give batch_size or sample_rate, and not both.")
    if (sample_rate is None) != (expected_batch is None):
        raise UserError(
            "sample_rate and expected_batch go together: the noisy sum is divided by the latter."
        )
    if expected_batch is not None:
        rule = f"must be above 0 and at most {MAX_COUNT:,}"
        require(0 < expected_batch <= MAX_COUNT, "expected_batch", expected_batch, rule)


def require_randomness(seed: int | None, secure: bool) -> None:
    """Reject a seed that is out of range, or contradicts `secure`."""
    require_whole("seed", seed, 0, LARGEST_SEED)
    rule = "secure=True uses the operating system's randomness; remove the seed"
    require(seed is None or not secure, "seed", seed, rule)


def require_options(algorithm: str, options: Iterable[str], arguments: Iterable[str]) -> None:
    """Reject names that are neither arguments of `make_private` nor options of the algorithm."""
    keys = plugin_keys("algorithm", algorithm)
    for name in options:
        if name not in keys:
            raise unknown("make_private: argument", name, {*keys, *arguments} - {"options"})


def check_optimizer(model: nn.Module, given: Any) -> Any:
    """Return the optimizer, or several as one; reject those that miss a trained parameter."""
    are_several = isinstance(given, list | tuple)
    optimizers = [_unwrap(optimizer) for optimizer in (given if are_several else [given])]
    optimizer = Several(tuple(optimizers)) if are_several else optimizers[0]
    require_held(dict(model.named_parameters()), optimizer)
    return optimizer


def _unwrap(optimizer: Any) -> torch.optim.Optimizer:
    """Return torch's own optimizer from the wrapper that a training library puts around it."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(
            f"optimizer: {type(optimizer).__name__} is none of torch.optim's, made from the "
            "model's parameters; a schedule is yours to step, after private.step."
        )
    library = type(optimizer).__module__.partition(".")[0]
    if library in WRAPPERS:
        optimizer = getattr(optimizer, "optimizer", optimizer)
    try:
        require_step(optimizer)
    except ValueError as error:
        raise UserError(f"optimizer: {error}") from None
    return optimizer
