"""Pooling of complex maps, for which PyTorch has no kernels.

Means are computed on interleaved real channels. The maximum is the entry with the largest modulus,
as in Ziller et al. 2021 (A.2.3), and the first of several equal ones; the gradient goes to that
entry only. Squares are compared, so moduli must lie between 1e-18 and 1e19 in float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zdp_bench.nn.memory_format import channels_last


class ComplexAvgPool2d(nn.Module):
    """Average pooling over windows of size × size.

    Shapes: complex [B, C, H, W] -> [B, C, H // size, W // size].
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        x = channels_last(x.resolve_conj()).movedim(1, -1)  # [B, H, W, C]
        examples, height, width, channels = x.shape
        down, across = height // self.size, width // self.size
        if down == 0:
            raise ValueError(
                f"no window of {self.size}×{self.size} fits into a map of {height}×{width}"
            )
        # Each row of windows becomes a separate map, because torch parallelises over maps only.
        reals = torch.view_as_real(x[:, : down * self.size])
        window_rows = reals.reshape(examples * down, self.size, width, 2 * channels)
        means = F.avg_pool2d(window_rows.movedim(-1, 1), self.size)  # [B·H', 2C, 1, W']
        channels_end = means.movedim(1, -1).contiguous()
        pairs = channels_end.view(examples, down, across, channels, 2)
        return torch.view_as_complex(pairs).movedim(-1, 1)


class MagnitudeMaxPool2d(nn.Module):
    """Max-pooling by modulus over windows of size × size.

    Shapes: complex [B, C, H, W] -> [B, C, H // size, W // size].
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            _, indices = F.max_pool2d(_power(x), self.size, return_indices=True)
        return _gather(x, indices)


class AdaptiveMagnitudeMaxPool2d(nn.Module):
    """Adaptive max-pooling by modulus, complex [B, C, H, W] -> [B, C, size, size]."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            _, indices = F.adaptive_max_pool2d(_power(x), self.size, return_indices=True)
        return _gather(x, indices)


def _power(x: Tensor) -> Tensor:
    return x.real.square() + x.imag.square()


def _gather(x: Tensor, indices: Tensor) -> Tensor:
    """Return the entries of x [B, C, H, W] at flat indices [B, C, H', W']."""
    entries = x.flatten(2).gather(2, indices.flatten(2))
    return entries.view(indices.shape)
