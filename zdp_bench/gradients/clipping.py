"""What both gradient engines share: which parameters clip together, and the factor that clips them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]  # inputs [B, ...], targets [B, ...]
Loss = Callable[[Tensor, Tensor], Tensor]  # (outputs, targets) -> [B]

# float32 rounding of a norm and of the scaled sum must not lift a contribution over the bound.
SAFETY = 1.0 - 1e-6


@dataclass(frozen=True)
class ClippedSum:
    """Σᵢ clip(gᵢ) by parameter name, and the unclipped norm of every record: [B] flat, [B, L] per layer."""

    sums: dict[str, Tensor]
    norms: Tensor


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters a private step moves, by name; a shared parameter appears once, under its first name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def layers(model: nn.Module) -> list[list[str]]:
    """The parameter names of each layer (weight and bias of one module together), in the model's order."""
    grouped: dict[str, list[str]] = {}
    for name in trainable(model):
        grouped.setdefault(name.rpartition(".")[0], []).append(name)
    return list(grouped.values())


def groups(model: nn.Module, bound: float, per_layer: bool) -> list[tuple[list[str], float]]:
    """The sets of parameters that are clipped together, each with its bound: all at C, or each of L layers at C/√L."""
    if not per_layer:
        return [(list(trainable(model)), bound)]
    by_layer = layers(model)
    return [(names, bound / math.sqrt(len(by_layer))) for names in by_layer]


def squared_norms(rows: Tensor) -> Tensor:
    """‖row‖₂² of each row, [B, ...] -> [B] in float64: float32 sums of squares come out too small on long rows."""
    if rows.is_complex():
        rows = torch.view_as_real(rows)
    rows = rows.reshape(len(rows), math.prod(rows.shape[1:]))  # [B, n]; -1 would not do for B = 0
    if rows.shape[1] == 0:
        return rows.new_zeros(rows.shape[0], dtype=torch.float64)
    return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).square()


def clip_factors(norms: Tensor, bound: float) -> Tensor:
    """min(1, C/‖g‖) for each norm; 0 where the norm is not finite, so that a broken record contributes nothing.

    An infinite bound means no clipping: factors 1, also for what is not finite.
    """
    if math.isinf(bound):
        return torch.ones_like(norms)
    factors = (bound * SAFETY / norms).clamp(max=1.0)  # 0/0 -> NaN is caught below: norm 0 stays factor 1
    factors = torch.where(norms == 0, torch.ones_like(factors), factors)
    return torch.where(torch.isfinite(norms), factors, torch.zeros_like(factors))
