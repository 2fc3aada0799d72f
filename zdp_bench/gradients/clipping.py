"""What both engines share: norms, which parameters are clipped together, and clipping factors.

Norms are computed in float64, because a gradient whose norm comes out too small exceeds the bound.
In float32, torch's `vector_norm` of a row of 10⁸ entries is 1 % too small. In float64, no digits
that matter are lost, and nothing overflows or underflows.
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

# Keeps a contribution within the bound despite the float32 rounding of norms and of the scaled sum.
SAFETY = 1.0 - 1e-5
# The smallest normal float32. Smaller factors have lost digits.
MIN_FACTOR = torch.finfo(torch.float32).tiny
# The largest ratio of the summands' norms to the norm of their sum that is taken as measured. With
# more cancellation, float32 has lost so many digits that the gradient is clipped as a longer one.
MAX_CANCELLATION = 4096.0
# Numbers converted to float64 at a time. They fit in a core's cache, which takes a quarter of the
# time of converting all at once.
NORM_CHUNK = 2**16


@dataclass(frozen=True)
class ClippedSum:
    """A clipped sum and the norms of its summands.

    Attributes:
        sums: Σᵢ clip(gᵢ) by parameter name.
        norms: norms before clipping, [B], or [B, L] if each of L layers is clipped.
    """

    sums: dict[str, Tensor]
    norms: Tensor


def add_up(
    total: dict[str, Tensor],
    sums: dict[str, Tensor],
) -> None:
    """Add sums to `total` in place. A tensor with a new name is inserted without a copy."""
    for name, value in sums.items():
        if name in total:
            total[name] += value
        else:
            total[name] = value


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters by name; a tied one once, under its first name."""
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
    """Yield consecutive parts of a batch, `size` examples each; the last may be smaller.

    An empty batch has no parts.
    """
    inputs, targets = batch
    if len(inputs):  # else, `split` returns one empty part
        yield from zip(inputs.split(size), targets.split(size), strict=True)


def layers(model: nn.Module) -> list[list[str]]:
    """Return, for each module with trainable parameters of its own, their names, in model order."""
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
    """Return the groups of names that are clipped together, each with its bound.

    One group at C or, per layer, L groups at C/√L each.
    """
    if not per_layer:
        return [(list(trainable(model)), bound)]
    by_layer = layers(model)
    layer_bound = bound / math.sqrt(len(by_layer))
    return [(names, layer_bound) for names in by_layer]


def clip_factors(
    norms: Tensor,
    bound: float | Tensor,
    gamma: float | None = None,
) -> Tensor:
    """Return min(1, C/‖g‖) for each norm; 0 if the norm is not finite or the factor is subnormal.

    An example whose gradient is not finite therefore contributes nothing. An infinite bound
    disables clipping: all factors are 1, even for norms that are not finite.

    Args:
        norms: ‖g‖ of each gradient.
        bound: clipping norm C: one number, or a finite one for each norm.
        gamma: if given, the factor is C/(‖g‖ + γ) instead, which is automatic clipping (Bu et al.
            2022, AUTO-S). Short gradients grow, and none becomes longer than C.
    """
    if gamma is not None:
        factors = (norms + gamma).reciprocal_().mul_(bound * SAFETY)
    elif isinstance(bound, float) and math.isinf(bound):
        return torch.ones_like(norms)
    else:  # a norm of 0 gives C/0 = ∞, clamped to 1; a norm of ∞ gives 0
        factors = norms.reciprocal().mul_(bound * SAFETY).clamp_(max=1.0)
    return flush_factors(factors.nan_to_num_(nan=0.0))


