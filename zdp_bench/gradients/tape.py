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

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from zdp_bench.gradients.clipping import Batch, Loss
from zdp_bench.gradients.losses import per_example
from zdp_bench.gradients.parts import Parts, leaves_of
from zdp_bench.gradients.program import Program
from zdp_bench.gradients.program.calls import Place
from zdp_bench.gradients.program.sequences import make_layer, pack, unpack
from zdp_bench.gradients.program.uses import bind
from zdp_bench.gradients.rules import NoRule, Rule
from zdp_bench.gradients.rules.recurrent import replay
from zdp_bench.nn.memory_format import arrange, memory_order

# Output gradients of at most so many bytes wait for the end of backward.
TOGETHER = 4 * 2**20


class Layer(NamedTuple):
    """A module with trainable parameters of its own, under its first name in the model."""

    name: str
    module: nn.Module
    parameters: dict[str, nn.Parameter]


def layers_of(model: nn.Module) -> list[Layer]:
    """Return the layers in the order of `named_modules`; fast, as every step asks."""
    layers: list[Layer] = []
    seen: set[nn.Module] = set()

    def visit(name: str, module: nn.Module) -> None:
        if module in seen:
            return
        seen.add(module)
        trained = {}
        for own_name, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad:
                trained[own_name] = parameter
        if trained:
            layers.append(Layer(name, module, trained))
        for own_name, child in module._modules.items():
            if child is not None:
                visit(f"{name}.{own_name}" if name else own_name, child)

    visit("", model)
    return layers


@dataclass(slots=True)
class Call:
    """One call of one layer, until its output gradient arrives."""

    layer: Layer
    input: Any  # a tensor, or `Parts` of the examples' arguments of an operation
    version: list[int]  # of the input's memory; a change in place raises it
    edge: GradientEdge | None  # where the output's gradient arrives
    order: list[int] | None  # see `_memory_order`
    nbytes: int  # of its output
    rule: Rule | None = None  # of an operation of a program; None: the layer's own
    places: tuple[list[Place], Place] | None = None  # of its examples, in input and output


Consumer = Callable[[Call, Tensor], None]


