"""An example whose terms cancel: its gradient is 0, but the rounding errors of its sum are not."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from zdp_bench.audit.cases.toy import CPU
from zdp_bench.audit.release import Release
from zdp_bench.gradients import Batch, clipped_sum
from zdp_bench.gradients.clipping import SAFETY
from zdp_bench.privacy.mechanism import Block
from zdp_bench.privacy.noise import SeededNoise, draw


def release_cancelling(seed: int, guarded: bool = True) -> Release:
    """DP-SGD on a linear layer over 64 positions, and an example of size 10¹⁰ whose terms cancel in
    pairs.

    Args:
        guarded: clip with the package's own clipping, else by exact norms with a float32 sum.
    """
    layer = nn.Linear(1, 1, bias=False)
    generator = torch.Generator().manual_seed(seed % 2**63)
    rest = torch.randn(3, 64, 1, generator=generator), torch.randn(3, 64, generator=generator)
    order, (x, w) = torch.randperm(64, generator=generator), torch.rand(2, 32, generator=generator)
    large, weights = 1e10 * torch.cat([x, x])[order], torch.cat([w, -w])[order]
    both = torch.cat([rest[0], large.view(1, 64, 1)]), torch.cat([rest[1], weights.view(1, 64)])

    def loss(outputs: Tensor, weights: Tensor) -> Tensor:
        return (outputs.flatten(1) * weights).sum(dim=1)

    def unguarded_sum(batch: Batch) -> Tensor:
        terms = batch[0].double().flatten(1) * batch[1].double()
        norms = terms.sum(dim=1).abs()  # Σ_t w_t x_t, all digits
        factors = (SAFETY / norms).clamp(max=1.0).float().view(-1, 1)
        return ((batch[1] * factors).view(1, -1) @ batch[0].view(-1, 1)).double()

    def guarded_sum(batch: Batch) -> Tensor:
        return clipped_sum(layer, loss, batch, 1.0, engine="fast").sums["weight"].double()

    block = Block("weight", (1, 1), "float64", 1.0, 1.0, "real")
    sums = [(guarded_sum if guarded else unguarded_sum)(batch) for batch in (rest, both)]

    def release(present: bool, count: int) -> Tensor:
        many = dataclasses.replace(block, shape=(count, 1, 1))
        return (sums[present] + draw(many, SeededNoise(seed), int(present), CPU)).flatten(1)

    return release
