"""Complex activations, by name. Each is finite, with a finite gradient, everywhere: at 0, on the axes, at large |z|."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zdp_bench.registry import register


@register("activation", "cardioid")
class Cardioid(nn.Module):
    """½(1 + cos arg z)·z: keeps the positive real axis, blocks the negative one (Virtue, Yu & Lustig 2017, eq. 5)."""

    def forward(self, z: Tensor) -> Tensor:
        modulus = z.abs()
        cosine = z.real / torch.where(modulus > 0, modulus, torch.ones_like(modulus))
        return (0.5 + 0.5 * cosine) * z


@register("activation", "crelu")
class CReLU(nn.Module):
    """ReLU on the real and on the imaginary part (Trabelsi et al. 2018, section 3.4)."""

    def forward(self, z: Tensor) -> Tensor:
        return torch.view_as_complex(torch.relu(torch.view_as_real(z)))


@register("activation", "relu")
class ReLU(nn.ReLU):
    """ReLU, for real networks."""
