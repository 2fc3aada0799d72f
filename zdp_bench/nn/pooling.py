"""Pooling of complex maps: PyTorch has no complex pooling kernel.

A mean is taken of the real channels. A maximum is the entry of the largest modulus, as in Ziller et
al. 2021 (A.2.3), the first of equal ones. Gradients reach that entry alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zdp_bench.nn.memory_format import channels_last


class ComplexAvgPool2d(nn.Module):
    """The mean over windows of `size`, complex [B, C, H, W] -> [B, C, H // size, W // size]."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        x = channels_last(x.resolve_conj()).movedim(1, -1)  # [B, H, W, C]
        down, across = x.shape[1] // self.size, x.shape[2] // self.size
        if down == 0:
            raise ValueError(
                f"no window of {self.size}×{self.size} fits into a map of {x.shape[1]}×{x.shape[2]}"
            )
        # A line of windows is a map of its own, because torch's threads share maps, not windows.
        lines = torch.view_as_real(x[:, : down * self.size]).reshape(
            len(x) * down, self.size, x.shape[2], 2 * x.shape[3]
        )
        # [B·H', 1, W', 2C]
        means = F.avg_pool2d(lines.movedim(-1, 1), self.size).movedim(1, -1).contiguous()
        return torch.view_as_complex(means.view(len(x), down, across, x.shape[3], 2)).movedim(-1, 1)


class MagnitudeMaxPool2d(nn.Module):
    """Entries of the largest modulus: complex [B, C, H, W] -> [B, C, H // size, W // size]."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        return _gather(x, lambda modulus: F.max_pool2d(modulus, self.size, return_indices=True)[1])


class AdaptiveMagnitudeMaxPool2d(nn.Module):
    """Entries of the largest modulus: complex [B, C, H, W] -> [B, C, size, size]."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        return _gather(
            x, lambda modulus: F.adaptive_max_pool2d(modulus, self.size, return_indices=True)[1]
        )


def _gather(x: Tensor, choose: Callable[[Tensor], Tensor]) -> Tensor:
    """Entries of x [B, C, H, W] at flat positions `choose` finds in |x|², [B, C, H', W']."""
    with torch.no_grad():
        where = choose(x.real.square() + x.imag.square())
    return x.flatten(2).gather(2, where.flatten(2)).view(where.shape)
