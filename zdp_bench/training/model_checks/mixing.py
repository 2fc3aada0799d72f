"""Check that no layer mixes samples, and name the layer that does.

Some samples are watched and the others changed, or left out: outputs and gradients of the watched
ones must come out as before. That is done with three samples, and with as many as the run will
process at once where there is time, for a layer may mix larger batches only. To find the layer,
tensors are followed through the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zdp_bench.errors import UserError, first_line
from zdp_bench.gradients.cross_check import same_draws
from zdp_bench.gradients.parts import shapes, takes_parts
from zdp_bench.training.batches import is_out_of_memory
from zdp_bench.training.model_checks.probes import (
    ROUNDED,
    SAME,
    Innermost,
    change_sample,
    describe_layer,
    describe_owner,
    differs,
    forward,
    gradients_of,
)

SAMPLES = 3  # of the smallest batch
SECONDS = 2.0  # for all comparisons of larger batches
GROWTH = 4  # size of a batch over that of the one before
GROUP = 8  # the most samples that one comparison watches
# Alone, a sample is rounded otherwise than in a batch. Measured, with instance norms of few pixels:
# 7e-6 of an output, 0.12 of a gradient. What depends on the batch size is off by much more.
ALONE, ALONE_GRADIENT = 1e-3, 0.3

REPLACE_BATCHNORM = (
    "set model.replace_batchnorm=group, instance or frozen "
    '(in Python: zdp_bench.nn.replace_batchnorm(model, "group"))'
)


def check_samples_stay_apart(model: nn.Module, inputs: Tensor, public: bool = False) -> float:
    """Compare each of the three samples; return the seconds that one comparison took.

    Args:
        public: the inputs are public examples, not random numbers.

    Raises:
        UserError: a sample's output or gradient depends on the others.
    """
    start = time.perf_counter()
    for group in range(SAMPLES):
        _compare(model, inputs, group, public)
    return (time.perf_counter() - start) / SAMPLES


def next_size(size: int, took: float, most: int) -> int | None:
    """Return the batch size to try after `size`, which took so many seconds.

    None if there is no time for twice as many samples.
    """
    larger = min(GROWTH * size, int(size * SECONDS / took), most)
    return larger if larger > size and larger >= min(2 * size, most) else None


def check_growing_batches(
    model: nn.Module, inputs: Tensor, took: float, public: bool = False
) -> int:
    """Compare samples in growing batches; return the size of the largest one.

    Time decides only how many samples are compared, never the outcome of a comparison.

    Args:
        inputs: as many samples as the run will process at once.
        took: the seconds that a comparison of three samples took.

    Raises:
        UserError: a sample's output or gradient depends on the others, or the model cannot take so
            many.
    """
    began, size = time.perf_counter(), SAMPLES
    while larger := next_size(size, took, len(inputs)):
        start = time.perf_counter()
        if not _fits(model, inputs[:larger], 0, public):
            break
        size, took = larger, time.perf_counter() - start
    for group in range(1, _stride(size) if size > SAMPLES else 0):
        late = time.perf_counter() - began + took > SECONDS
        if late or not _fits(model, inputs[:size], group, public):
            break
    return size


def _stride(samples: int) -> int:
    """Return how far apart watched samples stand: two of three are changed at least."""
    return max(SAMPLES, -(-samples // GROUP))


def _compare(model: nn.Module, inputs: Tensor, group: int, public: bool) -> None:
    """Compare some samples of a batch with themselves among other samples, and alone.

    The others are changed by little in groups of even number, by much in the others, unless that
    is beyond what the model can compute: infinity times zero would be taken for mixing.
    """
    watched = list(range(group, len(inputs), _stride(len(inputs))))  # all over the batch
    changed = change_sample(inputs, slice(None), 1000.0 if group % 2 else 1.0, public)
    with torch.no_grad():
        if group % 2 and not torch.isfinite(forward(model, changed)).all():
            changed = change_sample(inputs, slice(None), 1.0, public)
    changed[watched] = inputs[watched]
    before, gradients = _look(model, [inputs], watched)
    after, gradients_after = _look(model, [changed], watched)
    if differs(before, after):
        raise mixing_error(find_mixing_layer(model, inputs, changed, watched))
    for name, value in gradients.items():
        if differs(value, gradients_after[name], ROUNDED):
            raise mixing_error(describe_owner(model, name), "in its gradient")
    samples = [inputs[at : at + 1] for at in watched]
    alone, gradients_alone = _look(model, samples, slice(None))
    for at, sample, in_batch, by_itself in zip(watched, samples, before, alone, strict=True):
        if differs(in_batch, by_itself, ALONE):
            raise mixing_error(find_mixing_layer(model, inputs, sample, [at], [0]))
    largest = max((float(value.abs().max()) for value in gradients.values()), default=0.0)
    for name, value in gradients.items():
        # The gradient of a bias before a norm is all rounding errors.
        allowed = ALONE_GRADIENT * float(value.abs().max()) + 1e-3 * largest
        if not torch.allclose(value, gradients_alone[name], rtol=0.0, atol=allowed, equal_nan=True):
            raise mixing_error(describe_owner(model, name), "in its gradient")


def _look(
    model: nn.Module, batches: list[Tensor], watched: list[int] | slice
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the outputs of the watched samples, and the gradient of a weighted sum of them."""
    with torch.enable_grad(), same_draws(), takes_parts(model):
        output = torch.cat([model(batch) for batch in batches])[watched]
        return output.detach(), gradients_of(model, output)


