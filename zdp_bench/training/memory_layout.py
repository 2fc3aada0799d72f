"""Give gradients and states the memory layout of their parameters, as fused optimizers need it.

torch's fused optimizers (2.11 to 2.14, on a CPU) read parameters, gradients and states in memory
order and ignore their strides.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor


def lay_out_as(parameter: Tensor, values: Tensor) -> Tensor:
    """Return a gradient or state with its parameter's memory layout, as a copy if it differs."""
    is_lazy = values.is_conj() or values.is_neg()  # the sign is then a flag, not in memory
    if values.stride() == parameter.stride() and not is_lazy:
        return values
    return torch.empty_like(parameter).copy_(values)


def lay_out_states(optimizer: Any) -> None:
    """Give the states of a fused optimizer, or of several, the layout of their parameters.

    A model's memory format may change during training, or when a run resumes.
    """
    for single in getattr(optimizer, "optimizers", (optimizer,)):
        fused = [group for group in single.param_groups if group.get("fused")]
        for parameter in chain.from_iterable(group["params"] for group in fused):
            state = single.state.get(parameter, {})
            for name, value in state.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    state[name] = lay_out_as(parameter, value)


def is_dense(tensor: Tensor) -> bool:
    """Return True if a tensor's numbers fill its memory, without gaps or shared numbers."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()
