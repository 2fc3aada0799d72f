"""One call of an operation in a recorded program, as rules read it.

Arguments are read by their names in the operation's schema, never by position: `var(x, True)` has
no dimensions, and `max(x, y)` reduces nothing.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._pytree import tree_leaves

STDLIB = sysconfig.get_path("stdlib")
# `inner` of a place whose rows are all equal, or drawn from one distribution: their order does not
# matter.
ALIKE = 0


class Alone(Exception):  # noqa: N818 - a result, not an error
    """Raised if a model's examples must run one at a time; states the operation and the line."""

    def __init__(
        self,
        reason: str,
        node: Node | None = None,
        line: str = "",
        layer: str = "",
    ) -> None:
        if node is not None:
            line = line_of(node)
            layer = module_of(node)
        super().__init__(f"{reason} ({line})" if line else reason)
        self.layer = layer


class Place(NamedTuple):
    """Where the examples are in a tensor.

    Dimension `dim` has outer x B x `inner` rows in row-major order. The rows of one example are
    those with one index in the middle.
    """

    dim: int
    inner: int


Places = dict[Node, Any]  # a `Place`, or a tuple of them for an operation of several results


def list_places(place: Any) -> list[Place]:
    """Return the places in all results of an operation."""
    return [place] if isinstance(place, Place) else list(place)


# ---------------------------------------------------------------------------- what a node calls


def name_of(node: Node) -> str:
    """Return the name of the operation that a node calls, as in `torch.ops.aten`."""
    target: Any = node.target
    if not hasattr(target, "_schema"):
        return str(target.__name__)
    return str(target._schema.name.split("::")[1])


def named_arguments(node: Node) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each argument of an operation, defaults included."""
    target: Any = node.target
    for position, argument in enumerate(target._schema.arguments):
        name = argument.name
        if position < len(node.args):
            yield name, node.args[position]
        elif name in node.kwargs:
            yield name, node.kwargs[name]
        else:
            yield name, argument.default_value if argument.has_default_value() else None


def is_mutable(node: Node) -> bool:
    """Return True if an operation overwrites one of its arguments."""
    target: Any = node.target
    return hasattr(target, "_schema") and bool(target._schema.is_mutable)


def written_by(node: Node) -> list[Node]:
    """Return the arguments that an operation overwrites."""
    target: Any = node.target
    if not hasattr(target, "_schema"):
        return []
    arguments = dict(named_arguments(node))
    written = []
    for argument in target._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += nodes_in(arguments[argument.name])
    return written


def share_memory(node: Node, other: Node) -> bool:
    """Return True if the tensors of two nodes share memory.

    Known if an operation of the program overwrites memory; otherwise, the result is False.
    """
    nothing: frozenset[Any] = frozenset()
    memory: frozenset[Any] = node.meta.get("memory", nothing)
    return not memory.isdisjoint(other.meta.get("memory", nothing))


def is_tensor(node: Node) -> bool:
    """Return True if the value of a node is a tensor."""
    return isinstance(node.meta.get("val"), Tensor)


def rank_of(node: Node) -> int:
    """Return the number of dimensions of a node's tensor."""
    return int(node.meta["val"].dim())


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in a result, which may be nested."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def nodes_in(*values: Any) -> list[Node]:
    """Return the nodes in arguments, which may be nested."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Node)]


def module_of(node: Node) -> str:
    """Return the name of the module whose forward function called an operation."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    name, _ = list(stack.values())[-1]
    return str(name).removeprefix("model").removeprefix(".")


def line_of(node: Node) -> str:
    """Return the user's line that called an operation, as "net.py, line 12: x.sum()"."""
    frames = (node.meta.get("stack_trace") or "").strip().split("File ")
    for frame in reversed(frames):
        position, _, code = frame.partition("\n")
        file, separator, rest = position.partition('", line ')
        file = file.strip('"')
        if separator and is_users(file):
            return show_line(file, rest.partition(",")[0], code)
    return ""


def is_users(file: str) -> bool:
    """Return True for a file of the user's: not of Python, an installed package, or this folder."""
    folder = file.rpartition("/")[0]
    is_in_this_folder = folder.endswith("zdp_bench/gradients/program")
    is_installed = "site-packages" in file or file.startswith((STDLIB, "<"))
    return not is_in_this_folder and not is_installed


def show_line(
    file: str,
    number: Any,
    code: str | None,
) -> str:
    """Format a line of code for a message, as "net.py, line 12: x.sum()"."""
    first_line = (code or "").strip().split("\n")[0].strip()
    name = file.rpartition("/")[2]
    return f"{name}, line {number}: {first_line}"


# ------------------------------------------------------------------ sizes that depend on the batch


def is_size(value: Any) -> bool:
    """Return True for a number that is computed from the batch size B."""
    if isinstance(value, Node):
        value = value.meta.get("val")
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


