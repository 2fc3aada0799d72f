"""A linear layer on whole maps, without the copy that `flatten` makes of channels-last ones: the weight is brought into the order
in which a map lies in memory, and not the other way round. It is as long as one record."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from zdp_bench.nn.memory_format import in_memory_order, memory_order


class MapLinear(nn.Linear):
    """y = W vec(x) + b: what `flatten(1)` and `nn.Linear` give, whose parameters it has. Shapes: [B, *map] -> [B, out]."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.unflatten(1, x.shape[1:]).permute(0, *memory_order(x)).flatten(1)
        return F.linear(in_memory_order(x), weight, self.bias)
