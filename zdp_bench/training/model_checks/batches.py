"""Whether samples stay apart in a batch as large as the run will draw. The other checks look at three samples, and a layer may
mix only when more come."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from zdp_bench.errors import UserError, first_line
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

SECONDS = 2.0  # no batch is begun that would take longer, and no more of its samples are compared when so long has passed
GROWTH = 4  # each batch to the one before
GROUP = 8  # samples that one comparison watches
# What a comparison takes at the smallest size, about: of outputs in forward passes, with gradients in passes there and back.
PASSES = GROUP + 2
# Alone, a sample is rounded otherwise than in a batch. Seen, with instance norms of few pixels: 7e-6 of an output, 1e-2 of a
# gradient; what depends on the size of the batch is off by much more.
ALONE, ALONE_GRADIENT = 1e-3, 0.1


def next_size(size: int, took: float, most: int) -> int | None:
    """The size of the batch to compare after one of `size` that took so many seconds; None where no time is left for one twice
    as large."""
    larger = min(GROWTH * size, int(size * SECONDS / took), most)
    return larger if larger > size and larger >= min(2 * size, most) else None


def check_growing_batches(
    model: nn.Module, inputs: Tensor, size: int, took: float, steady: bool, backward: bool
) -> int:
    """Compare samples in growing batches, up to all the `inputs`; return the size of the largest that time and memory allowed.

    The clock decides how much is looked at, and never what one look finds.

    Args:
        inputs: as many samples as the run will process at once.
        size: a batch of so many has passed.
        took: seconds that comparing it took.
        steady: False where two passes of one batch differ (dropout): no sample can be compared with itself alone.
        backward: whether gradients are compared, too.

    Raises:
        UserError: a sample's output or gradient depends on the others, or the model cannot take so many.
    """
    began, passed = time.perf_counter(), size
    while larger := next_size(size, took, len(inputs)):
        start = time.perf_counter()
        if not _fits(model, inputs[:larger], 0, steady, backward):
            break
        size, took = larger, time.perf_counter() - start
    for group in range(1, -(-size // GROUP) if size > passed else 0):
        if time.perf_counter() - began + took > SECONDS or not _fits(
            model, inputs[:size], group, steady, backward
        ):
            break
    return size


def _fits(model: nn.Module, inputs: Tensor, group: int, steady: bool, backward: bool) -> bool:
    """Compare one group of samples; False where memory ran out."""
    inside = Innermost(model)
    try:
        with inside:
            _compare(model, inputs, group, steady, backward)
    except UserError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            return False
        asked = f"the model cannot take both one sample and {len(inputs)} of shape {list(inputs.shape[1:])}"
        raise UserError(f"{asked}: {inside.name} says: {first_line(error)}") from None
    return True


def _compare(model: nn.Module, inputs: Tensor, group: int, steady: bool, backward: bool) -> None:
    """Hold some samples of a batch against themselves among other samples, and against themselves alone."""
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
    if not steady:
        return
    samples = [inputs[at : at + 1] for at in watched]
    alone, gradients_alone = _look(model, samples, slice(None), backward)
    for at, sample, in_batch, by_itself in zip(watched, samples, before, alone, strict=True):
        if differs(in_batch, by_itself, ALONE):
            raise mixing_error(find_mixing_layer(model, inputs, sample, [at], [0]))
    largest = max((float(value.abs().max()) for value in gradients.values()), default=0.0)
    for (
        name,
        value,
    ) in gradients.items():  # a bias in front of a norm has a gradient of rounding errors only
        allowed = ALONE_GRADIENT * float(value.abs().max()) + 1e-3 * largest
        if not torch.allclose(value, gradients_alone[name], rtol=0.0, atol=allowed, equal_nan=True):
            raise mixing_error(describe_owner(model, name), "in its gradient")


def _look(
    model: nn.Module, batches: list[Tensor], watched: list[int] | slice, backward: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """The outputs of the watched samples of all the batches, and their gradient: one, in which each has weights of its own."""
    torch.manual_seed(0)  # as `forward`; once, for it takes longer than a small network
    with torch.set_grad_enabled(backward):
        output = torch.cat([model(batch) for batch in batches])[watched]
        return output.detach(), gradients_of(model, output) if backward else {}