@dataclass
class Tape:
    """The calls of one forward pass, and the loss they led to."""

    calls: list[Call] = field(default_factory=list)
    starts: list[Tensor] = field(default_factory=list)  # behind layers whose input needs none
    losses: Tensor | None = None
    consume: Consumer | None = None
    examples: int = 0
    program: Program | None = None  # whose operations enter themselves
    modules: dict[int, nn.Module] = field(default_factory=dict)  # by the identity of their weight

    def play_back(
        self,
        parameters: list[nn.Parameter],
        consume: Consumer,
    ) -> None:
        """Run backward from Σ losses; `consume(call, output gradient)` is called for every call.

        Afterwards the tape is empty: the graph, whose hooks hold it, would keep it alive for ever.

        Raises:
            NoRule: a parameter is used outside of its layer's calls, or an input was changed.
        """
        assert self.losses is not None
        losses, self.losses = self.losses, None
        if not losses.requires_grad:
            self.calls, self.starts = [], []
            return  # the loss does not depend on any layer: every gradient is zero
        loss = losses.sum()
        if sum(call.nbytes for call in self.calls) <= TOGETHER:
            self._play_at_once(loss, parameters, consume)
        else:
            self._play_as_gradients_arrive(loss, parameters, consume)

    def _play_at_once(
        self,
        loss: Tensor,
        parameters: list[nn.Parameter],
        consume: Consumer,
    ) -> None:
        """Consume all output gradients after backward, which saves torch's calls into Python."""
        calls = self.calls
        self.calls, self.starts = [], []
        wanted: list[Any] = [*parameters, *(call.edge for call in calls)]
        gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
        _require_unused(gradients[: len(parameters)])
        output_gradients = gradients[len(parameters) :]
        with torch.no_grad():  # as inside backward
            for call, g in zip(reversed(calls), reversed(output_gradients), strict=True):
                if g is not None:
                    _require_untouched(call)
                    consume(call, g)

    def _play_as_gradients_arrive(
        self,
        loss: Tensor,
        parameters: list[nn.Parameter],
        consume: Consumer,
    ) -> None:
        """Consume each output gradient inside backward, so that its layer's input is freed."""
        self.consume = consume
        wanted = [*parameters, *self.starts]
        self.starts = []
        try:
            while self.calls:  # an input that is consumed may be held by its hook alone
                _catch(self, self.calls.pop(0))
            gradients = torch.autograd.grad(loss, wanted, allow_unused=True)
        finally:
            self.consume = None
        _require_unused(gradients[: len(parameters)])

    # ------------------------------------------------------------ what a program enters

    def enter_use(
        self,
        number: int,
        output: Tensor,
        weights: Any,
        others: Any,
    ) -> Tensor:
        """Enter an operation that uses parameters; return its output."""
        assert self.program is not None
        use = self.program.uses[number]
        if not torch.is_grad_enabled() or not any(weight.requires_grad for weight in weights):
            return output
        parameters, rule = bind(use, weights, others)
        examples, places = use.examples_in(others)
        module = self.modules.get(id(weights[0]))
        x: Any = Parts(tuple(examples)) if module is None else examples[0]
        layer = Layer(use.name, module or nn.Module(), parameters)
        output = _enter(self, layer, x, output)
        call = self.calls[-1]
        call.rule = rule
        call.places = places, use.place
        return output

    def call_leaf(self, module: nn.Module, x: Tensor) -> Tensor:
        """Call a module of ours, whose layers enter themselves."""
        with entering(self, layers_of(module)):
            output: Tensor = module(x)
        return output

    def call_recurrent(
        self,
        kind: str,
        name: str,
        inner: int,
        x: Tensor,
        *arguments: Any,
    ) -> Any:
        """Replay a recurrent operation, whose gates enter themselves.

        Args:
            kind: the operation, such as "lstm" or "packed_lstm".
            name: of the module that calls it.
            inner: of the `Place` of the examples among the sequences.
            x: the sequences.
            arguments: of a packed operation, the lengths; the first states, weights and options.
        """
        is_packed = kind.startswith("packed_")
        kind = kind.removeprefix("packed_")
        sequences: Any = x
        if is_packed:
            lengths, *arguments = arguments  # type: ignore[assignment]
            arguments = (*arguments, True)  # they have the examples first
            sequences = pack(x, lengths)
        states, weights, *options = arguments
        if not all(isinstance(weight, nn.Parameter) for weight in weights):
            raise NoRule(f"layer '{name}', whose weights are computed")
        layer = make_layer(kind, x.shape[2], weights, *options)
        count = x.shape[0 if layer.batch_first else 1]
        calls_before = len(self.calls)
        replayed = _wrap_recurrent(self, Layer(name, layer, {}), layer.forward, count)
        output, last = replayed(sequences, tuple(states) if kind == "lstm" else states)
        if is_packed:
            output = unpack(output, x.shape[1])
        if count != self.examples:
            place = Place(0, inner)
            for call in self.calls[calls_before:]:
                call.places = [place], place
        return (output, *last) if kind == "lstm" else (output, last)


@contextmanager
def entering(
    tape: Tape,
    layers: list[Layer],
) -> Iterator[None]:
    """Have the calls of layers entered on a tape within."""
    replaced = [vars(layer.module).get("forward") for layer in layers]
    try:
        for layer in layers:  # not by hooks, which take twice the time of a small layer
            wrap = _wrap_recurrent if type(layer.module) in RECURRENT else _wrap
            wrapped = wrap(tape, layer, layer.module.forward, tape.examples)
            vars(layer.module)["forward"] = wrapped
        yield
    finally:
        for layer, forward in zip(layers, replaced, strict=True):
            vars(layer.module).pop("forward", None)
            if forward is not None:
                vars(layer.module)["forward"] = forward


def run_forward(
    model: nn.Module,
    layers: list[Layer],
    loss: Loss,
    batch: Batch,
    program: Program | None = None,
    with_rules: Collection[nn.Module] = (),
) -> Tape:
    """Run model and loss on the batch; return the calls of `layers` on a tape.

    Args:
        program: what is run in place of the model's own forward function.
        with_rules: layers whose calls are wanted as such, also of a program.

    Raises:
        NoRule: the way a layer is called, or the program, is beyond book-keeping.
    """
    inputs, targets = batch
    tape = Tape(examples=len(inputs), program=program)
    for module in with_rules:
        tape.modules[id(module.weight)] = module
    with torch.enable_grad():
        arranged = arrange(model, inputs.detach())
        if program is None:
            with entering(tape, layers):
                outputs = model(arranged)
        else:
            outputs = program.run_on(tape, model, arranged)
            if len(outputs) != len(inputs):
                raise NoRule("a program whose output does not have one row per example")
        tape.losses = per_example(loss)(outputs, targets)  # [B]
    return tape


