"""Pooling of complex maps: PyTorch has no complex pooling kernel.

A mean is taken on the real channels. A maximum needs an order, and complex numbers have none: here, as in Ziller et al. 2021
(A.2.3), the entry of the largest modulus goes on, whole. Of equal ones the first does. Gradients reach that entry alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zdp_bench.nn.layout import as_complex_channels, as_real_channels, channels_last


class ComplexAvgPool2d(nn.Module):
    """The mean over windows of `size`, complex [B, C, H, W] -> [B, C, H // size, W // size]."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        return as_complex_channels(F.avg_pool2d(as_real_channels(channels_last(x)), self.size))


class MagnitudeMaxPool2d(nn.Module):
    """The entry of the largest modulus in windows of `size`, complex [B, C, H, W] -> [B, C, H // size, W // size]."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        return picked(x, lambda modulus: F.max_pool2d(modulus, self.size, return_indices=True)[1])


class AdaptiveMagnitudeMaxPool2d(nn.Module):
    """The same in windows that leave a map of `size`, whatever the input's, complex [B, C, H, W] -> [B, C, size, size]."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        return picked(x, lambda modulus: F.adaptive_max_pool2d(modulus, self.size, return_indices=True)[1])


def picked(x: Tensor, choose: Callable[[Tensor], Tensor]) -> Tensor:
    """The entries of x [B, C, H, W] at the flat positions [B, C, H', W'] that `choose` finds in |x|²: [B, C, H', W']."""
    with torch.no_grad():
        where = choose(x.real.square() + x.imag.square())
    return x.flatten(2).gather(2, where.flatten(2)).view(where.shape)