def symbolic_dims(tensor: Tensor) -> list[int]:
    """Return the dimensions of a tensor whose size depends on B."""
    sizes: Any = tensor.shape
    return [dim for dim, size in enumerate(sizes) if isinstance(size, torch.SymInt)]


def factor_of(size: Any) -> int:
    """Return c if a size is c x B; 0 if it is anything else."""
    expression = size.node.expr
    symbols = list(expression.free_symbols)
    if len(symbols) != 1:
        return 0
    factor, rest = expression.as_coeff_Mul()
    depends_on_values = str(symbols[0]).startswith("u")
    if rest != symbols[0] or depends_on_values:
        return 0
    return int(factor)


def batch_dim(tensor: Tensor) -> tuple[int, int]:
    """Return the only dimension whose size depends on B, and its factor.

    The factor is 0 if there is no such dimension, or more than one.
    """
    dims = symbolic_dims(tensor)
    if len(dims) != 1:
        return 0, 0
    return dims[0], factor_of(tensor.shape[dims[0]])


# ------------------------------------------------------------------------------------- a call


class Call:
    """One call of an operation: its arguments by name, and which of them contain examples.

    Attributes:
        name: the operation's name.
        kind: the name without the underscore of an in-place operation.
        arguments: all arguments by name.
        tensors: the arguments that are tensors.
        examples: the tensors that contain examples.
        written: the arguments that the operation overwrites.
        results: the tensors that it returns.
        numbering: all tensors of the program that number the examples, as `arange(B)` does.
    """

    def __init__(
        self,
        node: Node,
        places: Places,
        numbering: set[Node],
    ) -> None:
        target: Any = node.target
        self.node = node
        self.places = places
        self.numbering = numbering
        self.schema = target._schema
        self.name = name_of(node)
        self.kind = self.name.removesuffix("_") if is_mutable(node) else self.name
        self.arguments = dict(named_arguments(node))
        self.tensors = [leaf for leaf in nodes_in(node.args, node.kwargs) if is_tensor(leaf)]
        self.examples = [tensor for tensor in self.tensors if tensor in places]
        self.written = written_by(node)
        self.results = tensors_in(node.meta.get("val"))

    def require(self, holds: bool, reason: str) -> None:
        """Reject the call if a condition does not hold.

        Raises:
            Alone: the operation's name and the reason, as "sum adds up all examples".
        """
        if not holds:
            raise Alone(f"{self.name} {reason}", self.node)

    def require_no_sizes(self, *allowed: str) -> None:
        """Reject numbers that are computed from B, except in the `allowed` arguments."""
        for name, argument in self.arguments.items():
            has_size = any(map(is_size, tree_leaves(argument)))
            is_allowed = name in allowed
            self.require(is_allowed or not has_size, "computes with the batch size")

    def get(self, *names: str) -> Any:
        """Return the first of these arguments that is not None, or None."""
        for name in names:
            value = self.arguments.get(name)
            if value is not None:
                return value
        return None

    def holds_examples(self, argument: Any) -> bool:
        """Return True for an argument that contains examples."""
        return argument in self.examples

    def place(self, node: Node) -> Place:
        """Return where the examples are in an argument."""
        place: Place = self.places[node]
        return place

    def dim(self, node: Node) -> int:
        """Return the dimension of the examples in an argument."""
        return self.place(node).dim

    def chosen_dim(self, node: Node) -> int:
        """Return the dimension that the call's `dim` selects, counted from the left."""
        return count_dim(self.arguments["dim"], rank_of(node))

    def factor(self, node: Node) -> int:
        """Return the number of rows per example in an argument's dimension of examples."""
        shape = node.meta["val"].shape
        return factor_of(shape[self.dim(node)])

    @property
    def first(self) -> Node:
        """The first argument, which must be the only one that contains examples."""
        self.require(len(set(self.examples)) == 1, "takes examples in more than one argument")
        first = next(iter(self.arguments.values()))
        self.require(first is self.examples[0], "does not take the examples as its first argument")
        return self.examples[0]

    @property
    def common_dim(self) -> int:
        """The dimension of the examples, which must be the same in all arguments."""
        dims = {self.dim(node) for node in self.examples}
        self.require(len(dims) == 1, "combines tensors with different batch dimensions")
        return dims.pop()

    @property
    def inner(self) -> int:
        """`inner` of all arguments that hold examples."""
        orders = {self.place(node).inner for node in self.examples} - {ALIKE}
        self.require(len(orders) <= 1, "combines examples in different orders")
        return orders.pop() if orders else ALIKE


def count_dim(dim: Any, rank: int) -> int:
    """Return a dimension counted from the left."""
    return int(dim) % max(1, rank)


def count_dims(dims: Any, rank: int) -> set[int]:
    """Return one or several dimensions, counted from the left."""
    dim_list = dims if isinstance(dims, list | tuple) else [dims]
    return {count_dim(dim, rank) for dim in dim_list}
