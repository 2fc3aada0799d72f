"""Pooling of complex maps, on their real channels: PyTorch has no complex pooling kernel."""

from __future__ import annotations

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
