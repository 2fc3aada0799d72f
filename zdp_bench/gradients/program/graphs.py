"""The graphs that run: a recorded forward function, with or without a tape.

    plain   computes the output
    taped   computes the output, and records each use of parameters on a tape

In both, layers of this package are called as modules, and recurrent operations are run by torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from zdp_bench.gradients.parts import leaves_by_path
from zdp_bench.gradients.program.calls import (
    Places,
    is_mutable,
    is_tensor,
    module_of,
    name_of,
    named_arguments,
    nodes_in,
    share_memory,
    written_by,
)
from zdp_bench.gradients.program.record import Recorded
from zdp_bench.gradients.program.sequences import is_recurrent, run_plain
from zdp_bench.gradients.program.table import READS_NO_NUMBER
from zdp_bench.gradients.program.uses import Use, use_of
from zdp_bench.gradients.rules import NoRule


def plain_graph(recorded: Recorded) -> GraphModule:
    """Return the graph (*sources, *leaves) -> output."""
    graph, _ = _copy(recorded.graph)
    _call_leaves(graph, _call_leaf)
    return GraphModule(nn.Module(), graph)


def taped_graph(
    recorded: Recorded,
    places: Places,
) -> tuple[GraphModule, list[Use]]:
    """Return the graph (tape, *sources, *leaves) -> output, and the uses that it records.

    The arguments of a use that depend on parameters are detached, so that autograd does not record
    them.

    Raises:
        NoRule: `uses` does not support a use of parameters.
    """
    graph, copies = _copy(recorded.graph)
    with graph.inserting_before(next(iter(graph.nodes))):
        tape = graph.placeholder("tape")
    parameter_nodes = _follow_parameters(recorded, places)
    uses: list[Use] = []
    for node in recorded.graph.nodes:
        for written in written_by(node):
            if any(share_memory(written, weight) for weight in parameter_nodes):
                raise NoRule(f"{name_of(node)}, which overwrites what is computed from parameters")
        operands = _operands_of_use(node, places)
        weights = [operand for operand in operands if operand in parameter_nodes]
        if not weights:
            continue
        copy = copies[node]
        if is_recurrent(node):
            sequences = node.args[0]
            description = name_of(node), module_of(node), places[sequences].inner
            copy.args = (tape, *description, *copy.args)
            copy.kwargs = {}
            copy.target = _enter_recurrent
            continue
        for weight in weights:
            _detach(graph, copy, copies[weight])
        read = _read_by(node)
        weights = [weight for weight in weights if weight in read]
        if not weights:
            continue
        tensors = [operand for operand in operands if is_tensor(operand)]
        others = [tensor for tensor in tensors if tensor not in parameter_nodes]
        with graph.inserting_after(copy):
            output = graph.call_function(_enter_use)
        copy.replace_all_uses_with(output)  # before it gets its arguments, of which copy is one
        output.args = (
            tape,
            len(uses),
            copy,
            [copies[weight] for weight in weights],
            [copies[other] for other in others],
        )
        uses.append(use_of(node, weights, others, places))
    _call_leaves(graph, _enter_leaf, tape)
    return GraphModule(nn.Module(), graph), uses


def bind(
    recorded: Recorded,
    leaves: list[str],
    model: nn.Module,
    inputs: Tensor,
) -> list[Any]:
    """Return the values of the placeholders of `plain`: a model's tensors, examples and leaves."""
    examples = leaves_by_path(inputs)
    arguments: list[Any] = []
    for source in recorded.sources.values():
        if source.kind == "input":
            arguments.append(examples[source.name])
        elif source.kind == "constant":
            arguments.append(recorded.constants[source.name])
        else:
            module, _, name = source.name.rpartition(".")
            arguments.append(getattr(model.get_submodule(module), name))
    return arguments + [model.get_submodule(name) for name in leaves]


def leaf_names(graph: Graph) -> list[str]:
    """Return the names of the modules that were recorded whole."""
    names = [_leaf_name(node) for node in graph.nodes if _is_leaf(node)]
    return list(dict.fromkeys(names))


