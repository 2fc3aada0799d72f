"""One forward and one backward pass that record each layer's input and output gradient.

No gradient of a parameter is computed; `fast.py` computes per-sample gradients from the two.

A layer's parameters do not require gradients while the layer runs, so autograd does not record
them, but they do at other times. A parameter that is used outside its layer's own call therefore
gets an ordinary gradient. The model is then rejected, because book-keeping would miss that use.

Output gradients are captured at the node of autograd's graph that computed the output, not at the
tensor, because an in-place activation after the layer would replace the tensor's node. They are
consumed when the backward pass computes them, so that a layer's input is freed as early as in an
ordinary backward pass. For a small network, they are consumed all at once after the backward pass,
which saves torch's calls into Python.
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
from zdp_bench.nn.memory_format import arrange, arrange_as, memory_order

# Total size of the output gradients up to which they are consumed after the backward pass.
MAX_DEFERRED_BYTES = 4 * 2**20


class Layer(NamedTuple):
    """A module with trainable parameters of its own, under its first name in the model."""

    name: str
    module: nn.Module
    parameters: dict[str, nn.Parameter]


def layers_of(model: nn.Module) -> list[Layer]:
    """Return the layers in the order of `named_modules`, but faster, as each step calls this."""
    layers: list[Layer] = []
    seen: set[nn.Module] = set()

    def visit(name: str, module: nn.Module) -> None:
        if module in seen:
            return
        seen.add(module)
        trained = {}
        for parameter_name, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad:
                trained[parameter_name] = parameter
        if trained:
            layers.append(Layer(name, module, trained))
        for child_name, child in module._modules.items():
            if child is not None:
                visit(f"{name}.{child_name}" if name else child_name, child)

    visit("", model)
    return layers


@dataclass(slots=True)
class Call:
    """One call of one layer.

    Attributes:
        layer: the layer.
        input: its input: a tensor or, for an operation of a program, `Parts` of the arguments that
            contain examples.
        version: version counters of the input's memory, which a change in place increments.
        edge: where the gradient of the output arrives in autograd's graph.
        order: order of the output's dimensions in memory; see `_memory_order`.
        nbytes: size of the output.
        rule: rule of an operation of a program; None for the layer's own.
        places: where the examples are in the input and in the output; None if they are in
            dimension 0.
    """

    layer: Layer
    input: Any
    version: list[int]
    edge: GradientEdge | None
    order: list[int] | None
    nbytes: int
    rule: Rule | None = None
    places: tuple[list[Place], Place] | None = None


Consumer = Callable[[Call, Tensor], None]


@dataclass
class Tape:
    """The calls of one forward pass, and its losses.

    Attributes:
        calls: calls that have not been consumed.
        starts: leaves of autograd's graph, which replace outputs that would not require gradients.
        losses: losses, [B].
        consume: the function that consumes calls, during a backward pass.
        examples: number of examples B.
        program: the program that runs, whose operations are recorded by `enter_use`.
        modules: layers whose calls are recorded as such in a program, by the `id` of their weight.
    """

    calls: list[Call] = field(default_factory=list)
    starts: list[Tensor] = field(default_factory=list)
    losses: Tensor | None = None
    consume: Consumer | None = None
    examples: int = 0
    program: Program | None = None
    modules: dict[int, nn.Module] = field(default_factory=dict)

    def play_back(
        self,
        parameters: list[nn.Parameter],
        consume: Consumer,
    ) -> None:
        """Run the backward pass from Σ losses, and consume the calls.

        Afterwards the tape is empty. Otherwise the graph and the tape would keep each other alive,
        because the graph's hooks refer to the tape.

        Args:
            parameters: all trainable parameters.
            consume: function that is called as `consume(call, output_gradient)` for each call that
                the loss depends on, from the last to the first.

        Raises:
            NoRule: a parameter is used outside its layer's calls, or an input was changed in place.
        """
        assert self.losses is not None
        losses, self.losses = self.losses, None
        if not losses.requires_grad:
            self.calls, self.starts = [], []
            return  # the loss does not depend on any layer: every gradient is zero
        loss = losses.sum()
        if sum(call.nbytes for call in self.calls) <= MAX_DEFERRED_BYTES:
            self._consume_after_backward(loss, parameters, consume)
        else:
            self._consume_in_backward(loss, parameters, consume)

    def _consume_after_backward(
        self,
        loss: Tensor,
        parameters: list[nn.Parameter],
        consume: Consumer,
    ) -> None:
        """Consume all output gradients after the backward pass."""
        calls = self.calls
        self.calls, self.starts = [], []
        sources: list[Any] = [*parameters, *(call.edge for call in calls)]
        gradients = torch.autograd.grad(loss, sources, allow_unused=True)
        _require_unused(gradients[: len(parameters)])
        output_gradients = gradients[len(parameters) :]
        with torch.no_grad():  # as in a backward pass
            for call, g in zip(reversed(calls), reversed(output_gradients), strict=True):
                if g is not None:
                    _require_untouched(call)
                    consume(call, g)

    def _consume_in_backward(
        self,
        loss: Tensor,
        parameters: list[nn.Parameter],
        consume: Consumer,
    ) -> None:
        """Consume each output gradient during the backward pass, which frees the layer's input."""
        self.consume = consume
        sources = [*parameters, *self.starts]
        self.starts = []
        try:
            while self.calls:  # from here on, only the hook refers to the call and its input
                _register_consumer(self, self.calls.pop(0))
            gradients = torch.autograd.grad(loss, sources, allow_unused=True)
        finally:
            self.consume = None
        _require_unused(gradients[: len(parameters)])

    # ------------------------------------------------------------ called by a program

    def enter_use(
        self,
        index: int,
        output: Tensor,
        weights: Any,
        others: Any,
    ) -> Tensor:
        """Record an operation that uses parameters, and return its output.

        Args:
            index: index of the operation in `Program.uses`.
            output: its result.
            weights: its arguments that follow from parameters.
            others: its other tensors.
        """
        assert self.program is not None
        use = self.program.uses[index]
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
        """Call a module of this package, and record the calls of its layers."""
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
        """Replay a recurrent operation, and record its gates.

        Args:
            kind: the operation, such as "lstm" or "packed_lstm".
            name: name of the module that calls it.
            inner: `Place.inner` of the examples in the batch of sequences.
            x: the sequences.
            arguments: the lengths, for a packed operation; then the first states, the weights and
                the operation's options.
        """
        is_packed = kind.startswith("packed_")
        kind = kind.removeprefix("packed_")
        sequences: Any = x
        if is_packed:
            lengths, *arguments = arguments  # type: ignore[assignment]
            arguments = (*arguments, True)  # batch_first
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
    """Record the calls of layers on a tape inside the context."""
    replaced = [vars(layer.module).get("forward") for layer in layers]
    try:
        # `forward` is replaced because hooks would take twice the time of a small layer.
        for layer in layers:
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
    modules: Collection[nn.Module] = (),
) -> Tape:
    """Run model and loss on a batch, and return a tape with the calls of `layers`.

    Args:
        model: the model.
        layers: the model's layers, as `layers_of` returns them.
        loss: (outputs, targets) -> losses [B].
        batch: inputs and targets.
        program: the program that runs instead of the model's own forward function.
        modules: layers whose calls are recorded as such, even in a program.

    Raises:
        NoRule: book-keeping does not support the program, or the way a layer is called.
    """
    inputs, targets = batch
    tape = Tape(examples=len(inputs), program=program)
    for module in modules:
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
    with torch._C.DisableTorchFunction():  # not one of the model's calls
        for parameter in layer.parameters.values():
            parameter.requires_grad_(required)


