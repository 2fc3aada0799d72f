"""Programs: a foreign model's forward function as recorded, checked and run.

    record   the forward function as a graph of torch's operations, for any number of examples
    sequences  recurrent layers in it
    calls    one call of an operation in it
    rules    where the examples are in an operation's results, by its kind
    table    which operations are of that kind
    batch    where they are after every operation, or why they cannot be told apart
    uses     the per-example gradients of the parameters that an operation uses
    this     a program that is ready to run, and which models have one

A model of this package's own classes needs none: its layers have rules and tests. Any other model
runs as the program that was checked, never as Python; where it has none, its examples are run one
at a time (`alone`). A program is recorded again when a module's mode or an attribute that it holds
has changed, and when `renew` asks for it.
"""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from zdp_bench.errors import first_line
from zdp_bench.gradients.parts import leaves_of, map_leaves, takes_parts
from zdp_bench.gradients.program.batch import check
from zdp_bench.gradients.program.calls import (
    Alone,
    Place,
    Places,
    is_tensor,
    module_of,
    name_of,
    named_arguments,
    nodes_in,
)
from zdp_bench.gradients.program.record import (
    HOOKS,
    Recorded,
    foreign_hooks,
    is_ours,
    record,
    require_torch_backward,
)
from zdp_bench.gradients.program.sequences import is_recurrent, run_plain
from zdp_bench.gradients.program.table import READS_NO_NUMBER
from zdp_bench.gradients.program.uses import Use, use_of
from zdp_bench.gradients.rules import NoRule
from zdp_bench.nn.precision import forward_precision

log = logging.getLogger(__name__)

EXAMPLES = 3  # that a model is recorded with
SAME = 1e-2  # of the largest output, by which rounding may move it
SOON = 200  # pieces of batches, in which recording again would take a good part of the time


@dataclass(frozen=True, eq=False)
class Program:
    """A recorded forward function whose operations keep the examples apart."""

    recorded: Recorded
    plain: GraphModule  # (*sources, *leaves) -> output
    taped: GraphModule | None  # (tape, *sources, *leaves) -> output; None if a use has no rule
    reason: str  # why there is none
    leaves: tuple[str, ...]  # names of the modules that stay whole
    uses: tuple[Use, ...]  # of parameters, in the order of `taped`
    code: str  # of the graph

    def equals(self, other: Program) -> bool:
        """True if both are the same operations with the same constants."""
        own, others = self.recorded.constants, other.recorded.constants
        if self.code != other.code or own.keys() != others.keys():
            return False
        return all(_are_equal(value, others[name]) for name, value in own.items())

    def run(self, model: nn.Module, inputs: Tensor) -> Tensor:
        """Return the output, with the parameters and buffers that the model holds now."""
        with forward_precision(model) as finish:
            return finish(self.plain.forward(*self._given(model, inputs)))

    def run_on(self, tape: Any, model: nn.Module, inputs: Tensor) -> Tensor:
        """As `run`, with each use of parameters entered on a tape."""
        if self.taped is None:
            raise NoRule(self.reason)
        with forward_precision(model) as finish:
            return finish(self.taped.forward(tape, *self._given(model, inputs)))

    def _given(self, model: nn.Module, inputs: Tensor) -> list[Any]:
        examples = iter(leaves_of(inputs))
        given: list[Any] = []
        for source in self.recorded.sources.values():
            if source.kind == "input":
                given.append(next(examples))
            elif source.kind == "constant":
                given.append(self.recorded.constants[source.name])
            else:
                owner, _, own = source.name.rpartition(".")
                given.append(getattr(model.get_submodule(owner), own))
        return given + [model.get_submodule(name) for name in self.leaves]

    def reaches(self, model: nn.Module) -> set[str]:
        """Return the names of parameters and buffers that the output may depend on."""
        reached: set[Node] = set()
        for node in reversed(self.recorded.graph.nodes):
            if node.op == "output" or node in reached or _writes(node):
                reached |= set(node.all_input_nodes)
        sources = self.recorded.sources
        names = {sources[node.name].name for node in reached if node.op == "placeholder"}
        for leaf in self.leaves:
            held = model.get_submodule(leaf)
            names |= {f"{leaf}.{name}" for name, _ in held.named_parameters()}
            names |= {f"{leaf}.{name}" for name, _ in held.named_buffers()}
        return names


