"""Examples for the checks of a model: a probe, or random numbers of the right shapes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zdp_bench.errors import UserError
from zdp_bench.gradients import Batch, Loss, PerExample, per_example
from zdp_bench.gradients.parts import (
    arrange_as,
    describe,
    leaves_by_path,
    map_leaves,
    takes_parts,
)
from zdp_bench.gradients.program import copy_apart

SAMPLES = 3  # number of samples in the batches of the checks


@dataclass(frozen=True)
class Source:
    """The source of a check's examples.

    Attributes:
        inputs: public examples [n, ...]. If n = 0, random numbers of this shape are drawn instead.
        targets: their targets [n, ...].
        takes_zero: whether the loss takes targets that are a single 0. Otherwise, as for lengths,
            single integers are 1.
    """

    inputs: Tensor
    targets: Tensor
    takes_zero: bool

    def draw(self, examples: int) -> Batch:
        """Return a number of examples, the same at every call."""
        inputs = _draw(self.inputs, examples, with_zero=False)
        return inputs, _draw(self.targets, examples, self.takes_zero)


def find_source(
    model: nn.Module,
    loss: Loss,
    example_batch: Batch,
    probe: Batch | None,
) -> Source:
    """Return the source of a check's examples: the probe or, without one, random numbers.

    Args:
        model: the model, which is not changed.
        loss: the loss.
        example_batch: inputs [n, ...] and targets [n, ...] with the data set's shapes and dtypes.
        probe: public examples, or None.

    Raises:
        UserError: the probe has other shapes or dtypes than the data set.
    """
    device = next(model.parameters()).device
    if probe is not None:
        _require_kind("inputs", probe[0], example_batch[0])
        _require_kind("targets", probe[1], example_batch[1])
        arranged = map(arrange_as, probe, example_batch)
        inputs, targets = [map_leaves(lambda leaf: leaf.to(device), part) for part in arranged]
    else:
        inputs, targets = [
            map_leaves(lambda leaf: leaf[:0].to(device), part) for part in example_batch
        ]
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        try:
            twin = copy_apart(model)
            with takes_parts(twin):
                output = twin(_draw(inputs, SAMPLES, with_zero=False)).detach()
            # An invalid target raises an error on the CPU. On a GPU, all later calls would fail.
            trial_targets = _draw(targets, SAMPLES, with_zero=True).cpu()
            losses = PerExample(per_example(loss).loss)(output.cpu(), trial_targets)
            takes_zero = bool(losses.isfinite().all())
        except Exception:  # the check will name the layer that fails, or what the loss cannot take
            takes_zero = False
    return Source(inputs, targets, takes_zero)


def _require_kind(name: str, probe: Tensor, expected: Tensor) -> None:
    """Reject a probe whose shapes or dtypes are not those of the data set."""
    parts, expected_parts = leaves_by_path(probe), leaves_by_path(expected)
    if parts.keys() != expected_parts.keys():
        raise UserError(
            f"probe: its {name} have the parts {_list(parts)}, but those of the dataset have "
            f"{_list(expected_parts)}: give a batch with the keys of the dataset."
        )
    if all(_are_alike(parts[path], leaf) for path, leaf in expected_parts.items()):
        return
    probe_kind = _describe_example(probe).replace("inputs", name)
    dataset_kind = _describe_example(expected).replace("inputs", name)
    raise UserError(
        f"probe: each example has {probe_kind}, but the dataset has {dataset_kind}: give a batch "
        "with the shapes and dtypes of the dataset."
    )


def _list(paths: Iterable[str]) -> str:
    return ", ".join(path or "of a single tensor" for path in paths)


def _are_alike(leaf: Tensor, other: Tensor) -> bool:
    """Return True if the examples of two tensors have the same shape and dtype."""
    return leaf.shape[1:] == other.shape[1:] and leaf.dtype == other.dtype


def _describe_example(part: Tensor) -> str:
    """Describe dtype and shape of one example in a batch."""
    return describe(map_leaves(lambda leaf: leaf.new_empty(leaf.shape[1:]), part))


def _draw(
    part: Tensor,
    examples: int,
    with_zero: bool,
) -> Tensor:
    """Return a number of examples from `part`, repeated as needed, or made-up ones if it is empty.

    Real numbers are uniform in [0, 1), complex ones normal. Integers are 0 and 1 in turn, so that
    no mask is 0 everywhere. Larger ones could lie beyond the classes or words that model and loss
    know, and not all of torch's functions check that: `F.ctc_loss` then overwrites memory.

    Args:
        part: inputs or targets [n, ...]; if n = 0, only its shapes and dtypes are used.
        examples: number of examples.
        with_zero: whether integers of which each example has one, [n], are 1 and 0 in turn.
            Otherwise they are 1, which is a valid length.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(leaf: Tensor) -> Tensor:
        if len(leaf):
            return leaf[torch.arange(examples) % len(leaf)]
        shape, dtype = (examples, *leaf.shape[1:]), leaf.dtype
        example = torch.arange(examples)
        if dtype.is_complex:
            values = torch.randn(shape, dtype=dtype, generator=generator)
        elif dtype.is_floating_point:
            values = torch.rand(shape, dtype=dtype, generator=generator)
        elif len(shape) == 1:
            values = (example + 1) % 2 if with_zero else torch.ones(shape)
        else:
            entry = torch.arange(leaf.shape[1:].numel()).view(1, *shape[1:])
            singleton_dims = [1] * (leaf.dim() - 1)
            values = (entry + example.view(-1, *singleton_dims)) % 2
        return values.to(leaf.device, dtype)

    return map_leaves(draw, part)
