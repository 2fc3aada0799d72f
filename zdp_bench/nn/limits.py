"""Bound what building a model takes, if a stranger's record states the model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook


@contextmanager
def limit_parameters(
    error: Exception, *, tensors: float = math.inf, numbers: float = math.inf
) -> Iterator[None]:
    """Raise `error` within the block once the modules that are built in it have too many weights.

    Otherwise, building a model that a record states could take any memory, or never end.

    Args:
        error: the error to raise.
        tensors: largest number of parameters.
        numbers: largest number of weights in all parameters together.
    """
    num_tensors = num_numbers = 0

    def count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal num_tensors, num_numbers
        num_tensors += 1
        num_numbers += 0 if parameter is None else parameter.numel()
        if num_tensors > tensors or num_numbers > numbers:
            raise error

    hook = register_module_parameter_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()