def cover_rounding(
    squares: Tensor,
    mass: Tensor,
    summands: int,
    dtype: torch.dtype,
) -> Tensor:
    """Enlarge squared norms so that they bound each gradient as the sum computes it.

    A norm is measured exactly, but the sum is one contraction over examples and positions in
    `dtype`. If the summands of one example cancel, their rounding errors do not: an example of
    norm 0 could change the sum by any amount. An example is therefore clipped as if its norm were

        max(‖g‖ + K·u·M, M/MAX_CANCELLATION),  M ≥ Σ_t ‖g_t‖‖x_t‖,  K = 16 + √T/2,

    with unit roundoff u and T summands. The first term bounds the contribution including its own
    rounding errors. They add up to at most K·u·M unless they are aligned (Higham 2002, "Accuracy
    and stability of numerical algorithms", section 4.2: T random errors add up to about √T·u·M,
    in the worst case to T·u·M). The second term bounds what one example adds to the rounding errors
    of all others.

    On the papers' networks, M/‖g‖ was measured as 3 to 120. The first term then shortens natural
    gradients by less than 0.03 %, and the second does not affect them.

    Args:
        squares: ‖g‖² of each example, [B] in float64.
        mass: M of each example, [B] in float64.
        summands: number T of summands of one example.
        dtype: real data type of the sum.

    Returns:
        The enlarged squared norms, [B] in float64.
    """
    unit_roundoff = torch.finfo(dtype).eps / 2
    rounding = (16 + math.sqrt(summands) / 2) * unit_roundoff
    norms = squares.sqrt() + rounding * mass
    return torch.maximum(norms, mass / MAX_CANCELLATION).square_()


def flush_subnormals(weighted: Tensor) -> Tensor:
    """Return weighted gradients [B, ...] with 0 for subnormal numbers.

    Subnormal numbers have lost digits. Rounded up, and multiplied by an input of 10³⁸, one of them
    would take an example over its bound.
    """
    if weighted.is_complex():
        return torch.view_as_complex(flush_subnormals(torch.view_as_real(weighted)))
    return torch.hardshrink(weighted, torch.finfo(weighted.dtype).tiny)


def flush_factors(factors: Tensor) -> Tensor:
    """Return factors with 0 for those subnormal in float32, which may round up to n·1e-45."""
    return torch.hardshrink(factors, MIN_FACTOR)


def squared_norms(gradients: Tensor) -> Tensor:
    """Return ‖gᵢ‖₂² of [B, ...], [B] in float64."""
    rows = _flat(gradients)
    if not rows.is_cpu or rows.numel() <= NORM_CHUNK:
        return _squares(rows)
    examples_at_once = max(1, NORM_CHUNK // rows.shape[1])
    parts = rows.split(examples_at_once)
    squares = torch.zeros(len(rows), dtype=torch.float64)
    squares_of_parts = squares.split(examples_at_once)

    @torch.no_grad()  # the gradient mode is thread-local
    def measure(start: int, stop: int) -> None:
        for number in range(start, stop):
            for columns in parts[number].split(NORM_CHUNK, dim=1):
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
    numbers = math.prod(rows.shape[1:])  # 1 if rows are [B]
    if rows.is_contiguous():
        return rows.view(len(rows), numbers)
    return rows.permute(0, *memory_order(rows)).reshape(len(rows), numbers)


# Flags of the open `defer_finite` contexts, innermost last; `all_finite` updates the innermost.
_deferred_flags: list[Tensor] = []


@contextmanager
def defer_finite(flag: Tensor) -> Iterator[None]:
    """Make `all_finite` return True inside the context, and record the true result in `flag`.

    This avoids reading a value from the device, which a CUDA graph cannot do. Discard sums computed
    inside if `flag` is False afterwards.

    Args:
        flag: boolean tensor, True on entry; set to False in place if a norm is not finite.
    """
    _deferred_flags.append(flag)
    try:
        yield
    finally:
        _deferred_flags.pop()


def all_finite(norms: Tensor) -> bool:
    """Return True if no norm is ∞ or NaN."""
    if _deferred_flags:
        _deferred_flags[-1].logical_and_(norms.isfinite().all())
        return True
    return norms.numel() == 0 or math.isfinite(norms.max())  # a NaN makes the maximum NaN
