"""Convert an exported module to one flat graph that is valid for any number of examples.

- Parts that run without gradients (`torch.no_grad()`) are separate graphs in an export. They are
  inlined, and their results are detached.
- Checks of sizes are removed.
- Uninitialised memory is replaced by zeros, so that no example can read what another left there.
- `squeeze()` gets explicit dimensions. For one example, it would also remove the batch dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_map

from zdp_bench.gradients.program.calls import Alone, is_mutable, is_tensor, name_of, written_by

aten = torch.ops.aten

CHECKS = {
    "_assert_tensor_metadata",
    "_assert_scalar",
    "_assert_async",
    "sym_constrain_range",
    "sym_constrain_range_for_size",
}
ZEROS = {
    aten.empty.memory_format: aten.zeros.default,
    aten.new_empty.default: aten.new_zeros.default,
    aten.empty_like.default: aten.zeros_like.default,
}

Copies = dict[Node, Any]  # a node's copy; for an inlined part, the list of its results


def flatten(module: GraphModule) -> Graph:
    """Return a copy of a module's graph with all parts inlined.

    `meta["frozen"]` is True for nodes that run without gradients.

    Raises:
        Alone: the model does not return one tensor.
    """
    graph = Graph()
    copies: Copies = {}
    _copy_nodes(module, graph, copies, frozen=False)
    outputs: Any = module.graph.output_node().args[0]
    if not isinstance(outputs, list | tuple) or len(outputs) != 1:
        raise Alone("the model does not return a single tensor")
    graph.output(copies.get(outputs[0], outputs[0]))
    return graph


def _copy_nodes(
    module: GraphModule,
    graph: Graph,
    copies: Copies,
    frozen: bool,
) -> None:
    """Copy the nodes of a module's graph to the end of `graph`."""
    for node in module.graph.nodes:
        if node in copies or node.op in ("output", "get_attr"):
            continue
        name = name_of(node) if node.op == "call_function" else ""
        if name in CHECKS:
            continue
        if name == "wrap_with_set_grad_enabled":
            copies[node] = _copy_part(module, node, graph, copies, frozen)
            continue
        if name == "getitem" and isinstance(copies.get(node.args[0]), list):
            results, index = copies[node.args[0]], node.args[1]
            copies[node] = results[index]
            continue
        copy = graph.node_copy(node, lambda old: copies[old])
        copy.meta["frozen"] = frozen
        copies[node] = copy
        _make_safe(copy)
        if frozen and is_mutable(copy):
            _detach_operands(graph, copy)


def _copy_part(
    module: GraphModule,
    node: Node,
    graph: Graph,
    copies: Copies,
    frozen: bool,
) -> list[Any]:
    """Inline a part that runs with or without gradients, and return copies of its results."""
    with_gradients, inner, *arguments = node.args
    part: Any = module.get_submodule(str(inner.target))  # type: ignore[union-attr]
    placeholders = [node for node in part.graph.nodes if node.op == "placeholder"]
    part_copies: Copies = {}
    for placeholder, argument in zip(placeholders, arguments, strict=True):
        part_copies[placeholder] = tree_map(lambda leaf: copies.get(leaf, leaf), argument)
    _copy_nodes(part, graph, part_copies, frozen=frozen or not with_gradients)
    results = part.graph.output_node().args[0]
    outputs = [part_copies.get(result, result) for result in results]
    if with_gradients:
        return outputs
    return [_detach(graph, output) for output in outputs]


def _detach(graph: Graph, node: Any) -> Any:
    if not isinstance(node, Node) or not is_tensor(node):
        return node
    detached = graph.call_function(aten.detach.default, (node,))
    detached.meta = dict(node.meta)
    return detached


def _detach_operands(graph: Graph, node: Node) -> None:
    """Detach what an operation writes to another tensor, which outlives the part's own results."""
    for operand in node.all_input_nodes:
        if operand not in written_by(node) and is_tensor(operand):
            with graph.inserting_before(node):
                node.replace_input_with(operand, _detach(graph, operand))


def _make_safe(node: Node) -> None:
    """Replace uninitialised memory by zeros, and give a squeeze explicit dimensions."""
    if node.op != "call_function":
        return
    if node.target in ZEROS:
        node.target = ZEROS[node.target]
        node.kwargs = {k: v for k, v in node.kwargs.items() if k != "memory_format"}
    if node.target is aten.squeeze.default:
        squeezed: Any = node.args[0]
        sizes = enumerate(squeezed.meta["val"].shape)
        dims = [dim for dim, size in sizes if isinstance(size, int) and size == 1]
        node.target, node.args = aten.squeeze.dims, (squeezed, dims)
