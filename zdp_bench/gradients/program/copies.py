"""Copies of a model, in which a check or a single example can do no harm."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn


def copy_apart(
    model: nn.Module,
    shared: tuple[Any, ...] = (),
) -> nn.Module:
    """Return a deep copy of a model. `shared` objects, and what cannot be copied, are the same.

    What cannot be copied is a lock or an open file, say; functions are shared too.
    """
    memo: dict[int, Any] = {id(thing): thing for thing in shared}
    attributes = [value for module in model.modules() for value in vars(module).values()]
    for value in attributes:
        if isinstance(value, Tensor) and not value.is_leaf:  # which `deepcopy` refuses
            memo[id(value)] = value.detach().clone()
    try:
        return copy.deepcopy(model, dict(memo))
    except Exception:  # whatever a class of the user's raises: share each attribute that does
        modules = {id(module): module for module in model.modules()}
        for value in attributes:
            try:
                copy.deepcopy(value, memo | modules)
            except Exception:
                memo[id(value)] = value
        return copy.deepcopy(model, memo)
