"""Where the examples are in each tensor of a recorded program, or why they cannot be told apart.

`check` visits each operation once. Each tensor that contains examples has a `Place`. For x
[B, 4, 6], `x.transpose(0, 1)` has the examples in dimension 1, and `x.reshape(-1, 6)` has 4
consecutive rows of each in dimension 0. For each known operation, a rule (`rules`) determines where
the examples in its result are. An operation that is not known, or whose call combines two examples,
raises `Alone`. Nothing is run, and no values are read.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves

from zdp_bench.gradients.program.calls import (
    ALIKE,
    Alone,
    Call,
    Place,
    Places,
    batch_dim,
    is_size,
    list_places,
    name_of,
    nodes_in,
    share_memory,
    symbolic_dims,
    tensors_in,
    written_by,
)
from zdp_bench.gradients.program.rules import USES_POSITION
from zdp_bench.gradients.program.table import CONSTANTS, IN_PLACE, OF_INDEX, RULES, SIZED

SHAPE_QUERIES = {"sym_size", "sym_numel", "sym_stride", "sym_storage_offset"}
UNKNOWN = "is not known to keep examples apart"


def check(graph: Graph, inputs: set[Node]) -> Places:
    """Return where the examples are in each tensor of a program.

    Args:
        graph: the program.
        inputs: the placeholders that contain the examples, in dimension 0.

    Formal guarantee: in each operation, one example's entries in the results depend only on its
    entries in the arguments and on arguments without examples, for any values and any batch size.

    Raises:
        Alone: an operation is not known to have this property.
    """
    places: Places = dict.fromkeys(inputs, Place(0, 1))
    numbering: set[Node] = set()
    fixed = [node for node in graph.nodes if node.op == "placeholder" and node not in inputs]
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        for written in written_by(node):
            if any(share_memory(written, tensor) for tensor in fixed):
                raise Alone("the model changes its parameters or buffers in its forward pass", node)
        place = _find_place(node, places, numbering)
        if place is not None:
            places[node] = place
            _require_consistent(node, place)
    for output in tree_leaves(graph.output_node().args):
        has_rows = isinstance(output, Node) and places.get(output) == Place(0, 1)
        if not has_rows or output in numbering:
            raise Alone("the output does not have one row per example", output)
    return places


def _find_place(
    node: Node,
    places: Places,
    numbering: set[Node],
) -> Any:
    """Return where the examples are in the result of an operation; None if it contains none."""
    if name_of(node) == "getitem":
        return _find_place_of_item(node, places)
    if not hasattr(node.target, "_schema"):  # Python arithmetic with sizes
        if any(operand in places for operand in nodes_in(node.args, node.kwargs)):
            raise Alone(f"{name_of(node)} {UNKNOWN}", node)
        return None
    call = Call(node, places, numbering)
    if call.kind in SHAPE_QUERIES:
        return None
    if _holds_none(call):
        return None
    is_library = call.schema.name.startswith(("aten::", "zdp_bench::"))
    call.require(is_library, "is a custom operator")
    call.require(call.kind in RULES, UNKNOWN)
    call.require_no_sizes(*SIZED.get(call.kind, ()))
    _follow_numbering(call)
    may_write = not call.written or call.kind in IN_PLACE
    call.require(may_write, f"{UNKNOWN} in place")
    place = RULES[call.kind](call)
    for written in call.written:
        is_same_place = places.get(written) == place
        call.require(is_same_place, "overwrites a tensor with examples in another arrangement")
        # If the same memory is another tensor whose rows are alike, a view of that may still assign
        # them to examples in another order. Only rows that are alike may therefore be written.
        sharing = [tensor for tensor in places if share_memory(tensor, written)]
        has_no_order = any(_is_alike(places[tensor]) for tensor in sharing)
        keeps_alike = not has_no_order or _is_alike(place)
        call.require(keeps_alike, "overwrites rows that are not yet assigned to examples")
    return place


def _is_alike(place: Any) -> bool:
    return any(result_place.inner == ALIKE for result_place in list_places(place))


def _find_place_of_item(node: Node, places: Places) -> Any:
    """Return where the examples are in one of the results of an operation."""
    results: Any
    index: Any
    results, index = node.args
    place = places.get(results)
    if place is None or isinstance(place, Place):
        return place
    return place[index]


def _holds_none(call: Call) -> bool:
    """Return True for a call that neither reads nor returns examples."""
    reads_values = call.kind not in CONSTANTS  # `x.new_zeros(4)` only takes the type of x
    takes_examples = bool(call.examples) and reads_values
    if takes_examples or any(map(symbolic_dims, call.results)):
        return False
    has_sizes = any(map(is_size, tree_leaves((call.node.args, call.node.kwargs))))
    call.require(not has_sizes or not call.results, "computes with the batch size")
    return True


def _follow_numbering(call: Call) -> None:
    """Record tensors that number the examples; reject any use of them except as an index."""
    if call.kind == "arange":
        call.numbering.add(call.node)
    elif call.kind != "index" and not call.numbering.isdisjoint(call.examples):
        is_harmless = call.kind in OF_INDEX and not call.written
        call.require(is_harmless, USES_POSITION)
        call.numbering.add(call.node)


def _require_consistent(node: Node, place: Any) -> None:
    """Reject a place that the sizes of the results contradict."""
    results = tensors_in(node.meta["val"])
    for result, result_place in zip(results, list_places(place), strict=True):
        dim, factor = batch_dim(result)
        is_whole = factor > 0 and factor % max(1, result_place.inner) == 0
        if dim != result_place.dim or not is_whole:
            raise Alone(f"{name_of(node)} does not keep the batch dimension", node)
