"""One forward and one backward pass that compute no parameter's gradient, only what each layer saw: its input, and the gradient
of its output. `fast.py` makes per-sample gradients of the two.

While a layer runs its parameters do not require gradients, so autograd records nothing of them; outside of it they do. A
parameter that is used anywhere but in its own layer's call therefore gets an ordinary gradient, and is found out: book-keeping
would have missed that use.

Gradients are caught at the node of the graph that made the layer's output, not at the tensor: an in-place activation behind a
layer changes the tensor, and never the node. They are handed on as backward meets them, so that a layer's input can be let go
as early as in an ordinary backward pass; a small network's all at once behind it, for which torch needs not call us.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from zdp_bench.gradients.clipping import Batch, Loss
from zdp_bench.gradients.rules import NoRule
from zdp_bench.kernels.memory_format import memory_order

# Output gradients of so many bytes may wait for the end of backward.
TOGETHER = 4 * 2**20


class Layer(NamedTuple):
    """A module that holds trainable parameters itself: its first name in the model, and theirs in it."""

    name: str
    module: nn.Module
    own: dict[str, nn.Parameter]


def layers_of(model: nn.Module) -> list[Layer]:
    """In the model's order, as `named_modules` goes. Asked in every step, so without its generators."""
    found: list[Layer] = []
    seen: set[nn.Module] = set()

    def visit(name: str, module: nn.Module) -> None:
        if module in seen:
            return
        seen.add(module)
        if own := {
            of: p for of, p in module._parameters.items() if p is not None and p.requires_grad
        }:
            found.append(Layer(name, module, own))
        for of, child in module._modules.items():
            if child is not None:
                visit(f"{name}.{of}" if name else of, child)

    visit("", model)
    return found


@dataclass(slots=True)
class Call:
    """One call of one layer, until its output gradient arrives."""

    layer: Layer
    input: Tensor
    version: int  # of the input's memory: in-place changes behind our back raise it
    made: GradientEdge | None  # where its output's gradient comes in
    order: list[int] | None  # see `_order`
    nbytes: int  # of its output


Consumer = Callable[[Call, Tensor], None]


@dataclass
class Tape:
    """The calls of one forward pass, and the loss they led to."""

    calls: list[Call] = field(default_factory=list)
    starts: list[Tensor] = field(
        default_factory=list
    )  # behind layers that nothing which needs a gradient goes into
    losses: Tensor | None = None
    consume: Consumer | None = None

    def play_back(self, parameters: list[nn.Parameter], consume: Consumer) -> None:
        """One backward pass from Σ losses; `consume(call, output gradient)` for every call on its way.

        Afterwards the tape is empty: it and the graph, whose hooks hold it, would keep each other alive for ever.

        Raises:
            NoRule: a parameter is used outside of its layer.
        """
        assert self.losses is not None
        losses, self.losses = self.losses, None
        calls, starts = self.calls, self.starts
        self.calls, self.starts = [], []
        if not losses.requires_grad:
            return  # the loss does not depend on any layer: every gradient is zero
        if sum(call.nbytes for call in calls) <= TOGETHER:
            wanted: list[Any] = [*parameters, *(call.made for call in calls)]
            found = torch.autograd.grad(losses.sum(), wanted, allow_unused=True)
            _require_unused(found[: len(parameters)])
            with torch.no_grad():  # as inside backward
                for call, g in zip(
                    reversed(calls), reversed(found[len(parameters) :]), strict=True
                ):
                    if g is not None:
                        _require_untouched(call)
                        consume(call, g)
            return
        self.consume = consume
        try:
            for call in calls:
                _catch(self, call)
            del calls, call  # an input goes when it was consumed
            found = torch.autograd.grad(losses.sum(), [*parameters, *starts], allow_unused=True)
        finally:
            self.consume = None
        _require_unused(found[: len(parameters)])


