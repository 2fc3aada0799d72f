"""One forward and backward pass that catches each layer's input and output gradient.

No parameter's gradient is computed; `fast.py` makes per-sample gradients of the two.

While a layer runs its parameters do not require gradients, so autograd records nothing of them;
outside of it they do. A parameter that is used outside of its layer's own call therefore gets an
ordinary gradient, and the model is refused: book-keeping would have missed that use.

Gradients are caught at the graph's node that made the layer's output, not at the tensor, which an
in-place activation behind the layer would change. They are handed on as backward meets them, so
that a layer's input is freed as early as in an ordinary backward pass; those of a small network all
at once at its end, which saves torch's calls into Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from zdp_bench.gradients.clipping import Batch, Loss
from zdp_bench.gradients.losses import per_example
from zdp_bench.gradients.rules import NoRule
from zdp_bench.gradients.rules.recurrent import replay
from zdp_bench.gradients.watched import PROGRAMS, Pass
from zdp_bench.nn.memory_format import arrange, memory_order

# Output gradients of at most so many bytes wait for the end of backward.
TOGETHER = 4 * 2**20


class Layer(NamedTuple):
    """A module with trainable parameters of its own, under its first name in the model."""

    name: str
    module: nn.Module
    own: dict[str, nn.Parameter]


def layers_of(model: nn.Module) -> list[Layer]:
    """Return the layers in the order of `named_modules`; fast, as every step asks."""
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
    version: int  # of the input's memory; a change in place raises it
    edge: GradientEdge | None  # where the output's gradient arrives
    order: list[int] | None  # see `_memory_order`
    nbytes: int  # of its output


Consumer = Callable[[Call, Tensor], None]


@dataclass
class Tape:
    """The calls of one forward pass, and the loss they led to."""

    calls: list[Call] = field(default_factory=list)
    starts: list[Tensor] = field(default_factory=list)  # behind layers whose input needs none
    losses: Tensor | None = None
    consume: Consumer | None = None

    def play_back(self, parameters: list[nn.Parameter], consume: Consumer) -> None:
        """Run backward from Σ losses; `consume(call, output gradient)` is called for every call.

        Afterwards the tape is empty: the graph, whose hooks hold it, would keep it alive for ever.
        """
        assert self.losses is not None
        losses, self.losses = self.losses, None
        calls, starts = self.calls, self.starts
        self.calls, self.starts = [], []
        if not losses.requires_grad:
            return  # the loss does not depend on any layer: every gradient is zero
        if sum(call.nbytes for call in calls) <= TOGETHER:
            wanted: list[Any] = [*parameters, *(call.edge for call in calls)]
            found = torch.autograd.grad(losses.sum(), wanted, allow_unused=True)
            _require_unused(found[: len(parameters)])
            arrived = found[len(parameters) :]
            with torch.no_grad():  # as inside backward
                for call, g in zip(reversed(calls), reversed(arrived), strict=True):
                    if g is not None:
                        _require_untouched(call)
                        consume(call, g)
            return
        self.consume = consume
        try:
            for call in calls:
                _catch(self, call)
            del calls, call  # so that an input is freed once it is consumed
            found = torch.autograd.grad(losses.sum(), [*parameters, *starts], allow_unused=True)
        finally:
            self.consume = None
        _require_unused(found[: len(parameters)])


def run_forward(model: nn.Module, layers: list[Layer], loss: Loss, batch: Batch) -> Tape:
    """Run model and loss on the batch; return the calls of `layers` on a tape."""
    inputs, targets = batch
    tape = Tape()
    replaced = [vars(layer.module).get("forward") for layer in layers]
    try:
        for layer in layers:  # not by hooks, which take twice the time of a small layer
            wrap = _wrap_recurrent if type(layer.module) in RECURRENT else _wrap
            wrapped = wrap(tape, layer, layer.module.forward, len(inputs))
            vars(layer.module)["forward"] = wrapped
        with torch.enable_grad():
            arranged, program = arrange(model, inputs.detach()), PROGRAMS.get(model)
            if program is None:
                outputs = model(arranged)
            else:
                outputs = Pass(model, arranged, program.parts, program).run()
            tape.losses = per_example(loss)(outputs, targets)  # [B]
    finally:
        for layer, own in zip(layers, replaced, strict=True):
            vars(layer.module).pop("forward", None)
            if own is not None:
                vars(layer.module)["forward"] = own
    return tape


def _require_gradients(layer: Layer, required: bool) -> None:
    with torch._C.DisableTorchFunction():  # this is no call of the model's
        for parameter in layer.own.values():
            parameter.requires_grad_(required)


_not_a_view = torch.ops.aten._unsafe_view.default  # the same memory, but a new node


def _wrap(
    tape: Tape, layer: Layer, forward: Callable[..., Any], examples: int
) -> Callable[..., Any]:
    """Return the layer's forward function, which also enters its call on the tape."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        _require_gradients(layer, False)
        try:
            output = forward(*args, **kwargs)
        finally:
            _require_gradients(layer, True)
        with torch._C.DisableTorchFunction():
            return entered(output, args, kwargs)

    def entered(output: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not torch.is_grad_enabled():
            return output  # it is cut off from the loss
        both = (*args, output)
        if kwargs or len(both) != 2 or any(not isinstance(t, Tensor) or not t.dim() for t in both):
            raise NoRule(f"layer '{layer.name}', which is not called on one tensor")
        if args[0].shape[0] != examples or output.shape[0] != examples:
            raise NoRule(f"layer '{layer.name}', whose input does not have one row per example")
        return _enter(tape, layer, args[0], output)

    return wrapped


def _enter(tape: Tape, layer: Layer, x: Tensor, output: Tensor) -> Tensor:
    """Record a call on the tape, and return its output."""
    if not output.requires_grad:
        start = output.detach().requires_grad_()
        tape.starts.append(start)
        # The next layer may work in place on the output; `start` only receives a gradient, so it
        # lets go of the memory.
        output = _not_a_view(start, output.shape)
        start.data = start.new_empty(0)
    assert output.grad_fn is not None
    edge, order = GradientEdge(output.grad_fn, output.output_nr), _memory_order(output)
    tape.calls.append(Call(layer, x.detach(), x._version, edge, order, output.nbytes))
    return output


RECURRENT = (nn.RNN, nn.LSTM, nn.GRU)


def _wrap_recurrent(
    tape: Tape, layer: Layer, forward: Callable[..., Any], examples: int
) -> Callable[..., Any]:
    """Return a recurrent layer's forward function, which enters each direction on the tape."""

    def enter(direction: nn.Module, own: dict[str, nn.Parameter], gates: Tensor) -> Any:
        gates = _enter(tape, Layer(layer.name, direction, own), gates, gates)
        call = tape.calls[-1]

        def enter_inputs(x: Tensor) -> None:
            call.input, call.version = x, x._version

        return gates, enter_inputs

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)  # it is cut off from the loss
        assert isinstance(layer.module, nn.RNNBase)
        return replay(layer.module, examples, enter, *args, **kwargs)

    return wrapped


def _memory_order(output: Tensor) -> list[int] | None:
    """Return the dimensions of maps [B, C, *] in memory's order; None for other outputs or gaps."""
    if output.dim() < 3:
        return None
    if output.dim() == 4 and output.is_contiguous(memory_format=torch.channels_last):
        return [0, 2, 3, 1]
    order = [0, *memory_order(output)]
    return order if output.permute(order).is_contiguous() else None


def _catch(tape: Tape, call: Call) -> None:
    """Consume the call's output gradient when backward meets it."""
    assert call.edge is not None
    node, which, _ = call.edge
    order = call.order
    call.edge = None  # the node's hook holds the call, which may not hold the node

    def prehook(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        g = gradients[which]
        if g is None:
            return None
        arrived = g
        if order is not None and not (ordered := g.permute(order)).is_contiguous():
            # Part of another map, or transposed: copied once, for the rule and backward alike.
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
