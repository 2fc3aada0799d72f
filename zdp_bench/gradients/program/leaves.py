"""Layers of this package in a third-party model, each of which is recorded as one operation.

torch cannot record all of their arithmetic for any batch size. Tests verify that they keep examples
apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zdp_bench.gradients.program.ours import is_ours

_library = torch.library.Library("zdp_bench", "DEF")
_library.define("leaf(Tensor x, str name, int[] shape, ScalarType dtype) -> Tensor")


@torch.library.register_fake("zdp_bench::leaf", lib=_library)
def _leaf(
    x: Tensor,
    name: str,
    shape: list[int],
    dtype: torch.dtype,
) -> Tensor:
    return x.new_empty((x.shape[0], *shape), dtype=dtype)


@contextmanager
def whole_leaves(model: nn.Module, inputs: Tensor) -> Iterator[None]:
    """Record each call of an outermost layer of this package as one operation."""
    leaves: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{outer}.") for outer in leaves)
        if name and not is_inside and is_ours(module):
            leaves[name] = module
    outputs = _outputs_of(model, inputs, leaves)
    try:
        for name, module in leaves.items():
            vars(module)["forward"] = _stand_in(name, module.forward, outputs[name])
        yield
    finally:
        for module in leaves.values():
            vars(module).pop("forward", None)


def _outputs_of(
    model: nn.Module,
    inputs: Tensor,
    leaves: dict[str, nn.Module],
) -> dict[str, list[Any]]:
    """Return the outputs of each leaf, in the order of its calls."""
    outputs: dict[str, list[Any]] = {name: [] for name in leaves}
    if not leaves:
        return outputs
    handles = []
    for name, module in leaves.items():

        def save_output(
            _: Any,
            __: Any,
            output: Any,
            leaf_outputs: list[Any] = outputs[name],
        ) -> None:
            leaf_outputs.append(output)

        handles.append(module.register_forward_hook(save_output))
    try:
        with torch.no_grad():
            model(inputs)
    finally:
        for handle in handles:
            handle.remove()
    return outputs


def _stand_in(
    name: str,
    forward: Any,
    outputs: list[Any],
) -> Any:
    """Return a forward function that calls the operation `leaf`, with the shapes of `outputs`."""
    calls = iter(outputs)

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        output = next(calls, None)
        takes_one_tensor = len(args) == 1 and not kwargs and isinstance(args[0], Tensor)
        if not takes_one_tensor or not isinstance(output, Tensor) or output.dim() == 0:
            return forward(*args, **kwargs)
        shape = list(output.shape[1:])
        return torch.ops.zdp_bench.leaf(args[0], name, shape, output.dtype)

    return stand_in
