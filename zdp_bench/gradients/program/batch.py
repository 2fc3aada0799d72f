"""Where the examples are in every tensor of a recorded program, or why they cannot be told apart.

`check` walks the operations once. Each tensor that holds examples has a `Place`. A rule (`rules`)
says of every operation that is known where the examples of its result are; an operation that is not
known, or whose call lets two examples meet, raises `Alone`. Nothing is run, and no value is looked
at.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves

from zdp_bench.gradients.program.calls import (
    Alone,
    Call,
    Place,
    Places,
    factor_of,
    is_size,
    name_of,
    nodes_in,
    places_of,
    symbolic_dims,
    tensors_in,
)
from zdp_bench.gradients.program.rules import NONE
from zdp_bench.gradients.program.table import CONSTANTS, IN_PLACE, OF_INDEX, RULES, SIZED

SHAPE_QUERIES = {"sym_size", "sym_numel", "sym_stride", "sym_storage_offset"}


def check(graph: Graph, inputs: set[Node]) -> Places:
    """Return where the examples are in each tensor of a program.

    Args:
        inputs: the placeholders that hold the examples, first dimension first.

    Formal guarantee: in every operation, the numbers of one example in the results follow from its
    own numbers in the arguments and from what holds no examples, whatever the values are and
    however many examples there are.

    Raises:
        Alone: an operation is not known to do so.
    """
    places: Places = dict.fromkeys(inputs, Place(0, 1))
    own: set[Node] = set()  # what numbers the examples: `arange(B)`
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        found = _place_of(node, places, own)
        if found is not None:
            places[node] = found
            _require_consistent(node, found)
    for output in tree_leaves(graph.output_node().args):
        if not isinstance(output, Node) or places.get(output) != Place(0, 1) or output in own:
            raise Alone("the output does not have one row for each example", output)
    return places


def _place_of(node: Node, places: Places, own: set[Node]) -> Any:
    """Return where the examples are after one operation; None if it holds none."""
    if name_of(node) == "getitem":
        return _place_of_item(node, places)
    if not hasattr(node.target, "_schema"):  # arithmetic of sizes
        if any(leaf in places for leaf in nodes_in(node.args, node.kwargs)):
            raise Alone(f"{name_of(node)} is not known to keep examples apart", node)
        return None
    call = Call(node, places, own)
    if call.kind in SHAPE_QUERIES:
        return None
    if any(written.op == "placeholder" and written not in places for written in call.written):
        raise Alone("the model changes its parameters or buffers in its forward pass", node)
    if _holds_none(call):
        return None
    call.need(call.schema.name.startswith(("aten::", "zdp_bench::")), "is an operator of its own")
    call.need(call.kind in RULES, "is not known to keep examples apart")
    call.need_no_sizes(SIZED.get(call.kind, NONE))
    _follow_index(call)
    may_write = not call.written or call.kind in IN_PLACE
    call.need(may_write, "is not known to keep examples apart in place")
    place = RULES[call.kind](call)
    for argument in call.written:
        call.need(places.get(argument) == place, "writes examples to another place")
    return place


def _place_of_item(node: Node, places: Places) -> Any:
    source: Any = node.args[0]
    number: Any = node.args[1]
    if source not in places:
        return None
    found = places[source]
    return found if isinstance(found, Place) else found[number]


def _holds_none(call: Call) -> bool:
    """True for a call that neither takes nor makes a tensor of examples."""
    reads_shape = call.kind in CONSTANTS  # `x.new_zeros(4)` takes the type of `x`, and no number
    if any(map(symbolic_dims, call.results)) or (call.held and not reads_shape):
        return False
    sizes = any(map(is_size, tree_leaves((call.node.args, call.node.kwargs))))
    call.need(not sizes or not call.results, "computes with the number of examples")
    return True


def _follow_index(call: Call) -> None:
    """Note what numbers the examples; reject what does more with it than to index."""
    if call.kind == "arange":
        call.own.add(call.node)
    elif call.kind != "index" and any(argument in call.own for argument in call.held):
        call.need(call.kind in OF_INDEX and not call.written, "numbers the examples")
        call.own.add(call.node)


def _require_consistent(node: Node, found: Any) -> None:
    """Reject a place that the sizes of the results contradict."""
    for value, place in zip(tensors_in(node.meta["val"]), places_of(found), strict=True):
        dims = symbolic_dims(value)
        factor = factor_of(value.shape[dims[0]]) if len(dims) == 1 else 0
        whole = factor % max(1, place.inner) == 0
        if dims != [place.dim] or not factor or not whole:
            raise Alone(f"{name_of(node)} does not keep the dimension of the examples", node)
