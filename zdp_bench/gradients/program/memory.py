"""Which tensors of a program share memory, and what that means for operations that overwrite it.

Schemas do not tell: `dropout(x, 0.0)` returns x itself, `einsum` may return a view, and
`contiguous` may do so for one example only, or for inputs in channels-last memory. The program is
therefore run on several examples and on one, in both memory formats, and the memory of its tensors
is compared.

`x.mul_(y)` becomes `x.mul(y)` if nothing reads x's memory later in another way, so that a parameter
y, or x itself if it is computed from parameters, can have per-example gradients. The result must
also have x's strides, because they decide whether a later operation copies or returns a view.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Interpreter, Node

from zdp_bench.errors import first_line
from zdp_bench.gradients.parts import clone_contiguous, leaves_of, map_leaves
from zdp_bench.gradients.program.calls import (
    Alone,
    is_mutable,
    name_of,
    nodes_in,
    share_memory,
    symbolic_dims,
    tensors_in,
    written_by,
)
from zdp_bench.gradients.program.copies import copy_apart
from zdp_bench.gradients.program.graphs import bind, leaf_names, plain_graph
from zdp_bench.gradients.program.record import Recorded
from zdp_bench.nn.precision import forward_precision

aten = torch.ops.aten

# Operations that read the shape of a tensor, not its values.
SHAPE_QUERIES = {"sym_size", "sym_numel", "sym_stride", "sym_storage_offset"}


def resolve_writes(
    recorded: Recorded,
    model: nn.Module,
    batches: Sequence[Tensor],
) -> None:
    """Replace operations that overwrite memory, where the replacement computes the same.

    Afterwards, each node of a graph that still overwrites memory has `meta["memory"]`.

    Args:
        recorded: the program, whose graph is changed.
        model: the model, which is not changed.
        batches: inputs of several examples, and of one, in the memory format that the model gets.
            The program runs on contiguous ones.

    Raises:
        Alone: the program would overwrite other tensors than the model does.
    """
    nodes = list(recorded.graph.nodes)
    if not any(map(is_mutable, nodes)):
        return
    runs = [map_leaves(clone_contiguous, inputs) for inputs in batches]
    if not all(leaf.is_contiguous() for leaf in leaves_of(batches[0])):
        runs += batches
    for number, inputs in enumerate(runs):
        _note_memory(recorded, model, inputs, number)
    for position, node in enumerate(nodes):
        if is_mutable(node):
            _resolve(node, nodes[:position], set(nodes[position + 1 :]))
    recorded.graph.lint()


class _Observer(Interpreter):
    """Runs a program and keeps all results, so that no two tensors get the same memory."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.results: dict[str, list[Tensor]] = {}
        self.trained: dict[str, bool] = {}
        self.keeps_strides: dict[str, bool] = {}

    def run_node(self, node: Node) -> Any:
        if is_mutable(node):
            self.keeps_strides[node.name] = self._keeps_strides(node)
        result = super().run_node(node)
        self.results[node.name] = tensors_in(result)
        self.trained[node.name] = any(leaf.requires_grad for leaf in tensors_in(result))
        return result

    def _keeps_strides(self, node: Node) -> bool:
        """Return True if the out-of-place variant of an operation has the strides of its tensor."""
        functional = _functional_of(node)
        arguments, keywords = self.fetch_args_kwargs_from_env(node)
        if functional is None or not isinstance(arguments[0], Tensor):
            return False
        with torch.no_grad():
            result = functional(*arguments, **keywords)
        return _strides_of(result) == _strides_of(arguments[0])


def _note_memory(recorded: Recorded, model: nn.Module, inputs: Tensor, number: int) -> None:
    """Run the program, and add the memory of each node's tensors to its `meta`.

    Args:
        recorded, model: as in `resolve_writes`.
        inputs: inputs of the program.
        number: number of this run, which tells its memory from that of other runs.
    """
    twin = copy_apart(model)
    arguments = bind(recorded, leaf_names(recorded.graph), twin, map_leaves(torch.clone, inputs))
    for position, source in enumerate(recorded.sources.values()):
        if source.kind == "constant":
            arguments[position] = arguments[position].clone()
    observer = _Observer(plain_graph(recorded))
    try:
        with forward_precision(twin), torch.enable_grad():
            observer.run(*arguments)
    except Exception as error:
        count = len(inputs)
        raise Alone(f"the program fails for a batch size of {count}: {first_line(error)}") from None
    for node in recorded.graph.nodes:
        results = observer.results.get(node.name, [])
        memory = {(number, leaf.untyped_storage()._cdata) for leaf in results}
        node.meta["memory"] = node.meta.get("memory", frozenset()) | memory
        node.meta["trained"] = observer.trained.get(node.name, False)
        keeps_strides = observer.keeps_strides.get(node.name, False)
        node.meta["keeps_strides"] = node.meta.get("keeps_strides", True) and keeps_strides