def _wrap(
    tape: Tape,
    layer: Layer,
    forward: Callable[..., Any],
    examples: int,
) -> Callable[..., Any]:
    """Return the layer's forward function, extended to record its call on the tape."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        _require_gradients(layer, False)
        try:
            output = forward(*args, **kwargs)
        finally:
            _require_gradients(layer, True)
        with torch._C.DisableTorchFunction():
            if not torch.is_grad_enabled():
                return output  # no gradient reaches this call
            tensors = (*args, output)
            if kwargs or len(tensors) != 2 or not all(map(_has_rows, tensors)):
                raise NoRule(f"layer '{layer.name}', which is not called on one tensor")
            if len(args[0]) != examples or len(output) != examples:
                raise NoRule(f"layer '{layer.name}', whose input does not have one row per example")
            return _enter(tape, layer, args[0], output)

    return wrapped


def _has_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


# Returns a tensor with the same memory but its own node, which autograd does not treat as a view.
unsafe_view = torch.ops.aten._unsafe_view.default


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
        # `start` only receives a gradient. It releases its memory, because the next layer may
        # change the output in place.
        output = unsafe_view(start, output.shape)
        start.data = start.new_empty(0)
    elif output._is_view():  # a change in place would replace a view's node
        output = unsafe_view(output, output.shape)
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
    """Return a recurrent layer's forward function, extended to record its directions."""

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
            return forward(*args, **kwargs)  # no gradient reaches this call
        assert isinstance(layer.module, nn.RNNBase)
        return replay(layer.module, examples, enter, *args, **kwargs)

    return wrapped


def _memory_order(output: Tensor) -> list[int] | None:
    """Return the dimensions of maps [B, C, *] in memory order.

    None for other outputs, and for maps with gaps in memory.
    """
    if output.dim() < 3:
        return None
    if output.dim() == 4 and output.is_contiguous(memory_format=torch.channels_last):
        return [0, 2, 3, 1]
    order = [0, *memory_order(output)]
    return order if output.permute(order).is_contiguous() else None


def _register_consumer(tape: Tape, call: Call) -> None:
    """Register a hook that consumes the call when the backward pass reaches its output."""
    assert call.edge is not None
    node, index, _ = call.edge
    call.edge = None  # breaks a reference cycle, because the node's hook refers to the call

    def consume(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        gradient = gradients[index]
        if gradient is None:
            return None
        # A gradient that is a part of another map, or transposed, is copied once; the rule and the
        # rest of the backward pass both use the copy.
        g = gradient if call.order is None else arrange_as(gradient, call.order)
        _require_untouched(call)
        assert tape.consume is not None
        tape.consume(call, g)
        if g is gradient:
            return None
        return (*gradients[:index], g, *gradients[index + 1 :])

    node.register_prehook(consume)


def _require_unused(gradients: Sequence[Tensor | None]) -> None:
    if any(gradient is not None for gradient in gradients):
        raise NoRule("a parameter that is used outside of its own layer's call")


def _require_untouched(call: Call) -> None:
    if _versions(call.input) != call.version:
        raise NoRule(f"layer '{call.layer.name}', whose input is changed in place afterwards")