def record(model: nn.Module, layers: list[Layer], loss: Loss, batch: Batch) -> Tape:
    """Run model and loss on the batch, and keep what goes into each of `layers`.

    Raises:
        NoRule: a layer is called with anything but one tensor [B, ...] that leads to one tensor [B, ...].
    """
    inputs, targets = batch
    tape = Tape()
    theirs = [vars(layer.module).get("forward") for layer in layers]
    try:
        for layer in layers:  # in the place of hooks, which take twice the time of a small layer
            vars(layer.module)["forward"] = _recorded(
                tape, layer, layer.module.forward, len(inputs)
            )
        with torch.enable_grad():
            tape.losses = loss(model(inputs.detach()), targets)  # [B]
    finally:
        for layer, own in zip(layers, theirs, strict=True):
            vars(layer.module).pop("forward", None)
            if own is not None:
                vars(layer.module)["forward"] = own
    return tape


def _require_gradients(layer: Layer, required: bool) -> None:
    for parameter in layer.own.values():
        parameter.requires_grad_(required)


_not_a_view = torch.ops.aten._unsafe_view.default  # the very memory, but a node of its own


def _recorded(
    tape: Tape, layer: Layer, forward: Callable[..., Any], records: int
) -> Callable[..., Any]:
    def recorded(*args: Any, **kwargs: Any) -> Any:
        _require_gradients(layer, False)
        try:
            output = forward(*args, **kwargs)
        finally:
            _require_gradients(layer, True)
        if not torch.is_grad_enabled():
            return output  # it is cut off from the loss
        one_tensor = (
            len(args) == 1
            and not kwargs
            and isinstance(args[0], Tensor)
            and isinstance(output, Tensor)
        )
        if not one_tensor or args[0].dim() == 0 or output.dim() == 0:
            raise NoRule(f"layer '{layer.name}', which is not called on one tensor")
        if args[0].shape[0] != records or output.shape[0] != records:
            raise NoRule(f"layer '{layer.name}', whose input does not have one row a record")
        if not output.requires_grad:
            start = output.detach().requires_grad_()
            tape.starts.append(start)
            output = _not_a_view(
                start, output.shape
            )  # so that a layer behind may work in place, as on any output
            start.data = start.new_empty(
                0
            )  # a place for gradients to go to: what it held is the output's, and goes with that
        made = GradientEdge(output.grad_fn, output.output_nr)
        tape.calls.append(
            Call(layer, args[0].detach(), args[0]._version, made, _order(output), output.nbytes)
        )
        return output

    return recorded


def _order(output: Tensor) -> list[int] | None:
    """The dimensions of maps [B, C, *] as they follow each other in memory; None of no maps, and of such with gaps."""
    if output.dim() < 3:
        return None
    if output.dim() == 4 and output.is_contiguous(memory_format=torch.channels_last):
        return [0, 2, 3, 1]
    order = [0, *memory_order(output)]
    return order if output.permute(order).is_contiguous() else None


def _catch(tape: Tape, call: Call) -> None:
    """Have the call's output gradient consumed as backward meets it."""
    assert call.made is not None
    node, which, _ = call.made
    order, call.made = (
        call.order,
        None,
    )  # else the node, whose hook holds the call, would be held by it

    def prehook(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        g = gradients[which]
        if g is None:
            return None
        arrived = g
        if order is not None and not (ordered := g.permute(order)).is_contiguous():
            # Part of another map, or turned: brought into the output's order once, and not by rule and backward pass both.
            back = [order.index(dim) for dim in range(g.dim())]
            g = ordered.contiguous().permute(back)
        _require_untouched(call)
        assert tape.consume is not None
        tape.consume(call, g)
        return None if g is arrived else (*gradients[:which], g, *gradients[which + 1 :])

    node.register_prehook(prehook)


def _require_unused(gradients: Sequence[Tensor | None]) -> None:
    if any(gradient is not None for gradient in gradients):
        raise NoRule("a parameter that is used outside of its own layer's call")


def _require_untouched(call: Call) -> None:
    if call.input._version != call.version:
        raise NoRule(f"layer '{call.layer.name}', whose input is changed in place afterwards")
