"""Copies of a model, on which a check or a single example runs without changing the original."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn


def copy_apart(
    model: nn.Module,
    shared: tuple[Any, ...] = (),
) -> nn.Module:
    """Return a deep copy of a model.

    Functions, and attributes that cannot be copied, such as a lock or an open file, are shared with
    the original.

    Args:
        model: the model.
        shared: other objects that are shared with the original instead of copied.
    """
    memo: dict[int, Any] = {id(shared_object): shared_object for shared_object in shared}
    attributes = [value for module in model.modules() for value in vars(module).values()]
    for value in attributes:
        if isinstance(value, Tensor) and not value.is_leaf:  # which `deepcopy` refuses
            memo[id(value)] = value.detach().clone()
    try:
        return copy.deepcopy(model, dict(memo))
    except Exception:  # a user's class may raise anything; share each attribute that raises
        modules = {id(module): module for module in model.modules()}
        for value in attributes:
            try:
                copy.deepcopy(value, memo | modules)
            except Exception:
                memo[id(value)] = value
        return copy.deepcopy(model, memo)
