"""Operations of a program as layers, whose rules then compute the gradients of their weights.

`conv2d(x, weight, bias, stride=2)` is equivalent to `nn.Conv2d(…, stride=2)`. The same rule is
therefore used whether a model calls the layer or the function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Arguments = dict[str, Any]  # an operation's arguments by name; nodes stand for tensors

CONVOLUTIONS: dict[str, Any] = {
    "conv1d": nn.Conv1d,
    "conv2d": nn.Conv2d,
    "conv3d": nn.Conv3d,
    "conv_transpose1d": nn.ConvTranspose1d,
    "conv_transpose2d": nn.ConvTranspose2d,
    "conv_transpose3d": nn.ConvTranspose3d,
}
LAYER_PRODUCTS = ("matmul", "mm")  # x @ weight, where `nn.Linear` computes x @ weight.T
# Layers that take maps [B, C, *]. If an example has several maps, their gradients are added up.
OF_MAPS = (*CONVOLUTIONS, "group_norm", "instance_norm", "prelu")
# Arguments that may be parameters of these layers.
WEIGHTS = {"weight", "bias", "other", "mat2"}


def layer_of(
    kind: str,
    arguments: Arguments,
    weights: list[str],
) -> nn.Module | None:
    """Return the layer that is equivalent to an operation, on the meta device.

    Args:
        kind: the operation's name.
        arguments: all of its arguments.
        weights: names of the arguments that depend on parameters.

    Returns:
        The layer, or None if no layer with a rule is equivalent.
    """
    if not WEIGHTS.issuperset(weights):
        return None
    with torch.device("meta"):
        if kind in CONVOLUTIONS:
            return _make_convolution(kind, arguments)
        make = MAKERS.get(kind)
        return None if make is None else make(arguments)


def _value(arguments: Arguments, name: str = "weight") -> Tensor:
    """Return an argument as a fake tensor, which has a shape and type but no values."""
    tensor: Tensor = arguments[name].meta["val"]
    return tensor


def _make_linear(arguments: Arguments) -> nn.Module | None:
    weight = _value(arguments)
    if weight.dim() != 2:
        return None
    outputs, inputs = weight.shape
    return nn.Linear(inputs, outputs, dtype=weight.dtype)


def _make_product(arguments: Arguments) -> nn.Module | None:
    right = _value(arguments, "other" if "other" in arguments else "mat2")
    if right.dim() != 2:
        return None
    rows, columns = right.shape
    return nn.Linear(rows, columns, dtype=right.dtype)


def _make_convolution(kind: str, arguments: Arguments) -> nn.Module:
    weight = _value(arguments)
    groups = arguments["groups"]
    first, second, *kernel = weight.shape
    if "transpose" in kind:
        inputs, outputs = first, second * groups
    else:
        inputs, outputs = second * groups, first
    options = {
        name: _read_option(arguments[name])
        for name in ("stride", "padding", "dilation", "output_padding")
        if name in arguments
    }
    layer: nn.Module = CONVOLUTIONS[kind](
        inputs,
        outputs,
        tuple(kernel),
        groups=groups,
        bias=arguments["bias"] is not None,
        dtype=weight.dtype,
        **options,
    )
    return layer


def _read_option(value: Any) -> Any:
    """Return an option's value; torch may give one value for all dimensions as a list of one."""
    if isinstance(value, list | tuple) and len(value) == 1:
        return value[0]
    return value


def _make_embedding(arguments: Arguments) -> nn.Module:
    rows, width = _value(arguments).shape
    padding = arguments["padding_idx"]
    return nn.Embedding(rows, width, padding_idx=None if padding < 0 else padding)


def _make_layer_norm(arguments: Arguments) -> nn.Module:
    return nn.LayerNorm(list(arguments["normalized_shape"]), arguments["eps"])


def _make_rms_norm(arguments: Arguments) -> nn.Module:
    return nn.RMSNorm(list(arguments["normalized_shape"]), arguments["eps"])


def _make_group_norm(arguments: Arguments) -> nn.Module:
    channels = _value(arguments, "input").shape[1]
    return nn.GroupNorm(arguments["num_groups"], channels, arguments["eps"])


def _make_instance_norm(arguments: Arguments) -> nn.Module:
    maps = _value(arguments, "input")
    kinds = {3: nn.InstanceNorm1d, 4: nn.InstanceNorm2d, 5: nn.InstanceNorm3d}
    return kinds[maps.dim()](maps.shape[1], arguments["eps"], affine=True)


def _make_prelu(arguments: Arguments) -> nn.Module:
    return nn.PReLU(_value(arguments).numel())


MAKERS: dict[str, Callable[[Arguments], nn.Module | None]] = {
    "linear": _make_linear,
    **dict.fromkeys(LAYER_PRODUCTS, _make_product),
    "embedding": _make_embedding,
    "layer_norm": _make_layer_norm,
    "rms_norm": _make_rms_norm,
    "group_norm": _make_group_norm,
    "instance_norm": _make_instance_norm,
    "prelu": _make_prelu,
}
