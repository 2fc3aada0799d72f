"""Programs: how the forward function of a third-party model is recorded, checked and run.

    record       records the forward function as a graph of torch's operations for any batch size
    flatten      inlines the parts of the graph
    leaves       keeps layers of this package whole
    sequences    records recurrent layers
    substitutes  replaces functions that torch records for a fixed batch size only
    ours         decides which parts of a model are this package's own
    calls        one call of an operation in the graph
    rules        where the examples are in an operation's results, for each kind of operation
    table        the kind of each operation
    memory       which tensors share memory, and which may be overwritten
    batch        where the examples are after each operation, or why they cannot be told apart
    layers       operations as layers: `conv2d` is `nn.Conv2d`
    uses         per-example gradients of the parameters that an operation uses
    graphs       the graphs that run, with and without a tape
    signature    whether a model has changed since it was recorded
    closures     functions of a model, such as hooks, that refer to it
    copies       copies of models
    __init__     `Program`, which is ready to run, and the state of each model

A model of this package's own classes needs no program: its layers have rules and tests. Any other
model runs as the program that was checked, never as Python code. If it has no program, its examples
run one at a time (`alone`). A model is recorded again if a module's mode or one of its attributes
has changed, and from time to time (`renew`).
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
from zdp_bench.gradients.outside_state import are_equal, preserve_outside_state
from zdp_bench.gradients.parts import (
    arrange_as,
    arrange_memory,
    clone_contiguous,
    map_leaves,
    takes_parts,
)
from zdp_bench.gradients.program.batch import check
from zdp_bench.gradients.program.calls import Alone, Places, is_mutable
from zdp_bench.gradients.program.copies import copy_apart
from zdp_bench.gradients.program.graphs import bind, leaf_names, plain_graph, taped_graph
from zdp_bench.gradients.program.memory import resolve_writes
from zdp_bench.gradients.program.ours import is_ours, require_torch_backward
from zdp_bench.gradients.program.record import Recorded, record
from zdp_bench.gradients.program.signature import kinds_of, signature_of
from zdp_bench.gradients.program.uses import Use
from zdp_bench.gradients.rules import NoRule
from zdp_bench.nn.precision import forward_precision

log = logging.getLogger(__name__)

RECORDED_EXAMPLES = 3  # batch size when a model is recorded
ROUNDING = 1e-2  # largest difference that counts as rounding, relative to the largest output
# Smallest number of steps between two recordings for `renew`. Recording more often would take a
# considerable part of the time. Micro-batches are not counted, because their number depends on the
# number of examples.
STEPS_BEFORE_RENEWAL = 200


@dataclass(frozen=True, eq=False)
class Program:
    """A recorded forward function whose operations keep the examples apart.

    Attributes:
        recorded: the recorded operations.
        plain: (*sources, *leaves) -> output.
        taped: (tape, *sources, *leaves) -> output; None if a use of parameters has no rule.
        reason: why `taped` is None; empty otherwise.
        uses: uses of parameters, in the order of `taped`.
        leaves: names of the modules that stay whole.
        code: the graph as text.
    """

    recorded: Recorded
    plain: GraphModule
    taped: GraphModule | None
    reason: str
    uses: list[Use]
    leaves: list[str]
    code: str

    def equals(self, other: Program) -> bool:
        """Return True if both consist of the same operations with the same constants."""
        constants, other_constants = self.recorded.constants, other.recorded.constants
        if self.code != other.code or constants.keys() != other_constants.keys():
            return False
        return all(_are_same(value, other_constants[name]) for name, value in constants.items())

    def run(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """Return the output for the model's current parameters and buffers."""
        with forward_precision(model) as finish:
            return finish(self.plain.forward(*self._arguments(model, inputs)))

    def run_on(
        self,
        tape: Any,
        model: nn.Module,
        inputs: Tensor,
    ) -> Tensor:
        """Do what `run` does, and record each use of parameters on a tape.

        Raises:
            NoRule: a use has no rule.
        """
        if self.taped is None:
            raise NoRule(self.reason)
        with forward_precision(model) as finish:
            return finish(self.taped.forward(tape, *self._arguments(model, inputs)))

    def _arguments(
        self,
        model: nn.Module,
        inputs: Tensor,
    ) -> list[Any]:
        """Return the values of the placeholders of `plain`."""
        if self.recorded.writes:
            # An operation may overwrite the inputs. In another memory format than the recording's,
            # views of them could be copies, and copies views.
            inputs = map_leaves(clone_contiguous, inputs)
        return bind(self.recorded, self.leaves, model, inputs)

    def names_used(self, model: nn.Module) -> set[str]:
        """Return the names of the parameters and buffers that the output may depend on."""
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


def _are_same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return are_equal(first, second)
    return first is second


class Running(nn.Module):
    """A module that runs a model's program, for torch.func. Its tensors are the model's own."""

    def __init__(self, model: nn.Module, program: Program) -> None:
        super().__init__()
        self.model = model
        self.program = program

    def forward(self, inputs: Tensor) -> Tensor:
        return self.program.run(self.model, inputs)


# ------------------------------------------------------------------------------ creating a program


