"""Give gradients, states and buffers the memory layout that torch's operations need.

torch's fused optimizers (2.11 to 2.14, on a CPU) read parameters, gradients and states in memory
order and ignore their strides. A saved state cannot be copied into an expanded buffer.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn


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


def separate_numbers(model: nn.Module) -> None:
    """Replace buffers whose numbers share memory, such as expanded ones, by copies.

    Such a buffer is saved without its repeated numbers, and a saved state cannot be copied into it.
    """
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if has_repeats(buffer):
                module._buffers[name] = buffer.clone(memory_format=torch.contiguous_format)


def has_repeats(tensor: Tensor) -> bool:
    """Return True if several numbers of a tensor are one in memory, as in an expanded tensor."""
    dimensions = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in dimensions)


def is_dense(tensor: Tensor) -> bool:
    """Return True if a tensor's numbers fill its memory, without gaps or shared numbers."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()
