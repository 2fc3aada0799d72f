"""Complex channels as interleaved real channels: channel c becomes 2c (real part) and 2c + 1 (imaginary part).

In channels-last memory the two are the very same bytes, so neither direction copies. Real kernels (convolution, pooling) then do
complex work, and no complex kernel, all of them slow, stands in the path.

Gradients pass without a copy too where `view_as_real` and its inverse see contiguous numbers: torch makes theirs contiguous. So
the channels are moved to the end before, and back behind.
"""

from __future__ import annotations

import torch
from torch import Tensor


def channels_last(x: Tensor) -> Tensor:
    """x [B, C, *] with the channels of one position side by side in memory; copied only if they are not yet."""
    return x.movedim(1, -1).contiguous().movedim(-1, 1)  # torch.channels_last is not known inside vmap


def as_real_channels(x: Tensor) -> Tensor:
    """Complex [B, C, *] -> real [B, 2C, *]; a view where x is channels-last."""
    parts = torch.view_as_real(x.resolve_conj().movedim(1, -1))  # [B, *, C, 2]
    return parts.flatten(-2).movedim(-1, 1)


def as_complex_channels(x: Tensor) -> Tensor:
    """Real [B, 2C, *] -> complex [B, C, *]; a view where x is channels-last."""
    parts = channels_last(x).movedim(1, -1).unflatten(-1, (-1, 2))  # [B, *, C, 2]
    return torch.view_as_complex(parts).movedim(-1, 1)
