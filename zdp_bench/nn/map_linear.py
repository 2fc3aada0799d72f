"""A linear layer on whole maps, without the copy that `flatten` makes of channels-last ones: the weight is brought into the order
in which a map lies in memory, and not the other way round. It is as long as one record."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class MapLinear(nn.Linear):
    """y = W vec(x) + b: what `flatten(1)` and `nn.Linear` give, whose parameters it has. Shapes: [B, *map] -> [B, out]."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.unflatten(1, x.shape[1:]).permute(0, *memory_order(x)).flatten(1)
        return F.linear(in_memory_order(x), weight, self.bias)


def memory_order(x: Tensor) -> list[int]:
    """The dimensions of x [B, *map] but the first, from the one whose neighbours lie farthest apart in memory to the nearest."""
    return sorted(range(1, x.dim()), key=x.stride, reverse=True)


def in_memory_order(x: Tensor) -> Tensor:
    """[B, *map] -> [B, n]; a view where x has no gaps."""
    return x.permute(0, *memory_order(x)).flatten(1)


def in_own_order(flat: Tensor, x: Tensor) -> Tensor:
    """Numbers [*, n] in the order in which x [B, *map] lies in memory -> [*, n] in the map's own."""
    order = memory_order(x)
    before = flat.dim() - 1
    mapped = flat.unflatten(-1, [x.shape[dim] for dim in order])
    return mapped.permute(*range(before), *(before + order.index(dim) for dim in range(1, x.dim()))).flatten(before)
