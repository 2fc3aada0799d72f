"""Check the arguments of `make_private` before anything is built or read.

Each function raises `UserError` for an argument that cannot be used.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from zdp_bench.config.plugins import plugin_keys
from zdp_bench.errors import UserError, require, setting, unknown
from zdp_bench.gradients.parts import leaves_of, pack
from zdp_bench.library.model_check import require_module
from zdp_bench.library.optimizers import Several, require_held
from zdp_bench.privacy.mechanism import MAX_COUNT
from zdp_bench.training.batches import MICRO_BATCH
from zdp_bench.training.build import require_step

MAX_SEED = 2**64 - 1
MAX_SHOWN = 80  # characters of a value in an error
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


@dataclass(frozen=True)
class Kind:
    """What an argument may be.

    Attributes:
        rule: What is required, worded to follow the argument in an error.
        fits: Returns True if a value may be used.
    """

    rule: str
    fits: Callable[[Any], bool]

    def or_none(self) -> Kind:
        """Return the kind that also allows None."""
        return Kind(f"{self.rule}, or None", lambda value: value is None or self.fits(value))


def _whole_number(min_value: int, max_value: int) -> Kind:
    """Return the kind of whole numbers from `min_value` to `max_value`."""

    def fits(value: Any) -> bool:
        is_whole = isinstance(value, Integral) and not isinstance(value, bool)
        return is_whole and min_value <= value <= max_value

    return Kind(f"must be a whole number from {min_value} to {max_value:,}", fits)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_batch(value: Any) -> bool:
    """Return True for a pair of inputs and targets, of equally many examples."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        return False
    inputs, targets = map(pack, value)
    leaves: list[Any] = [*leaves_of(inputs), *leaves_of(targets)]
    if not all(isinstance(leaf, Tensor) and leaf.dim() for leaf in leaves):
        return False
    return len({len(leaf) for leaf in leaves}) == 1


_NUMBER = Kind("must be a number", _is_number)
_FLAG = Kind("must be True or False", lambda value: isinstance(value, bool))
_NAME = Kind("must be a name in quotes", lambda value: isinstance(value, str))
_FUNCTION = Kind("must be a function of the model", callable)
_BATCH = Kind("must be (inputs, targets), two tensors of equally many examples", _is_batch)

# argument of `make_private`, or option of an algorithm -> its kind. Those that are missing here are
# checked where they are used.
KINDS = {
    "epochs": _whole_number(1, MAX_COUNT),
    "batch_size": _whole_number(1, MAX_COUNT).or_none(),
    "max_examples": _whole_number(1, MAX_COUNT).or_none(),
    "micro_batch": _whole_number(1, MICRO_BATCH).or_none(),
    "seed": _whole_number(0, MAX_SEED).or_none(),
    "delta": _NUMBER,
    "max_grad_norm": _NUMBER,
    "target_epsilon": _NUMBER.or_none(),
    "noise_multiplier": _NUMBER.or_none(),
    "sample_rate": _NUMBER.or_none(),
    "expected_batch": _NUMBER.or_none(),
    "count_earlier": _FLAG,
    "secure": _FLAG,
    "algorithm": _NAME,
    "precision": _NAME.or_none(),
    "regulariser": _FUNCTION.or_none(),
    "probe": _BATCH.or_none(),
    "per_layer": _FLAG,
    "clip_quantile": _NUMBER.or_none(),
    "gamma": _NUMBER.or_none(),
    "start_steps": _whole_number(1, MAX_COUNT).or_none(),
}


def require_kinds(arguments: Mapping[str, Any]) -> None:
    """Reject arguments and options that are not of their kind (`KINDS`)."""
    for name, value in arguments.items():
        kind = KINDS.get(name)
        if kind is not None and not kind.fits(value):
            shown = textwrap.shorten(setting(name, value), MAX_SHOWN)
            raise UserError(f"{shown}: {kind.rule}.")


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
        rule = f"must be at least {1 / MAX_COUNT:g} and at most 1"
        require(1 / MAX_COUNT <= sample_rate <= 1, "sample_rate", sample_rate, rule)
    if expected_batch is not None:
        rule = f"must be above 0 and at most {MAX_COUNT:,}"
        require(0 < expected_batch <= MAX_COUNT, "expected_batch", expected_batch, rule)


def require_randomness(seed: int | None, secure: bool) -> None:
    """Reject a seed that is combined with `secure`."""
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
