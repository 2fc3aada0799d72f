"""Check that samples stay apart in batches as large as the run's.

The other checks take three samples, and a layer may mix only larger batches.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from zdp_bench.errors import UserError, first_line
from zdp_bench.gradients.cross_check import same_draws
from zdp_bench.gradients.parts import shapes
from zdp_bench.training.micro_batches import is_out_of_memory
from zdp_bench.training.model_checks.probes import (
    ROUNDED,
    Innermost,
    change_sample,
    describe_owner,
    differs,
    gradients_of,
)
from zdp_bench.training.model_checks.sample_independence import find_mixing_layer, mixing_error

SECONDS = 2.0  # for all comparisons
GROWTH = 4  # size of a batch over that of the one before
GROUP = 8  # samples that one comparison watches
PASSES = GROUP + 2  # one comparison takes about as long as so many passes
# Alone, a sample is rounded otherwise than in a batch. Measured, with instance norms of few pixels:
# 7e-6 of an output, 1e-2 of a gradient. What depends on the batch size is off by much more.
ALONE, ALONE_GRADIENT = 1e-3, 0.1


def next_size(size: int, took: float, most: int) -> int | None:
    """Return the batch size to try after `size`, which took so many seconds.

    None if there is no time for twice as many samples.
    """
    larger = min(GROWTH * size, int(size * SECONDS / took), most)
    return larger if larger > size and larger >= min(2 * size, most) else None


def check_growing_batches(
    model: nn.Module, inputs: Tensor, size: int, took: float, backward: bool
) -> int:
    """Compare samples in growing batches; return the size of the largest one.

    Time decides only how many samples are compared, never the outcome of a comparison.

    Args:
        inputs: as many samples as the run will process at once.
        size: the size of a batch that has passed already.
        took: the seconds that comparing it took.
        backward: True to compare gradients too.

    Raises:
        UserError: a sample's output or gradient depends on the others, or the model cannot take so
            many.
    """
    began, passed = time.perf_counter(), size
    while larger := next_size(size, took, len(inputs)):
        start = time.perf_counter()
        if not _fits(model, inputs[:larger], 0, backward):
            break
        size, took = larger, time.perf_counter() - start
    for group in range(1, -(-size // GROUP) if size > passed else 0):
        if time.perf_counter() - began + took > SECONDS or not _fits(
            model, inputs[:size], group, backward
        ):
            break
    return size


def _fits(model: nn.Module, inputs: Tensor, group: int, backward: bool) -> bool:
    """Compare one group of samples; return False if memory ran out."""
    inside = Innermost(model)
    try:
        with inside:
            _compare(model, inputs, group, backward)
    except UserError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            return False
        asked = f"the model cannot take both one sample and {len(inputs)} of shape "
        asked += shapes(inputs[0])
        raise UserError(f"{asked}: {inside.name} says: {first_line(error)}") from None
    return True


def _compare(model: nn.Module, inputs: Tensor, group: int, backward: bool) -> None:
    """Compare some samples of a batch with themselves among other samples, and alone."""
    watched = list(range(group, len(inputs), -(-len(inputs) // GROUP)))  # all over the batch
    changed = change_sample(inputs, slice(None), 1.0)
    changed[watched] = inputs[watched]
    before, gradients = _look(model, [inputs], watched, backward)
    after, gradients_after = _look(model, [changed], watched, backward)
    if differs(before, after):
        raise mixing_error(find_mixing_layer(model, inputs, changed, watched))
    for name, value in gradients.items():
        if differs(value, gradients_after[name], ROUNDED):
            raise mixing_error(describe_owner(model, name), "in its gradient")
    samples = [inputs[at : at + 1] for at in watched]
    alone, gradients_alone = _look(model, samples, slice(None), backward)
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
    model: nn.Module, batches: list[Tensor], watched: list[int] | slice, backward: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the outputs of the watched samples, and the gradient of a weighted sum of them."""
    with torch.set_grad_enabled(backward), same_draws(model):
        output = torch.cat([model(batch) for batch in batches])[watched]
        return output.detach(), gradients_of(model, output) if backward else {}
