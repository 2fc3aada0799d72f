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
SAFETY = 1.0 - 1e-5
SMALLEST = torch.finfo(torch.float32).tiny  # factors below it have lost digits


@dataclass(frozen=True)
class ClippedSum:
    """Σᵢ clip(gᵢ) by parameter name, and the unclipped norm of every record: [B] flat, [B, L] per layer."""

    sums: dict[str, Tensor]
    norms: Tensor


def add_up(total: dict[str, Tensor], sums: dict[str, Tensor]) -> None:
    """total += sums, in place. A block that `total` does not hold yet is taken as it is: nobody else may hold on to it."""
    for name, value in sums.items():
        if name in total:
            total[name] += value
        else:
            total[name] = value


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters a private step moves, by name; a shared parameter appears once, under its first name."""
    return {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }


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


def no_records(model: nn.Module, bound: float, per_layer: bool, device: torch.device) -> ClippedSum:
    """The clipped sum of an empty batch: zeros, and no norms."""
    shape = (0, len(groups(model, bound, per_layer))) if per_layer else (0,)
    zeros = {
        name: torch.zeros_like(parameter, requires_grad=False)
        for name, parameter in trainable(model).items()
    }
    return ClippedSum(zeros, torch.zeros(shape, dtype=torch.float64, device=device))


def clip_factors(norms: Tensor, bound: float | Tensor) -> Tensor:
    """min(1, C/‖g‖) for each norm; 0 where the norm is not finite, so that a broken record contributes nothing.

    Nor does one whose factor is not `held`. An infinite bound means no clipping: factors 1, also for what is not finite.

    Args:
        bound: C, one number or one for each norm (those all finite).
    """
    if isinstance(bound, float) and math.isinf(bound):
        return torch.ones_like(norms)
    return held(
        norms.reciprocal().mul_(bound * SAFETY).clamp_(max=1.0).nan_to_num_(nan=0.0)
    )  # norm 0: C/0 = ∞, so 1; norm ∞: 0


# A share of 1/MOST of what it is summed up from has lost so many digits in float32 that it is clipped as if it were longer.
MOST = 4096.0


def guarded(squares: Tensor, mass: Tensor, terms: int, dtype: torch.dtype) -> Tensor:
    """Squared norms to clip by, so that a share stays within its bound as it is COMPUTED, [B] in float64.

    A norm is measured exactly, but the sum is one contraction over all records and positions, in `dtype`. Where a record's
    terms cancel, their rounding errors do not: a record of norm 0 would move the sum by any amount. So it is clipped by

        max(‖g‖ + K·u·M, M/MOST),  M ≥ Σ_t ‖g_t‖‖x_t‖,  K = 16 + √T/2,

    u the unit roundoff, T the number of terms. The first bounds the share with its own errors, which are K·u·M at most unless
    they conspire (Higham 2002, "Accuracy and stability of numerical algorithms", section 4.2: √T·u·M is the rule for T terms of
    random errors, T·u·M the worst case); the second bounds what one record lays on top of everybody else's digits.

    Measured on the papers' networks M/‖g‖ is 3 to 120: natural data loses less than 0.03 % of its norm, and none to the second.
    """
    rounding = (16 + math.sqrt(terms) / 2) * torch.finfo(dtype).eps / 2
    return torch.maximum(squares.sqrt() + rounding * mass, mass / MOST).square_()


def flushed(weighed: Tensor) -> Tensor:
    """0 in the place of what is too small to be held in full, of [B, ...] times factors: rounded upwards, and then multiplied by
    an input of 10³⁸, it would lift a record's share over its bound."""
    if weighed.is_complex():
        return torch.view_as_complex(flushed(torch.view_as_real(weighed)))
    return torch.hardshrink(weighed, torch.finfo(weighed.dtype).tiny)


def held(factors: Tensor) -> Tensor:
    """0 in the place of factors that float32 could not hold in full, and might round upwards to a multiple of 1e-45: norms in
    float64, and products of factors, reach as far."""
    return torch.hardshrink(factors, SMALLEST)
