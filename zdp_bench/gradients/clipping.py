"""What both engines share: norms, which parameters are clipped together, and by which factor.

Norms are taken in float64: one too small lets its gradient exceed the bound. torch's `vector_norm`
in float32 measures rows of 10⁸ entries 1 % too small; in float64 nothing is lost, overflows or
underflows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zdp_bench.nn.memory_format import memory_order
from zdp_bench.threads import run_parallel

Batch = tuple[Tensor, Tensor]  # inputs [B, ...], targets [B, ...]; several tensors are `Parts`
Loss = Callable[[Tensor, Tensor], Tensor]  # (outputs, targets) -> [B]

# float32 rounding of a norm and of the scaled sum must not lift a contribution over the bound.
SAFETY = 1.0 - 1e-5
# Factors below it have lost digits.
SMALLEST = torch.finfo(torch.float32).tiny
# A gradient of 1/MOST of what it is summed up from has lost so many digits in float32 that it is
# clipped as if it were longer.
MOST = 4096.0
# So many numbers become float64 at a time, in a core's cache: a quarter of the time of all at once.
NORM_AT_ONCE = 2**16


@dataclass(frozen=True)
class ClippedSum:
    """Σᵢ clip(gᵢ) by parameter name, and the norms before clipping: [B] flat, [B, L] per layer."""

    sums: dict[str, Tensor]
    norms: Tensor


def add_up(
    total: dict[str, Tensor],
    sums: dict[str, Tensor],
) -> None:
    """Add sums to `total` in place. Tensors of new names are taken over, not copied."""
    for name, value in sums.items():
        if name in total:
            total[name] += value
        else:
            total[name] = value


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that train, by name; a shared one once, under its first name."""
    named = model.named_parameters()
    return {name: parameter for name, parameter in named if parameter.requires_grad}


def zero_rows(
    model: nn.Module,
    count: int,
) -> dict[str, Tensor]:
    """Return zeros for `count` gradients of each trainable parameter, [count, *shape] by name."""
    return {
        name: parameter.new_zeros(count, *parameter.shape)
        for name, parameter in trainable(model).items()
    }


def split_batch(batch: Batch, size: int = 1) -> Iterator[Batch]:
    """Yield a batch in parts of `size` examples."""
    inputs, targets = batch
    yield from zip(inputs.split(size), targets.split(size), strict=True)


def layers(model: nn.Module) -> list[list[str]]:
    """Return the parameter names of each module that holds any itself, in the model's order."""
    grouped: dict[str, list[str]] = {}
    for name in trainable(model):
        module_name, _, _ = name.rpartition(".")
        grouped.setdefault(module_name, []).append(name)
    return list(grouped.values())


def groups(
    model: nn.Module,
    bound: float,
    per_layer: bool,
) -> list[tuple[list[str], float]]:
    """Return which parameters are clipped together, and their bound: all at C, L layers at C/√L."""
    if not per_layer:
        return [(list(trainable(model)), bound)]
    by_layer = layers(model)
    bound_of_one = bound / math.sqrt(len(by_layer))
    return [(names, bound_of_one) for names in by_layer]


def clip_factors(
    norms: Tensor,
    bound: float | Tensor,
    gamma: float | None = None,
) -> Tensor:
    """Return min(1, C/‖g‖) for each norm, `held`; 0 where the norm is not finite.

    So a broken example contributes nothing. An infinite bound means no clipping: factors 1, also
    for what is not finite.

    Args:
        bound: C, one number or one for each norm (those all finite).
        gamma: if given, the factor is C/(‖g‖ + γ), automatic clipping (Bu et al. 2022, AUTO-S):
            short gradients grow, and none gets longer than C.
    """
    if gamma is not None:
        factors = (norms + gamma).reciprocal_().mul_(bound * SAFETY)
    elif isinstance(bound, float) and math.isinf(bound):
        return torch.ones_like(norms)
    else:  # norm 0: C/0 = ∞, so 1; norm ∞: 0
        factors = norms.reciprocal().mul_(bound * SAFETY).clamp_(max=1.0)
    return held(factors.nan_to_num_(nan=0.0))


