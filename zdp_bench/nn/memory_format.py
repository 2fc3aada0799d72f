"""Memory format of feature maps: which one suits a network, complex maps as real ones, `MapLinear`.

A complex channel c becomes two real channels, 2c (real part) and 2c + 1 (imaginary part). In
channels-last memory both forms are the same bytes, so converting copies nothing, and real kernels
(convolution, pooling) can process complex maps.

torch makes the gradients of `view_as_real` and its inverse contiguous, which copies nothing if the
tensors are contiguous. The channels are therefore moved last before these calls, and back
afterwards.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# torch is slow at these on channels-last maps, where they take 40 % of a step of ResNet-20.
NORMALISATIONS = nn.GroupNorm, nn.modules.batchnorm._NormBase
MAX_CHANNELS = 256  # of a map


def in_transform(x: Tensor) -> bool:
    """Return True if x is inside a transform of `torch.func`.

    Always False while torch compiles: the check would break the graph at a map whose memory format
    `torch.compile` (2.11) does not support.
    """
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.is_functorch_wrapped_tensor(x)


def suits_channels_last(model: nn.Module) -> bool:
    """Return True if the model's private step is fastest on channels-last maps.

    This holds for complex convolutions, whose layers use such maps, and for real networks in which
    maps go from convolution to convolution (Model-3, AlexNet: a fifth faster). It does not hold
    with a normalisation (ResNet-20 takes 1.3 to 1.6 times as long), with more than 256 channels
    (VGG-11), or with a single convolution, whose map is flattened. The result depends on the layers
    only, so that a run and its continuation compute the same on any machine.
    """
    kernels = [weight for weight in model.parameters() if weight.dim() == 4]
    if any(weight.is_complex() for weight in kernels):
        return True
    if len(kernels) < 2 or any(max(weight.shape[:2]) > MAX_CHANNELS for weight in kernels):
        return False
    return not any(isinstance(layer, NORMALISATIONS) for layer in model.modules())


def arrange(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return inputs [B, C, H, W] in the memory format that suits the model; others unchanged."""
    if type(inputs) is not Tensor or inputs.dim() != 4 or in_transform(inputs):
        return inputs
    if suits_channels_last(model):
        return inputs.contiguous(memory_format=torch.channels_last)
    return inputs.contiguous()


def channels_last(x: Tensor) -> Tensor:
    """Return x [B, C, *] in channels-last memory; it is copied only if necessary."""
    if x.dim() == 4 and not in_transform(x):  # vmap does not support torch.channels_last
        return x.contiguous(memory_format=torch.channels_last)
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def as_real_channels(x: Tensor) -> Tensor:
    """Convert complex [B, C, *] to real [B, 2C, *]; a view if x is channels-last."""
    parts = torch.view_as_real(x.resolve_conj().movedim(1, -1))  # [B, *, C, 2]
    return parts.flatten(-2).movedim(-1, 1)


def as_complex_channels(x: Tensor) -> Tensor:
    """Convert real [B, 2C, *] to complex [B, C, *]; a view if x is channels-last."""
    pairs = channels_last(x).movedim(1, -1).unflatten(-1, (-1, 2))
    return torch.view_as_complex(pairs).movedim(-1, 1)


def memory_order(x: Tensor) -> list[int]:
    """Return the dimensions of x [B, *map] but the first, by decreasing stride."""
    return sorted(range(1, x.dim()), key=x.stride, reverse=True)


def arrange_as(x: Tensor, order: list[int]) -> Tensor:
    """Return x with its dimensions in this order in memory; it is copied only if necessary."""
    ordered = x.permute(order)
    if ordered.is_contiguous():
        return x
    back = [order.index(dim) for dim in range(x.dim())]
    return ordered.contiguous().permute(back)


def in_memory_order(x: Tensor) -> Tensor:
    """Flatten [B, *map] to [B, n] in memory order; a view if x has no gaps."""
    return x.permute(0, *memory_order(x)).flatten(1)


def in_own_order(flat: Tensor, x: Tensor) -> Tensor:
    """Reorder [*, n] from the memory order of x [B, *map] to row-major order."""
    order = memory_order(x)
    before = flat.dim() - 1
    maps = flat.unflatten(-1, [x.shape[dim] for dim in order])
    own_dims = [before + order.index(dim) for dim in range(1, x.dim())]
    return maps.permute(*range(before), *own_dims).flatten(before)


class MapLinear(nn.Linear):
    """`nn.Linear` after `flatten(1)`, without copying the batch: [B, *map] -> [B, out].

    It permutes the weight to the memory order of the maps, which is cheaper than permuting a batch.
    """

    def forward(self, x: Tensor) -> Tensor:
        maps = self.weight.unflatten(1, x.shape[1:])
        weight = maps.permute(0, *memory_order(x)).flatten(1)
        return F.linear(in_memory_order(x), weight, self.bias)