def _are_equal(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    return first is second


def _writes(node: Node) -> bool:
    return hasattr(node.target, "_schema") and node.target._schema.is_mutable


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
    examples = _few(inputs)
    twin = copy_apart(model)
    devices = [examples.device] if examples.device.type == "cuda" else []
    with torch.random.fork_rng(devices), takes_parts(twin), torch.enable_grad():
        output = twin(map_leaves(torch.clone, examples))
        if isinstance(output, Tensor):
            require_torch_backward(output)
    recorded = record(model, examples)
    places = _check(recorded)
    reason, taped = "", None
    uses: list[Use] = []
    try:
        taped, uses = _on_tape(recorded, places)
    except NoRule as error:
        reason = str(error)
    leaves = tuple(
        dict.fromkeys(_leaf_name(node) for node in recorded.graph.nodes if _is_leaf(node))
    )
    plain = _plain(recorded)
    program = Program(recorded, plain, taped, reason, leaves, tuple(uses), str(recorded.graph))
    with torch.random.fork_rng(devices):
        _require_same_for_one(model, program, map_leaves(lambda leaf: leaf[:1], examples))
    return program


@torch.no_grad()
def _require_same_for_one(model: nn.Module, program: Program, one: Tensor) -> None:
    """Reject a program that does not do for one example what the model does."""
    twin = copy_apart(model)
    with takes_parts(twin):
        torch.manual_seed(0)
        own = twin(map_leaves(torch.clone, one))
    torch.manual_seed(0)
    found = program.run(model, map_leaves(torch.clone, one))
    scale = float(own.abs().nan_to_num(posinf=0.0).max())
    if own.numel() == found.numel():
        own = own.reshape(found.shape)  # `squeeze()` takes out the dimension of one example, too
    alike = own.shape == found.shape and own.dtype == found.dtype
    if not alike or not torch.allclose(own, found, rtol=0, atol=SAME * scale, equal_nan=True):
        raise Alone("the model does something else for one example than for several")


def _check(recorded: Recorded) -> Places:
    """Return where the examples are; a call that no rule foresees is run for one at a time."""
    try:
        return check(recorded.graph, recorded.inputs)
    except Alone:
        raise
    except Exception as error:
        raise Alone(f"the model has a call that is not known: {first_line(error)}") from None


def _few(inputs: Tensor) -> Tensor:
    """Return `EXAMPLES` examples, the given ones over and over."""

    def choose(leaf: Tensor) -> Tensor:
        return leaf[torch.arange(EXAMPLES, device=leaf.device) % max(1, len(leaf))].detach()

    return map_leaves(choose, inputs)


def _is_leaf(node: Node) -> bool:
    return node.op == "call_function" and name_of(node) == "leaf"


def _leaf_name(node: Node) -> str:
    return str(node.args[1])


def _call_leaf(module: nn.Module, x: Tensor) -> Tensor:
    output: Tensor = module(x)
    return output


def _with_leaves(recorded: Recorded, graph: Graph, call: Callable[..., Any]) -> Graph:
    """Have the leaves called as modules, which become placeholders, and recurrent layers as is."""
    modules: dict[str, Node] = {}
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    for node in [*graph.nodes]:
        if _is_leaf(node):
            name = _leaf_name(node)
            if name not in modules:
                with graph.inserting_after(last):
                    last = modules[name] = graph.placeholder(f"leaf_{len(modules)}")
            node.target, node.args = call, (modules[name], node.args[0])
        elif node.op == "call_function" and is_recurrent(node):
            run_plain(node)
    graph.eliminate_dead_code(lambda node: _writes(node) or node.op in ("placeholder", "output"))
    return graph


def _copy_of(graph: Graph) -> tuple[Graph, dict[Node, Node]]:
    new = Graph()
    copied: dict[Node, Node] = {}
    output = new.graph_copy(graph, copied)
    new.output(output)
    return new, copied


def _plain(recorded: Recorded) -> GraphModule:
    graph, _ = _copy_of(recorded.graph)
    return GraphModule(nn.Module(), _with_leaves(recorded, graph, _call_leaf))


def _on_tape(recorded: Recorded, places: Places) -> tuple[GraphModule, list[Use]]:
    """Return the graph with a note on a tape behind each use of parameters.

    What those operations are given of parameters is detached: autograd records nothing of it.
    """
    graph, copied = _copy_of(recorded.graph)
    with graph.inserting_before(next(iter(graph.nodes))):
        tape = graph.placeholder("tape")
    trained = _of_parameters(recorded, places)
    uses: list[Use] = []
    for old in recorded.graph.nodes:
        if old.op != "call_function" or old not in places or old.meta.get("frozen"):
            continue
        operands = list(dict.fromkeys(nodes_in(old.args, old.kwargs)))
        weights = [leaf for leaf in operands if leaf in trained]
        if not weights or _is_leaf(old) or name_of(old) == "getitem":
            continue
        node = copied[old]
        if is_recurrent(old):
            inner = places[old.args[0]].inner
            node.kwargs = {}
            node.args = (tape, name_of(old), module_of(old), inner, *node.args)
            node.target = _enter_recurrent
            continue
        for weight in weights:
            with graph.inserting_before(node):
                detached = graph.call_function(torch.ops.aten.detach.default, (copied[weight],))
            node.replace_input_with(copied[weight], detached)
        read = _read_by(old)
        weights = [weight for weight in weights if weight in read]
        if not weights:
            continue
        held = [leaf for leaf in operands if leaf not in trained and is_tensor(leaf)]
        uses.append(use_of(old, weights, held, places))
        given = tuple(copied[leaf] for leaf in weights)
        examples = tuple(copied[leaf] for leaf in held)
        with graph.inserting_after(node):
            entered = graph.call_function(_enter)
        node.replace_all_uses_with(entered)
        entered.args = (tape, len(uses) - 1, node, given, examples)
    graph = _with_leaves(recorded, graph, _call_leaf)
    for node in graph.nodes:
        if node.target is _call_leaf:
            node.target, node.args = _enter_leaf, (tape, *node.args)
    return GraphModule(nn.Module(), graph), uses


def _read_by(node: Node) -> set[Node]:
    """Return the arguments whose numbers a differentiable operation reads."""
    value = node.meta.get("val")
    if isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex()):
        return set()
    unread = READS_NO_NUMBER.get(name_of(node), frozenset())
    return {
        leaf
        for name, argument in named_arguments(node)
        if name not in unread
        for leaf in nodes_in(argument)
    }