def _copy(graph: Graph) -> tuple[Graph, dict[Node, Node]]:
    """Return a copy of a graph, and the copy of each of its nodes."""
    new = Graph()
    copies: dict[Node, Node] = {}
    output = new.graph_copy(graph, copies)
    new.output(output)
    return new, copies


def _is_leaf(node: Node) -> bool:
    return node.op == "call_function" and name_of(node) == "leaf"


def _leaf_name(node: Node) -> str:
    return str(node.args[1])


def _call_leaves(
    graph: Graph,
    call: Callable[..., Any],
    *first: Node,
) -> None:
    """Make leaves run as `call(*first, module, x)`, and recurrent operations by torch.

    The modules of the leaves become the last placeholders.
    """
    modules: dict[str, Node] = {}
    nodes = list(graph.nodes)
    last = [node for node in nodes if node.op == "placeholder"][-1]
    for node in nodes:
        if _is_leaf(node):
            name = _leaf_name(node)
            if name not in modules:
                with graph.inserting_after(last):
                    last = graph.placeholder(f"leaf_{len(modules)}")
                modules[name] = last
            node.target = call
            node.args = (*first, modules[name], node.args[0])
        elif node.op == "call_function" and is_recurrent(node):
            run_plain(node)
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or is_mutable(node))


def _follow_parameters(recorded: Recorded, places: Places) -> set[Node]:
    """Return the nodes that depend on parameters and contain no examples."""
    parameter_nodes: set[Node] = set()
    for node in recorded.graph.nodes:
        if node.op == "placeholder":
            if recorded.sources[node.name].kind == "parameter":
                parameter_nodes.add(node)
        elif node not in places and not parameter_nodes.isdisjoint(node.all_input_nodes):
            parameter_nodes.add(node)
    return parameter_nodes


def _operands_of_use(node: Node, places: Places) -> list[Node]:
    """Return the arguments of an operation that may be a use of parameters; otherwise none.

    Three kinds of nodes are no uses: a leaf, whose layers record themselves; an item of several
    results, which is no operation; and an operation that ran without gradients.
    """
    if node.op != "call_function" or node not in places or node.meta.get("frozen"):
        return []
    if _is_leaf(node) or name_of(node) == "getitem":
        return []
    return list(dict.fromkeys(nodes_in(node.args, node.kwargs)))


def _read_by(node: Node) -> set[Node]:
    """Return the arguments whose values an operation reads; none if it is not differentiable."""
    result = node.meta.get("val")
    if isinstance(result, Tensor) and not (result.is_floating_point() or result.is_complex()):
        return set()
    unread = READS_NO_NUMBER.get(name_of(node))
    read: set[Node] = set()
    for name, argument in named_arguments(node):
        if name != unread:
            read.update(nodes_in(argument))
    return read


def _detach(graph: Graph, node: Node, argument: Node) -> None:
    """Detach an argument of an operation from autograd's graph."""
    with graph.inserting_before(node):
        detached = graph.call_function(torch.ops.aten.detach.default, (argument,))
    node.replace_input_with(argument, detached)


# ------------------------------------------------------------------------ called by the graphs


def _call_leaf(module: nn.Module, x: Tensor) -> Tensor:
    output: Tensor = module(x)
    return output


def _enter_leaf(
    tape: Any,
    module: nn.Module,
    x: Tensor,
) -> Tensor:
    output: Tensor = tape.call_leaf(module, x)
    return output


def _enter_use(
    tape: Any,
    index: int,
    output: Tensor,
    weights: Any,
    others: Any,
) -> Tensor:
    taped_output: Tensor = tape.enter_use(index, output, weights, others)
    return taped_output


def _enter_recurrent(
    tape: Any,
    kind: str,
    name: str,
    inner: int,
    *args: Any,
) -> Any:
    return tape.call_recurrent(kind, name, inner, *args)
