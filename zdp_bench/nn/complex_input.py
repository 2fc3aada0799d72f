"""Complex inputs for networks with real weights: magnitudes, or two channels."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

ComplexAs = Literal["magnitude", "channels"]


class RealInput(nn.Module):
    """Turns complex inputs into |z|, or into real and imaginary parts as channels.

    Shapes: [B, ...] -> [B, ...], or as `real_shape` says.
    """

    def __init__(self, complex_as: ComplexAs) -> None:
        super().__init__()
        self.complex_as = complex_as

    def forward(self, z: Tensor) -> Tensor:
        if not z.is_complex():
            raise TypeError(f"model.complex_as={self.complex_as}: they are real already")
        if self.complex_as == "magnitude":
            return z.abs()
        parts = torch.stack([z.real, z.imag], dim=1)  # [B, 2, ...]
        return parts.flatten(1, 2) if z.dim() > 3 else parts


def real_shape(shape: tuple[int, ...], complex_as: ComplexAs) -> tuple[int, ...]:
    """Return what the shape of an example becomes: [C, H, W] -> [2C, H, W], [H, W] -> [2, H, W]."""
    if complex_as == "magnitude":
        return shape
    return (2 * shape[0], *shape[1:]) if len(shape) > 2 else (2, *shape)
