"""Check that no layer mixes samples whose values have a structure that random numbers lack.

A layer may look at the batch only where samples are padded, have zeros, gaps or whole numbers, or
lengths of their own. So each such structure is given to all samples of a batch, and then to all but
the first: no other sample may come out otherwise. Outputs suffice, for gradients were compared.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from zdp_bench.errors import UserError
from zdp_bench.gradients.parts import leaves_of, map_leaves
from zdp_bench.training.model_checks.mixing import (
    ALONE,
    SAMPLES,
    check_samples_stay_apart,
    find_mixing_layer,
    mixing_error,
)
from zdp_bench.training.model_checks.probes import INTEGERS, differs, draw_synthetic, forward


def check_structured(model: nn.Module, inputs: Tensor, public: bool = False) -> None:
    """Compare samples beside others of their structure, and beside one without it.

    A structure that the model cannot take, or answers with NaN, is left out.

    Args:
        inputs: random numbers [3, ...]; of `public` examples random numbers are tried as well.

    Raises:
        UserError: a sample's output depends on the others.
    """
    if public:
        _check_random(model, inputs)
    for full, changed, is_risky in _structures(inputs, public):
        mixed = changed.clone()
        mixed[:1] = full[:1]
        if is_risky and not _is_safe(model, changed, full):
            continue
        found = _run(model, mixed)
        if found is None or found.isnan().any():
            continue
        for other, watched in ((changed, [1, 2]), (full, [0])):
            among = _run(model, other)
            if among is not None and differs(among[watched], found[watched], ALONE):
                raise mixing_error(find_mixing_layer(model, other, mixed, watched))


def _check_random(model: nn.Module, examples: Tensor) -> None:
    """Check random numbers beside public examples, if the model takes them."""
    drawn = draw_synthetic(examples[:0], SAMPLES, INTEGERS, next(model.parameters()).device)
    if not _is_safe(model, drawn):
        return
    output = _run(model, drawn)
    if output is None or output.isnan().any():
        return
    try:
        check_samples_stay_apart(model, drawn)
    except UserError:
        raise
    except Exception:  # other random numbers are none that it takes
        return
    check_structured(model, drawn)


def _run(model: nn.Module, inputs: Tensor) -> Tensor | None:
    """Return the output; None if the model cannot take the inputs."""
    try:
        with torch.no_grad():
            return forward(model, inputs)
    except Exception:
        return None


def _is_safe(model: nn.Module, *batches: Tensor) -> bool:
    """False if an index of these may be none of the model's; a copy on the CPU is asked.

    On a GPU that would end all work of the process.
    """
    if next(model.parameters()).device.type == "cpu":
        return True
    try:
        twin = copy.deepcopy(model).cpu()
    except Exception:
        return False
    return all(_run(twin, batch.to("cpu")) is not None for batch in batches)


def _structures(inputs: Tensor, public: bool) -> Iterator[tuple[Tensor, Tensor, bool]]:
    """Yield samples without a structure, with it, and True if an index may come of it."""
    risky = [_gaps(torch.nan)]
    if public:
        risky.append(lambda leaf: leaf.roll(1, 1) if leaf.dim() > 1 else leaf)
    changes = [_keep_head(1), _keep_head(-1), _keep_tail, _gaps(0.0), torch.zeros_like]
    changes += [_round(1 if public else 3), *risky]
    leaves = leaves_of(inputs)
    for change in changes:
        changed = map_leaves(partial(_change_but_lengths, change), inputs)
        if not all(map(torch.equal, leaves, leaves_of(changed))):
            yield inputs, changed, change in risky
    if any(map(_may_be_lengths, leaves)):
        for most in {leaf.shape[at] for leaf in leaves if leaf.dim() > 1 for at in (1, -1)} - {1}:
            yield _with_lengths(inputs, most), _with_lengths(inputs, 1), True


def _change_but_lengths(change: Callable[[Tensor], Tensor], leaf: Tensor) -> Tensor:
    return leaf if _may_be_lengths(leaf) else change(leaf)


def _may_be_lengths(leaf: Tensor) -> bool:
    integer = not (leaf.dtype.is_floating_point or leaf.dtype.is_complex)
    return leaf.dim() == 1 and integer and leaf.dtype != torch.bool


def _with_lengths(inputs: Tensor, length: int) -> Tensor:
    return map_leaves(
        lambda leaf: torch.full_like(leaf, length) if _may_be_lengths(leaf) else leaf, inputs
    )


def _keep_head(axis: int) -> Callable[[Tensor], Tensor]:
    """Return a function that makes the second half along an axis zero: padding."""

    def change(leaf: Tensor) -> Tensor:
        if leaf.dim() < 2:
            return leaf
        kept, size = leaf.clone(), leaf.shape[axis]
        kept.narrow(axis, (size + 1) // 2, size // 2).zero_()
        return kept

    return change


def _keep_tail(leaf: Tensor) -> Tensor:
    return _keep_head(1)(leaf.flip(1)).flip(1) if leaf.dim() > 1 else leaf


def _gaps(value: float) -> Callable[[Tensor], Tensor]:
    """Return a function that gives every other number a value, if it can have that."""

    def change(leaf: Tensor) -> Tensor:
        if math.isnan(value) and not (leaf.dtype.is_floating_point or leaf.dtype.is_complex):
            return leaf
        changed = leaf.clone(memory_format=torch.contiguous_format)
        changed.view(len(leaf), -1)[:, ::2] = value
        return changed

    return change


def _round(scale: int) -> Callable[[Tensor], Tensor]:
    def change(leaf: Tensor) -> Tensor:
        if leaf.dtype.is_complex:
            return torch.view_as_complex((scale * torch.view_as_real(leaf)).round())
        return (scale * leaf).round() if leaf.dtype.is_floating_point else leaf

    return change
