"""Programs: a foreign model's forward function as recorded, checked and run.

    record     the forward function as a graph of torch's operations, for any number of examples
    flatten      in one flat graph
    leaves       layers of this package in it, which stay whole
    sequences    recurrent layers in it
    substitutes  for functions that torch records for one number of examples only
    ours         what of a model is this package's own
    calls      one call of an operation in it
    rules      where the examples are in an operation's results, by its kind
    table      which operations are of that kind
    batch      where they are after every operation, or why they cannot be told apart
    layers     operations that are layers: `conv2d` is `nn.Conv2d`
    uses       the per-example gradients of the parameters that an operation uses
    graphs     the graphs that run, with and without a tape
    signature  whether a model is still the one that was recorded
    copies     copies of models
    this       a program that is ready to run, and which models have one

A model of this package's own classes needs none: its layers have rules and tests. Any other model
runs as the program that was checked, never as Python; where it has none, its examples are run one
at a time (`alone`). A program is recorded again when a module's mode or an attribute that it holds
has changed, and when `renew` asks for it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from zdp_bench.errors import first_line
from zdp_bench.gradients.parts import leaves_of, map_leaves, takes_parts
from zdp_bench.gradients.program.batch import check
from zdp_bench.gradients.program.calls import Alone, Place, Places, is_mutable
from zdp_bench.gradients.program.copies import copy_apart
from zdp_bench.gradients.program.graphs import leaf_names, plain_graph, taped_graph
from zdp_bench.gradients.program.ours import is_ours, require_torch_backward
from zdp_bench.gradients.program.record import Recorded, record
from zdp_bench.gradients.program.signature import signature_of
from zdp_bench.gradients.program.uses import Use
from zdp_bench.gradients.rules import NoRule
from zdp_bench.nn.precision import forward_precision

log = logging.getLogger(__name__)

__all__ = [
    "Alone",
    "Place",
    "Program",
    "Running",
    "State",
    "alone",
    "copy_apart",
    "is_ours",
    "make",
    "renew",
    "state_of",
]

RECORDED_EXAMPLES = 3  # that a model is recorded with
ROUNDING = 1e-2  # of the largest output, by which rounding may move it
# Pieces of batches that a program runs at least before it is recorded again, which would otherwise
# take a good part of the time.
RUNS_BEFORE_RENEWAL = 200


@dataclass(frozen=True, eq=False)
class Program:
    """A recorded forward function whose operations keep the examples apart."""

    recorded: Recorded
    plain: GraphModule  # (*sources, *leaves) -> output
    taped: GraphModule | None  # (tape, *sources, *leaves) -> output; None if a use has no rule
    reason: str  # why there is none
    uses: list[Use]  # of parameters, in the order of `taped`
    leaves: list[str]  # names of the modules that stay whole
    code: str  # of the graph

    def equals(self, other: Program) -> bool:
        """Return whether both are the same operations with the same constants."""
        constants, others = self.recorded.constants, other.recorded.constants
        if self.code != other.code or constants.keys() != others.keys():
            return False
        return all(_are_equal(value, others[name]) for name, value in constants.items())

    def run(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """Return the output, with the parameters and buffers that the model holds now."""
        with forward_precision(model) as finish:
            return finish(self.plain.forward(*self._arguments(model, inputs)))

    def run_on(
        self,
        tape: Any,
        model: nn.Module,
        inputs: Tensor,
    ) -> Tensor:
        """As `run`, with each use of parameters entered on a tape."""
        if self.taped is None:
            raise NoRule(self.reason)
        with forward_precision(model) as finish:
            return finish(self.taped.forward(tape, *self._arguments(model, inputs)))

    def _arguments(
        self,
        model: nn.Module,
        inputs: Tensor,
    ) -> list[Any]:
        """Return what the placeholders of `plain` stand for."""
        if self.recorded.writes:
            inputs = map_leaves(torch.clone, inputs)
        examples = iter(leaves_of(inputs))
        arguments: list[Any] = []
        for source in self.recorded.sources.values():
            if source.kind == "input":
                arguments.append(next(examples))
            elif source.kind == "constant":
                arguments.append(self.recorded.constants[source.name])
            else:
                module, _, name = source.name.rpartition(".")
                arguments.append(getattr(model.get_submodule(module), name))
        leaves = [model.get_submodule(name) for name in self.leaves]
        return arguments + leaves

    def reaches(self, model: nn.Module) -> set[str]:
        """Return the names of parameters and buffers that the output may depend on."""
        needed: set[Node] = set()
        for node in reversed(self.recorded.graph.nodes):
            if node.op == "output" or node in needed or is_mutable(node):
                needed.update(node.all_input_nodes)
        placeholders = [node.name for node in needed if node.op == "placeholder"]
        names = {self.recorded.sources[placeholder].name for placeholder in placeholders}
        for leaf in self.leaves:
            module = model.get_submodule(leaf)
            for name, _ in [*module.named_parameters(), *module.named_buffers()]:
                names.add(f"{leaf}.{name}")
        return names


def _are_equal(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    return first is second


class Running(nn.Module):
    """A model whose forward function is its program, for torch.func; parts are under `model`."""

    def __init__(self, model: nn.Module, program: Program) -> None:
        super().__init__()
        self.model = model
        self.program = program

    def forward(self, inputs: Tensor) -> Tensor:
        return self.program.run(self.model, inputs)


# ------------------------------------------------------------------------------------- to make one


def make(model: nn.Module, inputs: Tensor) -> Program:
    """Return the program of a model.

    Args:
        model: stays as it is.
        inputs: one example or more, of which only the shapes and types matter.

    Raises:
        Alone: it has none, and why.
    """
    examples = _repeat_examples(inputs)
    devices = [examples.device] if examples.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.enable_grad():
        output = _run_copy(model, examples)
        if isinstance(output, Tensor):
            require_torch_backward(output)
    recorded = record(model, examples)
    places = _find_examples(recorded)
    taped = None
    uses: list[Use] = []
    reason = ""
    try:
        taped, uses = taped_graph(recorded, places)
    except NoRule as error:
        reason = str(error)
    program = Program(
        recorded=recorded,
        plain=plain_graph(recorded),
        taped=taped,
        reason=reason,
        uses=uses,
        leaves=leaf_names(recorded.graph),
        code=str(recorded.graph),
    )
    first_example = map_leaves(lambda leaf: leaf[:1], examples)
    with torch.random.fork_rng(devices):
        _require_same_for_one(model, program, first_example)
    return program


def _repeat_examples(inputs: Tensor) -> Tensor:
    """Return `RECORDED_EXAMPLES` examples, the given ones over and over."""

    def repeat(leaf: Tensor) -> Tensor:
        numbers = torch.arange(RECORDED_EXAMPLES, device=leaf.device)
        return leaf[numbers % max(1, len(leaf))].detach()

    return map_leaves(repeat, inputs)


def _run_copy(model: nn.Module, inputs: Tensor) -> Any:
    """Return the output of a copy of the model, which may change copies of the inputs."""
    copy = copy_apart(model)
    with takes_parts(copy):
        return copy(map_leaves(torch.clone, inputs))


def _find_examples(recorded: Recorded) -> Places:
    """Return where the examples are; a call that no rule foresees is run for one at a time."""
    try:
        return check(recorded.graph, recorded.inputs)
    except Alone:
        raise
    except Exception as error:
        raise Alone(f"the model has a call that is not known: {first_line(error)}") from None


@torch.no_grad()
def _require_same_for_one(
    model: nn.Module,
    program: Program,
    example: Tensor,
) -> None:
    """Reject a program that does not do for one example what the model does."""
    torch.manual_seed(0)
    expected = _run_copy(model, example)
    torch.manual_seed(0)
    output = program.run(model, map_leaves(torch.clone, example))
    if expected.numel() == output.numel():  # `squeeze()` takes out the one example's dimension, too
        expected = expected.reshape(output.shape)
    is_alike = expected.shape == output.shape and expected.dtype == output.dtype
    largest = float(expected.abs().nan_to_num(posinf=0.0).max())
    if not is_alike or not torch.allclose(
        expected, output, rtol=0, atol=ROUNDING * largest, equal_nan=True
    ):
        raise Alone("the model does something else for one example than for several")


# -------------------------------------------------------------------------------- which models have


@dataclass
class State:
    """What is known of how a model runs."""

    program: Program | None = None
    alone: str = ""  # why its examples are run one at a time
    layer: str = ""  # name of the module that is to blame for that
    signature: Any = None  # of the model when it was recorded
    runs: int = 0  # pieces of batches since then


_STATES: WeakKeyDictionary[nn.Module, State] = WeakKeyDictionary()


def state_of(model: nn.Module, inputs: Tensor) -> State:
    """Return how a model runs on such inputs; records it if it has changed."""
    signature = signature_of(model, inputs)
    known = _STATES.get(model, State())
    if known.signature == signature:
        known.runs += 1
        return known
    state = State(signature=signature)
    if not is_ours(model):
        try:
            state.program = make(model, inputs)
        except Alone as error:
            state.alone = str(error)
            state.layer = error.layer
    if state.program and known.program and known.program.equals(state.program):
        state.program = known.program  # for which `gradients` may know that it has no rule
    if state.alone and state.alone != known.alone:
        log.warning("%s: examples are processed one at a time, which is slower", state.alone)
    _STATES[model] = state
    return state


def renew(model: nn.Module) -> None:
    """Have a model recorded again before it runs next, unless it was a short while ago."""
    state = _STATES.get(model, State())
    if state.runs >= RUNS_BEFORE_RENEWAL:
        state.signature = None


def alone(model: nn.Module) -> str:
    """Return why a model's examples are run one at a time; empty if they are not, or not yet."""
    return _STATES.get(model, State()).alone
