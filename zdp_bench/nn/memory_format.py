"""Memory order of maps: the rule for a network, complex channels as interleaved real ones, and a
linear layer on maps.

Channel c becomes 2c (real part) and 2c + 1 (imaginary part). In channels-last memory both are the
same bytes, so neither direction copies, and real kernels (convolution, pooling) do complex work.

Gradients pass without a copy where `view_as_real` and its inverse see contiguous numbers, because
torch makes their gradients contiguous. So the channels are moved last before, and back afterwards.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# torch computes these slowly on channels-last maps: of ResNet-20's step they take 40 % there.
NORMALISATIONS = nn.GroupNorm, nn.modules.batchnorm._NormBase
WIDEST = 256  # channels of a map


def in_transform(x: Tensor) -> bool:
    """True if x is inside one of torch.func's transforms.

    Always False while torch compiles: asking would cut the compiled code in two, at a map whose
    memory format `torch.compile` (2.11) does not understand.
    """
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.is_functorch_wrapped_tensor(x)


def suits_channels_last(model: nn.Module) -> bool:
    """True if the model's private step is fastest on channels-last maps.

    Complex convolutions are: their layers work on such maps. Real ones are by a fifth if maps go
    from convolution to convolution (Model-3, AlexNet). They are not with a normalisation (ResNet-20
    takes 1.3 to 1.6 times as long), more than 256 channels (VGG-11), or a single convolution, whose
    map is flattened. The answer follows from the layers alone, so a run and its continuation, on
    whatever machine, compute alike.
    """
    kernels = [weight for weight in model.parameters() if weight.dim() == 4]
    if any(weight.is_complex() for weight in kernels):
        return True
    if len(kernels) < 2 or any(max(weight.shape[:2]) > WIDEST for weight in kernels):
        return False
    return not any(isinstance(layer, NORMALISATIONS) for layer in model.modules())


def arrange(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return inputs [B, C, H, W] in the memory order that suits the model; others as they are."""
    if type(inputs) is not Tensor or inputs.dim() != 4 or in_transform(inputs):
        return inputs
    if suits_channels_last(model):
        return inputs.contiguous(memory_format=torch.channels_last)
    return inputs.contiguous()


def channels_last(x: Tensor) -> Tensor:
    """x [B, C, *] with the channels of one position adjacent in memory; copied only if needed."""
    if x.dim() == 4 and not in_transform(x):  # vmap does not support torch.channels_last
        return x.contiguous(memory_format=torch.channels_last)
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def as_real_channels(x: Tensor) -> Tensor:
    """Complex [B, C, *] -> real [B, 2C, *]; a view if x is channels-last."""
    parts = torch.view_as_real(x.resolve_conj().movedim(1, -1))  # [B, *, C, 2]
    return parts.flatten(-2).movedim(-1, 1)


def as_complex_channels(x: Tensor) -> Tensor:
    """Real [B, 2C, *] -> complex [B, C, *]; a view if x is channels-last."""
    pairs = channels_last(x).movedim(1, -1).unflatten(-1, (-1, 2))
    return torch.view_as_complex(pairs).movedim(-1, 1)


def memory_order(x: Tensor) -> list[int]:
    """The dimensions of x [B, *map] except the first, from the largest stride to the smallest."""
    return sorted(range(1, x.dim()), key=x.stride, reverse=True)


def in_memory_order(x: Tensor) -> Tensor:
    """[B, *map] -> [B, n], each map's numbers as they are in memory; a view if x has no gaps."""
    return x.permute(0, *memory_order(x)).flatten(1)


def in_own_order(flat: Tensor, x: Tensor) -> Tensor:
    """Reorder [*, n] from the memory order of x [B, *map] to row-major order."""
    order = memory_order(x)
    before = flat.dim() - 1
    maps = flat.unflatten(-1, [x.shape[dim] for dim in order])
    own_dims = [before + order.index(dim) for dim in range(1, x.dim())]
    return maps.permute(*range(before), *own_dims).flatten(before)


class MapLinear(nn.Linear):
    """`nn.Linear` after `flatten(1)`: [B, *map] -> [B, out].

    It permutes the weight, as long as one example, to the map's memory order instead of the batch.
    """

    def forward(self, x: Tensor) -> Tensor:
        maps = self.weight.unflatten(1, x.shape[1:])
        weight = maps.permute(0, *memory_order(x)).flatten(1)
        return F.linear(in_memory_order(x), weight, self.bias)
