"""A linear layer on whole maps, without the copy that `flatten` makes of channels-last ones."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from zdp_bench.nn.memory_format import in_memory_order, memory_order


class MapLinear(nn.Linear):
    """`nn.Linear` after `flatten(1)`: [B, *map] -> [B, out].

    It permutes the weight, as long as one example, to the map's memory order instead of the batch.
    """

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.unflatten(1, x.shape[1:]).permute(0, *memory_order(x)).flatten(1)
        return F.linear(in_memory_order(x), weight, self.bias)