def _of_parameters(recorded: Recorded, places: Places) -> set[Node]:
    """Return the nodes that follow from parameters and hold no example."""
    found: set[Node] = set()
    for node in recorded.graph.nodes:
        if node.op == "placeholder":
            if recorded.sources[node.name].kind == "parameter":
                found.add(node)
        elif node not in places and any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _enter(tape: Any, number: int, output: Tensor, weights: Any, held: Any) -> Tensor:
    entered: Tensor = tape.enter_use(number, output, weights, held)
    return entered


def _enter_leaf(tape: Any, module: nn.Module, x: Tensor) -> Tensor:
    output: Tensor = tape.call_leaf(module, x)
    return output


def _enter_recurrent(tape: Any, kind: str, name: str, inner: int, *args: Any) -> Any:
    return tape.call_recurrent(kind, name, inner, *args)


# --------------------------------------------------------------------------------- copies of models


def copy_apart(model: nn.Module, shared: tuple[Any, ...] = ()) -> nn.Module:
    """Return a deep copy of a model. `shared` objects, and what cannot be copied, are the same.

    What cannot be copied is a lock or an open file, say; functions are shared too.
    """
    memo: dict[int, Any] = {id(thing): thing for thing in shared}
    values = [value for module in model.modules() for value in vars(module).values()]
    for value in values:
        if isinstance(value, Tensor) and not value.is_leaf:
            memo[id(value)] = value.detach().clone()
    try:
        return copy.deepcopy(model, {**memo})
    except Exception:
        modules = {id(module): module for module in model.modules()}
        for value in values:
            try:
                copy.deepcopy(value, memo | modules)
            except Exception:
                memo[id(value)] = value
        return copy.deepcopy(model, memo)


