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
# Numbers summed in their own precision before float64 takes over: vector_norm in float32 under-measures long rows.
NORM_BLOCK = 1024
UNDERFLOW = 1e-15  # norms this small may have lost entries whose square is below float32
SHORT = 2 * NORM_BLOCK  # rows that are no longer are summed in one go
FEW = 200_000  # below, one slow pass in float64 is done sooner than five fast ones are called


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


def no_records(model: nn.Module, bound: float, per_layer: bool, device: torch.device) -> ClippedSum:
    """The clipped sum of an empty batch: zeros, and no norms."""
    shape = (0, len(groups(model, bound, per_layer))) if per_layer else (0,)
    zeros = {name: torch.zeros_like(parameter, requires_grad=False) for name, parameter in trainable(model).items()}
    return ClippedSum(zeros, torch.zeros(shape, dtype=torch.float64, device=device))


def flat(rows: Tensor) -> Tensor:
    """[B, ...] -> real [B, n], the entries of each row in the order they lie in memory: a view wherever there is one."""
    if rows.is_complex():
        rows = torch.view_as_real(rows.resolve_conj())
    elif rows.dim() == 2:
        return rows
    if rows.is_contiguous():
        return rows.flatten(1)
    by_stride = sorted(range(1, rows.dim()), key=rows.stride, reverse=True)
    return rows.permute(0, *by_stride).reshape(rows.shape[0], math.prod(rows.shape[1:]))


def squared_norms(rows: Tensor) -> Tensor:
    """‖row‖₂² of each row, [B, ...] -> [B] in float64.

    Blocks of `NORM_BLOCK` entries are summed in the rows' own precision, the blocks in float64: as fast as float32 and right to
    1e-6, where float32 throughout comes out 1 % too small at 1e8 entries. What overflows, or nears underflow, is measured again
    in float64.
    """
    rows = flat(rows)
    count, length = rows.shape
    if rows.numel() == 0:
        return rows.new_zeros(count, dtype=torch.float64)
    if rows.dtype == torch.float32 and length <= SHORT:
        squares = torch.linalg.vector_norm(rows, dim=1).double().square_()
    elif rows.is_cuda or rows.dtype != torch.float32 or rows.numel() < FEW or rows.stride(1) != 1:
        return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).square()
    else:
        whole = length - length % NORM_BLOCK
        blocks = rows[:, :whole].unflatten(1, (-1, NORM_BLOCK))  # [B, blocks, NORM_BLOCK]
        squares = torch.linalg.vector_norm(blocks, dim=2).double().square_().sum(dim=1)
        if whole < length:
            squares += torch.linalg.vector_norm(rows[:, whole:], dim=1).double().square_()
    return squares if _to_be_trusted(squares, power=2) else torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).square()


def norms_of(several: list[Tensor]) -> tuple[Tensor, bool]:
    """‖row‖₂ of several [B, ...] -> [len(several), B] in float64, and whether all are finite: a small network's cost more to look
    at than to sum."""
    rows = [flat(each) for each in several]
    short = [each.dtype == torch.float32 and each.shape[1] <= SHORT and each.numel() > 0 for each in rows]
    first = (torch.linalg.vector_norm(r, dim=1) if few else squared_norms(r).sqrt_() for r, few in zip(rows, short, strict=True))
    norms = torch.stack([*first]).double()
    if _to_be_trusted(norms, power=1):
        return norms, True
    for i, each in enumerate(rows):
        if short[i] and not _to_be_trusted(norms[i], power=1):
            norms[i] = torch.linalg.vector_norm(each, dim=1, dtype=torch.float64)
    return norms, bool(torch.isfinite(norms).all())


def _to_be_trusted(norms: Tensor, power: int) -> bool:
    """Whether float32 can have measured these norms, or their squares: none overflowed or is near underflow."""
    if not norms.numel():
        return True
    lowest, highest = torch.aminmax(norms)  # NaN where any is, and then neither comparison holds
    return float(lowest) > UNDERFLOW**power and float(highest) < math.inf


def clip_factors(norms: Tensor, bound: float | Tensor) -> Tensor:
    """min(1, C/‖g‖) for each norm; 0 where the norm is not finite, so that a broken record contributes nothing.

    Nor does one whose factor is not `held`. An infinite bound means no clipping: factors 1, also for what is not finite.

    Args:
        bound: C, one number or one for each norm (those all finite).
    """
    if isinstance(bound, float) and math.isinf(bound):
        return torch.ones_like(norms)
    return held((bound * SAFETY / norms).clamp_(max=1.0).nan_to_num_(nan=0.0))  # norm 0: C/0 = ∞, so 1; norm ∞: 0


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