def guarded(
    squares: Tensor,
    mass: Tensor,
    summands: int,
    dtype: torch.dtype,
) -> Tensor:
    """Return squared norms [B], float64, that bound each gradient as it is computed in the sum.

    A norm is measured exactly, but the sum is one contraction over examples and positions in
    `dtype`. Where the summands of one example cancel, their rounding errors do not: an example of
    norm 0 could move the sum by any amount. So it is clipped by

        max(‖g‖ + K·u·M, M/MOST),  M ≥ Σ_t ‖g_t‖‖x_t‖,  K = 16 + √T/2,

    with unit roundoff u and T summands. The first bounds the contribution with its own errors,
    at most K·u·M unless they conspire (Higham 2002, "Accuracy and stability of numerical
    algorithms", section 4.2: √T·u·M is the rule for T random errors, T·u·M the worst case). The
    second bounds what one example adds to the rounding errors of all others.

    Measured on the papers' networks M/‖g‖ is 3 to 120: natural data loses less than 0.03 % of its
    norm to the first, nothing to the second.
    """
    unit_roundoff = torch.finfo(dtype).eps / 2
    rounding = (16 + math.sqrt(summands) / 2) * unit_roundoff
    norms = squares.sqrt() + rounding * mass
    return torch.maximum(norms, mass / MOST).square_()


def flushed(weighed: Tensor) -> Tensor:
    """Return gradients times factors, [B, ...], with 0 for numbers too small to be held in full.

    Rounded upwards, and multiplied by an input of 10³⁸, they would lift an example over its bound.
    """
    if weighed.is_complex():
        return torch.view_as_complex(flushed(torch.view_as_real(weighed)))
    return torch.hardshrink(weighed, torch.finfo(weighed.dtype).tiny)


def held(factors: Tensor) -> Tensor:
    """Return factors with 0 for those that float32 would round, maybe upwards, to n·1e-45."""
    return torch.hardshrink(factors, SMALLEST)


def squared_norms(gradients: Tensor) -> Tensor:
    """Return ‖gᵢ‖₂² of [B, ...], [B] in float64."""
    rows = _flat(gradients)
    if not rows.is_cpu or rows.numel() <= NORM_AT_ONCE:
        return _squares(rows)
    few = max(1, NORM_AT_ONCE // rows.shape[1])
    parts = rows.split(few)
    squares = torch.zeros(len(rows), dtype=torch.float64)
    squares_of_parts = squares.split(few)

    @torch.no_grad()  # a thread has its own mode
    def measure(start: int, stop: int) -> None:
        for number in range(start, stop):
            for columns in parts[number].split(NORM_AT_ONCE, dim=1):
                squares_of_parts[number].add_(_squares(columns))

    run_parallel(measure, len(parts))
    return squares


def _squares(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64).square_()


def _flat(rows: Tensor) -> Tensor:
    """Return [B, ...] as real [B, n], in the order of memory: a view where possible."""
    if rows.is_complex():
        rows = torch.view_as_real(rows.resolve_conj())
    elif rows.dim() == 2:
        return rows
    numbers = math.prod(rows.shape[1:])  # 1 of [B]
    if rows.is_contiguous():
        return rows.view(len(rows), numbers)
    return rows.permute(0, *memory_order(rows)).reshape(len(rows), numbers)


# Where it is noted whether norms were finite, instead of reading them; the innermost counts.
_notes: list[Tensor] = []


@contextmanager
def defer_finite(note: Tensor) -> Iterator[None]:
    """Make `all_finite` return True inside, and set `note` to False instead of reading a value.

    Sums made inside are of no use if `note` is False afterwards.
    """
    _notes.append(note)
    try:
        yield
    finally:
        _notes.pop()


def all_finite(norms: Tensor) -> bool:
    """True if none is ∞ or NaN; the maximum of numbers with a NaN is NaN."""
    if _notes:
        _notes[-1].logical_and_(norms.isfinite().all())
        return True
    return norms.numel() == 0 or math.isfinite(norms.max())
