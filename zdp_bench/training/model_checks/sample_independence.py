"""Check that no layer mixes samples, and name the layer that does.

One sample is changed, and the others must come out as before. To find the layer, tensors are
followed through the model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zdp_bench.errors import UserError
from zdp_bench.training.model_checks.probes import (
    ROUNDED,
    SAME,
    change_sample,
    describe_layer,
    describe_owner,
    differs,
    forward,
    sample_gradients,
)

REPLACE_BATCHNORM = (
    "set model.replace_batchnorm=group, instance or frozen "
    '(in Python: zdp_bench.nn.replace_batchnorm(model, "group"))'
)


def check_samples_stay_apart(model: nn.Module, inputs: Tensor) -> None:
    """Change one sample, by little and by much, and leave one out; compare the others."""
    last = len(inputs) - 1
    for changed, scale in ((0, 1.0), (last, 1000.0)):
        other = inputs.clone()
        other[changed] = change_sample(inputs, changed, scale)
        watched = last if changed == 0 else 0
        with torch.no_grad():
            if differs(forward(model, inputs)[watched], forward(model, other)[watched]):
                raise mixing_error(find_mixing_layer(model, inputs, other, [watched]))
        before, after = (sample_gradients(model, x, watched) for x in (inputs, other))
        for name, value in before.items():
            if differs(value, after[name], ROUNDED):
                raise mixing_error(describe_owner(model, name), "in its gradient")
    with torch.no_grad():
        if differs(forward(model, inputs)[0], forward(model, inputs[:last])[0], ROUNDED):
            raise mixing_error(find_mixing_layer(model, inputs, inputs[:last], [0]))


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
