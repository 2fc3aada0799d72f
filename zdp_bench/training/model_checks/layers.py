"""Describe layers, for the errors of a check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from zdp_bench.errors import is_for_python


@dataclass
class Innermost:
    """Follows which module is running while the context is active, to name it in an error.

    Attributes:
        model: the model whose modules are followed.
        note: called with the name of each module before its forward pass.
        stack: names of the modules that are running, the innermost last.
        handles: handles of the registered hooks.
        name: description of the module in which an error was raised.
    """

    model: nn.Module
    note: Callable[[str], None] = lambda _: None
    stack: list[str] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)
    name: str = "the model"

    def __enter__(self) -> Innermost:
        for name, module in self.model.named_modules():

            def enter(
                _: nn.Module,
                __: Any,
                name: str = name,
            ) -> None:
                self.stack.append(name)
                self.note(name)

            def leave(
                _: nn.Module,
                __: Any,
                ___: Any,
            ) -> None:
                self.stack.pop()

            self.handles.append(module.register_forward_pre_hook(enter, prepend=True))
            self.handles.append(module.register_forward_hook(leave))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        *_: object,
    ) -> None:
        for handle in self.handles:
            handle.remove()
        if kind and self.stack:
            self.name = describe_layer(self.model, self.stack[-1])


def describe_layer(model: nn.Module, name: str) -> str:
    """Return "layer 'net.1' (BatchNorm2d)", or "the model (MLP)" for the model itself."""
    kind = type(model.get_submodule(name)).__name__
    return f"layer '{name}' ({kind})" if name else f"the model ({kind})"


def describe_owner(model: nn.Module, parameter: str) -> str:
    """Describe the layer that a parameter belongs to."""
    return describe_layer(model, parameter.rpartition(".")[0])


def advice_on(layer: nn.Module) -> str:
    """Return advice on a layer that mixes samples, or stores something computed from them."""
    if isinstance(layer, _BatchNorm):
        if layer.affine and not any(p.requires_grad for p in layer.parameters(recurse=False)):
            return "its weights are frozen, so call eval() on the frozen part after model.train()"
        if is_for_python():
            return 'call zdp_bench.nn.replace_batchnorm(model, "group")'
        return "set model.replace_batchnorm=group, instance or frozen"
    if isinstance(layer, nn.GroupNorm | nn.LayerNorm):
        return "call it on a tensor whose first dimension is that of the examples"
    return "use zdp_bench.nn.ComplexGroupNorm there, or torch.nn.GroupNorm for real numbers"
