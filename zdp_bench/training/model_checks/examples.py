"""Examples for the checks of a model: random numbers of the right shapes, or a probe."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zdp_bench.errors import UserError
from zdp_bench.gradients import Batch, Loss, PerExample, per_example
from zdp_bench.gradients.parts import describe, leaves_of, map_leaves, takes_parts
from zdp_bench.gradients.program import copy_apart

SAMPLES = 3  # of the batches that are checked


@dataclass(frozen=True)
class Source:
    """Where the examples of a check come from."""

    inputs: Tensor  # [n, ...], public examples; with n = 0 random numbers of the shape are drawn
    targets: Tensor
    classes: int | None  # whole numbers in targets are drawn below it; None: as in inputs

    @property
    def is_public(self) -> bool:
        return len(self.inputs) > 0

    def draw(self, examples: int) -> Batch:
        """Return so many examples; the same at every call."""
        return _draw(self.inputs, examples, None), _draw(self.targets, examples, self.classes)


def find_source(
    model: nn.Module,
    loss: Loss,
    like: Batch,
    probe: Batch | None,
) -> Source:
    """Return the source of a check: the probe or, without one, random numbers."""
    device = next(model.parameters()).device
    if probe is not None:
        for name, own, expected in zip(("inputs", "targets"), probe, like, strict=True):
            _require_kind(name, own, expected)
        inputs, targets = [map_leaves(lambda leaf: leaf.to(device), part) for part in probe]
    else:
        inputs, targets = [map_leaves(lambda leaf: leaf[:0].to(device), part) for part in like]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            twin = copy_apart(model)
            with takes_parts(twin):
                output = twin(_draw(inputs, SAMPLES, None))
            classes = _count_classes(output, targets)
        except Exception:  # the check names the layer that fails
            return Source(inputs, targets, 2)
        try:
            PerExample(per_example(loss).loss)(output, _draw(targets, SAMPLES, classes))
        except Exception:  # its whole numbers may be lengths
            return Source(inputs, targets, None)
    return Source(inputs, targets, classes)


def _require_kind(name: str, probe: Tensor, expected: Tensor) -> None:
    """Reject a probe of other shapes or dtypes than the data set's."""
    kinds = [(leaf.shape[1:], leaf.dtype) for leaf in leaves_of(probe)]
    if kinds == [(leaf.shape[1:], leaf.dtype) for leaf in leaves_of(expected)]:
        return
    given = _describe_example(probe).replace("inputs", name)
    needed = _describe_example(expected).replace("inputs", name)
    raise UserError(
        f"probe: {given} are given, where the dataset has {needed} an example: give one batch of "
        "such as the dataset has."
    )


def _describe_example(part: Tensor) -> str:
    return describe(map_leaves(lambda leaf: leaf.new_empty(leaf.shape[1:]), part))


def _count_classes(output: Tensor, targets: Tensor) -> int:
    """Return how many classes a model may distinguish, at least 2.

    They are the last dimension of its output where targets have all others, [B, T] for
    [B, T, classes], and else dimension 1.
    """
    if output.dim() < 2:
        return 2
    shapes = {leaf.shape[1:] for leaf in leaves_of(targets)}
    classes_last = output.shape[1:-1] in shapes
    return max(2, output.shape[-1 if classes_last else 1])


def _draw(
    like: Tensor,
    examples: int,
    classes: int | None,
) -> Tensor:
    """Draw numbers in [0, 1). Without classes whole numbers are 0 and 1 by turns.

    One whole number an example is 1, which may be a length; and no mask is 0 throughout.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(leaf: Tensor) -> Tensor:
        if len(leaf):
            return leaf[torch.arange(examples) % len(leaf)]
        shape, dtype = (examples, *leaf.shape[1:]), leaf.dtype
        if dtype.is_complex:
            drawn = torch.randn(shape, dtype=dtype, generator=generator)
        elif dtype.is_floating_point:
            drawn = torch.rand(shape, dtype=dtype, generator=generator)
        elif classes is not None and dtype != torch.bool:
            drawn = torch.randint(0, classes, shape, generator=generator)
        elif len(shape) == 1:
            drawn = torch.ones(shape)
        else:
            place = torch.arange(leaf.shape[1:].numel()).view(1, *shape[1:])
            one_dims = [1] * (leaf.dim() - 1)
            number = torch.arange(examples).view(-1, *one_dims)
            drawn = (place + number) % 2
        return drawn.to(leaf.device, dtype)

    return map_leaves(draw, like)