def _resolve(
    node: Node,
    earlier: list[Node],
    later: set[Node],
) -> None:
    """Replace an operation that overwrites memory, if the replacement computes the same.

    Raises:
        Alone: it overwrites other tensors in the program than in the model.
    """
    for written in written_by(node):
        sharing = [other for other in earlier if share_memory(other, written)]
        _require_recorded_gradient(node, sharing)
        same = _versions_of(written)
        others = [other for other in sharing if other not in same and _is_read(other, later)]
        if any(_shares_sometimes(other, written) for other in others):
            raise Alone(
                f"{name_of(node)} overwrites other tensors if there is one example, or if inputs "
                "have another memory format",
                node,
            )
        functional = _out_of_place(node)
        if others or functional is None or written is not node.args[0]:
            continue
        node.target = functional
        for version in same:
            version.replace_all_uses_with(node, delete_user_cb=lambda user: user in later)


def _require_recorded_gradient(node: Node, sharing: list[Node]) -> None:
    """Reject an operation in `torch.no_grad()` that overwrites a tensor from outside of it.

    Autograd does not see it in the model, but would see it in the program.
    """
    if not node.meta.get("frozen"):
        return
    for other in sharing:
        if other.meta["trained"] and not other.meta.get("frozen"):
            raise Alone(f"{name_of(node)} overwrites a tensor without recording gradients", node)


def _versions_of(written: Node) -> list[Node]:
    """Return the nodes that stand for the same tensor: itself, and before earlier changes."""
    versions = [written]
    while len(overwritten := written_by(versions[-1])) == 1:
        versions += overwritten
    return versions


def _is_read(node: Node, later: set[Node]) -> bool:
    """Return True if a later operation reads the values of a node."""
    readers = [user for user in node.users if user in later]
    return any(reader.op == "output" or name_of(reader) not in SHAPE_QUERIES for reader in readers)


def _shares_sometimes(node: Node, other: Node) -> bool:
    """Return True if two nodes share memory in some runs only."""
    runs = {number for number, _ in node.meta["memory"]}
    runs_of_shared = {number for number, _ in node.meta["memory"] & other.meta["memory"]}
    return runs != runs_of_shared


def _out_of_place(node: Node) -> Any:
    """Return the out-of-place variant of an operation, or None if there is no need for it.

    The variant must have the same arguments, and the result must have the type of the tensor.
    """
    written, *others = node.args
    if not isinstance(written, Node) or _versions_of(written)[-1].op == "placeholder":
        return None
    if not node.meta["keeps_strides"]:
        return None
    value = written.meta["val"]
    operands = [operand.meta["val"] for operand in nodes_in(others, node.kwargs)]
    tensors = [operand for operand in operands if isinstance(operand, Tensor)]
    is_computed_weight = written.meta["trained"] and not symbolic_dims(value)
    if not tensors and not is_computed_weight:
        return None
    if any(operand.dtype != value.dtype for operand in tensors):
        return None
    return _functional_of(node)


def _functional_of(node: Node) -> Any:
    """Return the out-of-place variant of an operation with the same arguments, or None."""
    target: Any = node.target
    name = name_of(node).removesuffix("_")
    if name == "copy":
        return None  # autograd has no derivative of it
    functional = getattr(getattr(aten, name, None), target._overloadname, None)
    if functional is None or functional._schema.is_mutable:
        return None
    if _parameters_of(functional) != _parameters_of(target):
        return None
    return functional


def _strides_of(tensor: Tensor) -> list[int]:
    """Return the strides of a tensor's dimensions that have several entries."""
    dimensions = zip(tensor.shape, tensor.stride(), strict=True)
    return [stride for size, stride in dimensions if size > 1]


def _parameters_of(operation: Any) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in operation._schema.arguments]
