"""Run a model in evaluation mode, and leave each of its modules in the mode it was in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put all modules of a model into evaluation mode inside the context.

    `model.train()` afterwards would also put parts into training mode that were not, such as a
    frozen BatchNorm. Modes are set without calling `train()`, which a model may override.
    """
    modes = {module: module.training for module in model.modules()}
    try:
        for module in modes:
            module.training = False
        yield
    finally:
        for module, is_training in modes.items():
            module.training = is_training
