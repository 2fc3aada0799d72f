"""Tools of all checks: run a model, compare tensors, name a layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from zdp_bench.gradients.clipping import trainable
from zdp_bench.gradients.cross_check import same_draws
from zdp_bench.gradients.parts import takes_parts

# An untouched sample comes out the same bit for bit, unless work is split otherwise (a sum over
# samples on a GPU, another batch size): then it may be rounded otherwise.
SAME, ROUNDED = 1e-6, 1e-4
SAMPLES, MORE = 3, 5  # of the batches that are checked
REPLACE_BATCHNORM = (
    "set model.replace_batchnorm=group, instance or frozen "
    '(in Python: zdp_bench.nn.replace_batchnorm(model, "group"))'
)


def forward(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return the output; an example's dropout masks are the same in every batch."""
    with same_draws(), takes_parts(model):
        return model(inputs)


def gradients_of(model: nn.Module, output: Tensor) -> dict[str, Tensor]:
    """Return the gradient of a weighted sum of all entries of an output, by parameter."""
    parameters = trainable(model)
    found = torch.autograd.grad(probe(output), list(parameters.values()), allow_unused=True)
    return {
        name: gradient
        for name, gradient in zip(parameters, found, strict=True)
        if gradient is not None
    }


def probe(output: Tensor) -> Tensor:
    """Return a real number that depends on every entry of the output."""
    real = torch.view_as_real(output) if output.is_complex() else output
    weights = torch.linspace(0.5, 1.5, real.numel(), device=real.device, dtype=real.dtype).view_as(
        real
    )
    return (weights * real).sum()


@dataclass
class Innermost:
    """While active, follows which module is running, to name it when an error comes."""

    model: nn.Module
    note: Callable[[str, bool, Any], None] = lambda *_: None  # (module's name, if it leaves, what)
    stack: list[str] = field(default_factory=list)
    handles: list = field(default_factory=list)
    name: str = "the model"

    def __enter__(self) -> Innermost:
        for name, module in self.model.named_modules():

            def enter(_: nn.Module, entering: Any, name: str = name) -> None:
                self.stack.append(name)
                self.note(name, False, entering)

            def leave(_: nn.Module, __: Any, left: Any, name: str = name) -> None:
                self.stack.pop()
                self.note(name, True, left)

            self.handles.append(module.register_forward_pre_hook(enter, prepend=True))
            self.handles.append(module.register_forward_hook(leave))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for handle in self.handles:
            handle.remove()
        if kind and self.stack:
            self.name = describe_layer(self.model, self.stack[-1])


def differs(a: Tensor, b: Tensor, tolerance: float = SAME) -> bool:
    """True if two tensors differ by more than `tolerance` of the largest entry, or in their NaN."""
    if a.shape != b.shape:
        return True
    if torch.equal(a, b) or a.numel() == 0:
        return False
    if not (a.dtype.is_complex or a.dtype.is_floating_point):
        return True
    scale = float(torch.nan_to_num(a.abs(), posinf=0.0).max())
    return not torch.allclose(a, b, rtol=0.0, atol=tolerance * scale, equal_nan=True)


def describe_layer(model: nn.Module, name: str) -> str:
    """Return "layer 'net.1' (BatchNorm2d)", or "the model (MLP)" for its own forward pass."""
    kind = type(model.get_submodule(name)).__name__
    return f"layer '{name}' ({kind})" if name else f"the model ({kind})"


def describe_owner(model: nn.Module, parameter: str) -> str:
    """Name the layer that a parameter belongs to, or a block that is not a parameter."""
    if parameter not in dict(model.named_parameters()):
        return f"block '{parameter}'"
    return describe_layer(model, parameter.rpartition(".")[0])


def advice_on(layer: nn.Module) -> str:
    """Return what to do about a layer that mixes samples, or keeps what it sees of them."""
    if isinstance(layer, _BatchNorm):
        return REPLACE_BATCHNORM
    if "Norm" in type(layer).__name__:
        return "use zdp_bench.nn.ComplexGroupNorm there, or torch.nn.GroupNorm for real numbers"
    return "compute an example's output from it alone, with no mean, top-k or order of the batch"