# -------------------------------------------------------------------------------- which models have


@dataclass
class State:
    """What is known of how a model runs."""

    program: Program | None
    alone: str  # why its examples are run one at a time
    layer: str  # name of the module that is to blame for that
    seen: Any  # `_signature` when it was recorded
    runs: int = 0  # pieces of batches since then


_STATES: WeakKeyDictionary[nn.Module, State] = WeakKeyDictionary()


def state_of(model: nn.Module, inputs: Tensor) -> State:
    """Return how a model runs on such inputs; records it if it has changed."""
    held = _STATES.get(model)
    seen = _signature(model, inputs)
    if held is not None and held.seen == seen:
        held.runs += 1
        return held
    state = State(None, "", "", seen)
    if not is_ours(model):
        try:
            state.program = make(model, inputs)
            if held is not None and held.program is not None and held.program.equals(state.program):
                state.program = held.program
        except Alone as error:
            state.alone, state.layer = str(error), error.layer
    if state.alone and (held is None or held.alone != state.alone):
        log.warning("%s: examples are processed one at a time, which is slower", state.alone)
    _STATES[model] = state
    return state


def renew(model: nn.Module) -> None:
    """Have a model recorded again before it runs next, unless it was a short while ago."""
    if model in _STATES and _STATES[model].runs >= SOON:
        _STATES[model].seen = None


def alone(model: nn.Module) -> str:
    """Return why a model's examples are run one at a time; empty if they are not, or not yet."""
    held = _STATES.get(model)
    return held.alone if held is not None else ""


EXACT = {str, type(None)}
NUMBERS = (bool, int, float, str, type(None))
SHORT = 64  # entries of a list whose entries are compared
# What torch keeps of every module, and of recurrent ones.
TORCHS = {*vars(nn.Module()), "_flat_weights", "_flat_weight_refs", "_all_weights"} - {"training"}


class Reference:
    """A reference to an object, which equals only references to this object while it lives.

    An address alone would not do: a later object may lie there.
    """

    def __init__(self, referred: Any) -> None:
        try:
            self.get: Callable[[], Any] = weakref.ref(referred)
        except TypeError:
            self.get = lambda: referred

    def __eq__(self, other: object) -> bool:
        own = self.get()
        return isinstance(other, Reference) and own is not None and own is other.get()


def _signature(model: nn.Module, inputs: Tensor) -> Any:
    """Return what a recording depends on, beside code and the numbers of parameters and buffers."""
    shapes = tuple((leaf.shape[1:], leaf.dtype, leaf.device) for leaf in leaves_of(inputs))
    return shapes, [_held_by(module) for module in model.modules()]


def _held_by(module: nn.Module) -> tuple[Any, ...]:
    own = vars(module)
    hooked = [own[kind] for kind in HOOKS if own[kind]]
    hooks = [Reference(hook) for hooks in hooked for hook in foreign_hooks(hooks)]
    others = [
        (name, value if type(value) in EXACT else _read(value))
        for name, value in own.items()
        if name not in TORCHS
    ]
    tensors = [
        (name, value.dtype, value.shape, value.requires_grad)
        for held in (own["_parameters"], own["_buffers"])
        for name, value in held.items()
        if value is not None
    ]
    return Reference(module), hooks, others, tensors


def _read(value: Any) -> Any:
    """Return what tells an attribute from what it is later.

    A tensor is a constant of the program itself, which follows changes in place.
    """
    if isinstance(value, NUMBERS):
        return type(value), value
    if isinstance(value, list | tuple) and len(value) <= SHORT:
        return type(value), [_read(part) for part in value]
    return Reference(value)


__all__ = ["Alone", "Place", "Program", "Running", "State", "alone", "copy_apart", "is_ours"]
__all__ += ["renew", "state_of"]