def _require_gradients(layer: Layer, required: bool) -> None:
    with torch._C.DisableTorchFunction():  # this is no call of the model's
        for parameter in layer.parameters.values():
            parameter.requires_grad_(required)


def _wrap(
    tape: Tape,
    layer: Layer,
    forward: Callable[..., Any],
    examples: int,
) -> Callable[..., Any]:
    """Return the layer's forward function, which also enters its call on the tape."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        _require_gradients(layer, False)
        try:
            output = forward(*args, **kwargs)
        finally:
            _require_gradients(layer, True)
        with torch._C.DisableTorchFunction():
            if not torch.is_grad_enabled():
                return output  # it is cut off from the loss
            tensors = (*args, output)
            if kwargs or len(tensors) != 2 or not all(map(_has_rows, tensors)):
                raise NoRule(f"layer '{layer.name}', which is not called on one tensor")
            if len(args[0]) != examples or len(output) != examples:
                raise NoRule(f"layer '{layer.name}', whose input does not have one row per example")
            return _enter(tape, layer, args[0], output)

    return wrapped


def _has_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


_not_a_view = torch.ops.aten._unsafe_view.default  # the same memory, but a new node


def _enter(
    tape: Tape,
    layer: Layer,
    x: Tensor,
    output: Tensor,
) -> Tensor:
    """Record a call on the tape, and return its output."""
    if not output.requires_grad:
        start = output.detach().requires_grad_()
        tape.starts.append(start)
        # The next layer may work in place on the output; `start` only receives a gradient, so it
        # lets go of the memory.
        output = _not_a_view(start, output.shape)
        start.data = start.new_empty(0)
    elif output._is_view():  # written over, a view would lose the node that is waited for
        output = _not_a_view(output, output.shape)
    assert output.grad_fn is not None
    edge = GradientEdge(output.grad_fn, output.output_nr)
    order = _memory_order(output)
    tape.calls.append(Call(layer, x.detach(), _versions(x), edge, order, output.nbytes))
    return output


def _versions(x: Tensor) -> list[int]:
    return [leaf._version for leaf in leaves_of(x)]


RECURRENT = (nn.RNN, nn.LSTM, nn.GRU)


def _wrap_recurrent(
    tape: Tape,
    layer: Layer,
    forward: Callable[..., Any],
    examples: int,
) -> Callable[..., Any]:
    """Return a recurrent layer's forward function, which enters each direction on the tape."""

    def enter(
        direction: nn.Module,
        parameters: dict[str, nn.Parameter],
        gates: Tensor,
    ) -> tuple[Tensor, Callable[[Tensor], None]]:
        gates = _enter(tape, Layer(layer.name, direction, parameters), gates, gates)
        call = tape.calls[-1]

        def enter_inputs(x: Tensor) -> None:
            call.input = x
            call.version = _versions(x)

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
    node, number, _ = call.edge
    call.edge = None  # the node's hook holds the call, which may not hold the node

    def consume(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        arrived = gradients[number]
        if arrived is None:
            return None
        g = _arrange_as(arrived, call.order)
        _require_untouched(call)
        assert tape.consume is not None
        tape.consume(call, g)
        if g is arrived:
            return None
        return (*gradients[:number], g, *gradients[number + 1 :])

    node.register_prehook(consume)


def _arrange_as(g: Tensor, order: list[int] | None) -> Tensor:
    """Return an output gradient in the output's order of memory.

    Part of another map, or transposed, it is copied once, for the rule and backward alike.
    """
    if order is None:
        return g
    ordered = g.permute(order)
    if ordered.is_contiguous():
        return g
    back = [order.index(dim) for dim in range(g.dim())]
    return ordered.contiguous().permute(back)


def _require_unused(gradients: Sequence[Tensor | None]) -> None:
    if any(gradient is not None for gradient in gradients):
        raise NoRule("a parameter that is used outside of its own layer's call")


def _require_untouched(call: Call) -> None:
    if _versions(call.input) != call.version:
        raise NoRule(f"layer '{call.layer.name}', whose input is changed in place afterwards")