def _fits(model: nn.Module, inputs: Tensor, group: int, public: bool) -> bool:
    """Compare one group of samples; return False if memory ran out."""
    inside = Innermost(model)
    try:
        with inside:
            _compare(model, inputs, group, public)
    except UserError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            return False
        asked = f"the model cannot take both one sample and {len(inputs)} of shape "
        asked += shapes(inputs[0])
        raise UserError(f"{asked}: {inside.name} says: {first_line(error)}") from None
    return True


def mixing_error(layer: str, where: str = "") -> UserError:
    where = f" {where}" if where else ""
    advice = REPLACE_BATCHNORM if "BatchNorm" in layer else "use a per-sample layer there"
    return UserError(
        f"{layer} lets one sample see another{where}, so clipping bounds nothing and no ε would "
        f"hold: {advice}, "
        "or train with algorithm=sgd, which claims none."
    )


def find_mixing_layer(
    model: nn.Module,
    inputs: Tensor,
    other: Tensor,
    samples: list[int],
    theirs: list[int] | None = None,
) -> str:
    """Name the first layer whose result for the same samples differs between two batches.

    Args:
        samples: the indices of the samples in `inputs`, and in `other` unless `theirs` names them.
    """
    tolerance = SAME if len(inputs) == len(other) else ROUNDED
    with torch.no_grad():
        passages = (
            _trace(model, inputs, samples),
            _trace(model, other, samples if theirs is None else theirs),
        )
        for before, after in zip(*passages, strict=False):
            if (
                before.value is not None
                and after.value is not None
                and differs(before.value, after.value, tolerance)
            ):
                # A layer whose input is mixed already is innocent: its caller did it.
                return describe_layer(
                    model, before.name if before.leaving else before.name.rpartition(".")[0]
                )
    return describe_layer(model, "")


@dataclass(frozen=True)
class _Passage:
    """The samples' part of a tensor that enters or leaves a module; None if it cannot be told."""

    name: str
    leaving: bool
    value: Tensor | None


def _trace(model: nn.Module, inputs: Tensor, samples: list[int]) -> list[_Passage]:
    """Return every tensor that enters or leaves a module in one forward pass, in order."""
    seen: list[_Passage] = []

    def note(name: str, leaving: bool) -> Callable[..., None]:
        def hook(module: nn.Module, entering: object, left: object = None) -> None:
            passed = left if leaving else entering
            for value in passed if isinstance(passed, tuple | list) else (passed,):
                if isinstance(value, Tensor):
                    seen.append(_Passage(name, leaving, _of_samples(value, samples, len(inputs))))

        return hook

    handles = []
    for name, module in model.named_modules():
        handles += [
            module.register_forward_pre_hook(note(name, False)),
            module.register_forward_hook(note(name, True)),
        ]
    try:
        forward(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _of_samples(value: Tensor, samples: list[int], of: int) -> Tensor | None:
    """Return a copy of the samples' part. Other dimensions may be folded into the first one."""
    if value.dim() == 0 or len(value) == 0 or len(value) % of:
        return None
    return value.detach().unflatten(0, (of, -1))[samples]
