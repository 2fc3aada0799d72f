"""Check the arguments of the library's functions before anything is built or read.

Each function raises `UserError` for an argument that cannot be used.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import wraps
from numbers import Integral, Real
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import UninitializedParameter
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset

from zdp_bench.config.plugins import plugin_keys
from zdp_bench.errors import UserError, require, setting, unknown, wrong_type
from zdp_bench.gradients.parts import leaves_of, pack
from zdp_bench.library.optimizers import Several, require_held
from zdp_bench.privacy.mechanism import MAX_COUNT
from zdp_bench.training.batches import MICRO_BATCH
from zdp_bench.training.build import require_step

P = ParamSpec("P")
R = TypeVar("R")
MAX_SEED = 2**64 - 1
MAX_SHOWN = 80  # characters of a value in an error
# Libraries that wrap the user's optimizer in an object with the attribute `optimizer`.
WRAPPING_LIBRARIES = {"lightning", "pytorch_lightning", "accelerate"}


def require_module(model: Any) -> None:
    """Reject a model that is not a `torch.nn` module, or whose weights cannot be trained here.

    Raises:
        UserError: The model is not a module, a layer is a TorchScript module, or its weights are
            sharded, not initialized, on the meta device, or all frozen.
    """
    modules = dict(model.named_modules()) if isinstance(model, nn.Module) else {}
    scripted = [name for name, part in modules.items() if isinstance(part, torch.jit.ScriptModule)]
    if not modules:
        instead = "create one, such as torch.nn.Linear(4, 3)"
        raise wrong_type("model", model, "a torch.nn module", instead)
    if scripted:
        layer = f"layer '{scripted[0]}'" if scripted[0] else "it"
        raise UserError(
            f"model: {layer} is a TorchScript module, whose operations cannot be traced: use the "
            "torch.nn module that it was compiled from."
        )
    parameters = [*model.parameters()]
    # Compared by name, because torch may be built without distributed training.
    class_names = set()
    for part in [*modules.values(), *parameters]:
        class_names |= {cls.__name__ for cls in type(part).__mro__}
    if class_names & {"DTensor", "FullyShardedDataParallel"}:
        raise UserError(
            "model: its weights are sharded across processes (FSDP or tensor parallelism), so no "
            "process has the whole gradient of an example to clip: pass the whole model in each."
        )
    if any(isinstance(p, UninitializedParameter) for p in parameters):
        raise UserError(
            "model: a lazy module has no weights before its first call: call the model once on "
            "made-up inputs of the right shape, and then create the optimizer."
        )
    if any(p.is_meta for p in parameters):
        raise UserError(
            "model: its weights are on the device 'meta', which stores no values: move it to a "
            "real device and load or initialize its weights."
        )
    if not any(p.requires_grad for p in parameters):
        raise UserError("no parameter of the model requires a gradient: there is nothing to train.")


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
    """Reject a loss that is not a function."""
    if isinstance(loss, type) or not callable(loss):
        expected = "a function of (outputs, targets) that returns one loss per example"
        instead = 'create one, such as torch.nn.CrossEntropyLoss(reduction="none")'
        raise wrong_type("loss", loss, expected, instead)


def require_dataset(dataset: Any) -> None:
    """Reject a dataset without a length or items by index, and columns instead of items."""
    expected = "a map-style Dataset whose items are (input, target)"
    instead = "create one, such as torch.utils.data.TensorDataset(inputs, targets)"
    if isinstance(dataset, DataLoader):
        instead = "give the loader's dataset, because each step draws its own batch from it"
        raise wrong_type("dataset", dataset, expected, instead)
    is_stream = isinstance(dataset, IterableDataset | str | bytes | type)
    has_items = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if is_stream or not has_items or _holds_columns(dataset):
        raise wrong_type("dataset", dataset, expected, instead)
    if len(dataset) == 0:
        raise UserError("dataset: it has no examples.")


def _holds_columns(dataset: Any) -> bool:
    """Return True for an array, a table, or a tuple, list or dictionary of columns."""
    if isinstance(dataset, Mapping):
        return bool(dataset) and 0 not in dataset
    if isinstance(dataset, tuple | list):
        return bool(dataset) and not isinstance(dataset[0], tuple | list)
    is_table = hasattr(dataset, "__array__") and not isinstance(dataset, Dataset)
    is_column_of_objects = isinstance(dataset, np.ndarray) and dataset.dtype.kind == "O"
    return is_table and not is_column_of_objects


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

    return Kind(f"must be an int, a whole number from {min_value} to {max_value:,}", fits)


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


_NUMBER = Kind("must be a number, an int or a float", _is_number)
_FLAG = Kind("must be True or False", lambda value: isinstance(value, bool))
_NAME = Kind("must be a name in quotes", lambda value: isinstance(value, str))
_FUNCTION = Kind("must be a function of the model", callable)
_BATCH = Kind(
    "must be (inputs, targets), two tensors (of arrays, torch.as_tensor) of equally many examples",
    _is_batch,
)

# argument of `make_private`, `check_model` or `clipped_sum`, or option of an algorithm -> its kind.
# Those that are missing here are checked where they are used.
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
    "bound": _NUMBER,
    "complex_scale": _NUMBER,
    "public": _FLAG,
    "batch": _BATCH,
    "probe": _BATCH.or_none(),
    "per_layer": _FLAG,
    "clip_quantile": _NUMBER.or_none(),
    "gamma": _NUMBER.or_none(),
    "start_steps": _whole_number(1, MAX_COUNT).or_none(),
    "bands": _whole_number(1, MAX_COUNT),
}


def require_kinds(arguments: Mapping[str, Any]) -> None:
    """Reject arguments and options that are not of their kind (`KINDS`)."""
    for name, value in arguments.items():
        kind = KINDS.get(name)
        if kind is not None and not kind.fits(value):
            shown = textwrap.shorten(setting(name, value), MAX_SHOWN)
            raise UserError(f"{shown}: {kind.rule}.")


def with_python_numbers(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function so that it gets Python's numbers instead of NumPy's or a tensor's."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        plain_args: Any = map(_as_python, args)
        plain_kwargs: Any = {name: _as_python(value) for name, value in kwargs.items()}
        return function(*plain_args, **plain_kwargs)

    return call


def _as_python(value: Any) -> Any:
    """Return a NumPy number, or an array or tensor without dimensions, as Python's number."""
    is_single = isinstance(value, np.generic | np.ndarray | Tensor) and value.ndim == 0
    return value.item() if is_single else value


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
        if not optimizers:
            raise UserError("optimizer: the list is empty: give one or more optimizers.")
        optimizer: Any = Several(tuple(_unwrap(member) for member in optimizers))
    else:
        optimizer = _unwrap(optimizers)
    require_held(dict(model.named_parameters()), optimizer)
    return optimizer


def _unwrap(optimizer: Any) -> torch.optim.Optimizer:
    """Return the torch optimizer that a training library may have wrapped."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        instead = (
            "create one from the model's parameters, such as torch.optim.SGD(model.parameters(), "
            "lr=0.1)"
        )
        if isinstance(optimizer, LRScheduler):
            instead = "give the scheduler's optimizer, and step the scheduler after private.step"
        raise wrong_type("optimizer", optimizer, "an optimizer of torch.optim", instead)
    library = type(optimizer).__module__.partition(".")[0]
    if library in WRAPPING_LIBRARIES:
        optimizer = getattr(optimizer, "optimizer", optimizer)
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):  # its steps could not be watched
        raise UserError(
            f"optimizer: {type(optimizer).__name__} has no hooks, because its __init__ does not "
            "call that of torch.optim.Optimizer: let it call super().__init__(params, defaults)."
        )
    try:
        require_step(optimizer)
    except ValueError as error:
        raise UserError(f"optimizer: {error}") from None
    return optimizer