@torch.enable_grad()
def make(model: nn.Module, inputs: Tensor) -> Program:
    """Create the program of a model.

    Args:
        model: the model, which is not changed.
        inputs: one example or more; only shapes, data types and memory format matter.

    Raises:
        Alone: the model has no program; the error states the reason.
    """
    examples = _repeat_examples(inputs)
    devices = [examples.device] if examples.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.enable_grad():
        output = _run_copy(model, examples)
        if isinstance(output, Tensor):
            require_torch_backward(output)
    recorded = record(model, map_leaves(clone_contiguous, examples))
    first_example = map_leaves(lambda leaf: leaf[:1], examples)
    with torch.random.fork_rng(devices):
        resolve_writes(recorded, model, [examples, first_example])
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
    with torch.random.fork_rng(devices):
        _require_same_for_one(model, program, first_example)
    return program


def _repeat_examples(inputs: Tensor) -> Tensor:
    """Return `RECORDED_EXAMPLES` examples, by repeating the inputs."""

    def repeat(leaf: Tensor) -> Tensor:
        indices = torch.arange(RECORDED_EXAMPLES, device=leaf.device)
        return leaf[indices % max(1, len(leaf))].detach()

    return arrange_memory(map_leaves(repeat, inputs), inputs)


def _run_copy(model: nn.Module, inputs: Tensor) -> Any:
    """Return the output of a copy of the model for a copy of the inputs.

    Nothing of the inputs is left in memory for the recording.
    """
    copy = copy_apart(model)
    with preserve_outside_state(copy), takes_parts(copy):
        return copy(map_leaves(torch.clone, inputs))


def _find_examples(recorded: Recorded) -> Places:
    """Return where the examples are after each operation.

    Raises:
        Alone: an operation mixes examples, or is called in a way that no rule supports.
    """
    try:
        return check(recorded.graph, recorded.inputs)
    except Alone:
        raise
    except Exception as error:
        raise Alone(f"the model makes a call that no rule supports: {first_line(error)}") from None


def _require_same_for_one(
    model: nn.Module,
    program: Program,
    example: Tensor,
) -> None:
    """Reject a program whose output for one example differs from the model's."""
    torch.manual_seed(0)
    try:
        expected = _run_copy(model, example).detach()
    except Exception:
        raise Alone("the model fails for a batch of one example, as after squeeze()") from None
    torch.manual_seed(0)
    try:
        output = program.run(model, map_leaves(torch.clone, example)).detach()
    except Exception as error:
        raise Alone(f"the program fails on one example: {first_line(error)}") from None
    if expected.numel() == output.numel():  # for one example, `squeeze()` also removes dimension 0
        expected = expected.reshape(output.shape)
    is_same = expected.shape == output.shape and expected.dtype == output.dtype
    if is_same:
        largest = float(expected.abs().nan_to_num(posinf=0.0).max())
        tolerance = ROUNDING * largest
        is_same = torch.allclose(expected, output, rtol=0, atol=tolerance, equal_nan=True)
    if not is_same:
        raise Alone("the model behaves differently for one example than for several")


# -------------------------------------------------------------------------- the state of each model


@dataclass
class State:
    """How a model runs.

    Attributes:
        program: the model's program, if it has one.
        alone: why the model's examples run one at a time; empty if they do not.
        layer: name of the module that is the reason for `alone`.
        signature: the model's signature when it was recorded.
        step: the step at which `renew` last had it recorded.
        examples: the inputs of the first recording, which are made up or public. Later recordings
            run on them as well, and not on training examples.
    """

    program: Program | None = None
    alone: str = ""
    layer: str = ""
    signature: Any = None
    step: int = 0
    examples: Tensor | None = None


_STATES: WeakKeyDictionary[nn.Module, State] = WeakKeyDictionary()


def state_of(model: nn.Module, inputs: Tensor) -> State:
    """Return how a model runs on inputs like these, and record it again if it has changed."""
    signature = signature_of(model, inputs)
    known = _STATES.get(model, State())
    if known.signature == signature:
        return known
    examples = known.examples
    if examples is None or kinds_of(examples) != kinds_of(inputs):
        examples = _repeat_examples(inputs)
    examples = arrange_memory(arrange_as(examples, inputs), inputs)
    state = State(signature=signature, step=known.step, examples=examples)
    if not is_ours(model):
        try:
            state.program = make(model, examples)
        except Alone as error:
            state.alone = str(error)
            state.layer = error.layer
    if state.program and known.program and known.program.equals(state.program):
        state.program = known.program  # `gradients._unsupported` is keyed by program
    if state.alone and state.alone != known.alone:
        log.warning("%s: examples are processed one at a time, which is slower", state.alone)
    _STATES[model] = state
    return state


def renew(model: nn.Module, step: int) -> None:
    """Record a model again before its next run, unless it was recorded recently.

    Args:
        step: number of steps taken so far.
    """
    state = _STATES.get(model, State())
    if not 0 <= step - state.step < STEPS_BEFORE_RENEWAL:
        state.signature = None
        state.step = step


def alone(model: nn.Module) -> str:
    """Return why a model's examples run one at a time; empty if not, or before its first run."""
    return _STATES.get(model, State()).alone
