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
# `inner` of a place whose rows are all alike, or drawn alike: any order of them is right.
ALIKE = 0


class Alone(Exception):  # noqa: N818 - it is an answer
    """The examples of a model must be run one at a time; states the operation and the line."""

    def __init__(
        self, reason: str, node: Node | None = None, line: str = "", layer: str = ""
    ) -> None:
        if node is not None:
            line = line or line_of(node)
            layer = layer or module_of(node)
        super().__init__(f"{reason} ({line})" if line else reason)
        self.layer = layer


class Place(NamedTuple):
    """Where the examples are in a tensor.

    Dimension `dim` has o x B x `inner` numbers, in row-major order: those of an example are one
    index of the middle.
    """

    dim: int
    inner: int


Places = dict[Node, Any]  # a `Place`, or a tuple of them for an operation of several results


def places_of(found: Any) -> list[Place]:
    """Return the places of all results of an operation."""
    return [found] if isinstance(found, Place) else list(found)


# ---------------------------------------------------------------------------- what a node calls


def name_of(node: Node) -> str:
    """Return the name of the operation that a node calls, as in `torch.ops.aten`."""
    target: Any = node.target
    if not hasattr(target, "_schema"):
        return str(target.__name__)
    return str(target._schema.name.split("::")[1])


def named_arguments(node: Node) -> Iterator[tuple[str, Any]]:
    """Yield an operation's arguments with their names, and its defaults."""
    target: Any = node.target
    for position, argument in enumerate(target._schema.arguments):
        if position < len(node.args):
            yield argument.name, node.args[position]
        elif argument.name in node.kwargs:
            yield argument.name, node.kwargs[argument.name]
        else:
            yield argument.name, argument.default_value if argument.has_default_value() else None


def is_mutable(node: Node) -> bool:
    """True for an operation that writes over one of its arguments."""
    target: Any = node.target
    return hasattr(target, "_schema") and bool(target._schema.is_mutable)


def is_tensor(node: Node) -> bool:
    """True if a node stands for a tensor."""
    return isinstance(node.meta.get("val"), Tensor)


def rank_of(node: Node) -> int:
    """Return how many dimensions the tensor of a node has."""
    return int(node.meta["val"].dim())


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of a result, nested or not."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def nodes_in(*values: Any) -> list[Node]:
    """Return the nodes in arguments, nested or not."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Node)]


def written_by(node: Node) -> list[Node]:
    """Return the arguments that an operation writes."""
    arguments = dict(named_arguments(node))
    target: Any = node.target
    written = []
    for argument in target._schema.arguments:
        alias = argument.alias_info
        if alias is not None and alias.is_write:
            written += nodes_in(arguments[argument.name])
    return written


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
        place, _, code = frame.partition("\n")
        file, separator, rest = place.partition('", line ')
        file = file.strip('"')
        if separator and is_users(file):
            return show_line(file, rest.partition(",")[0], code)
    return ""


def is_users(file: str) -> bool:
    """True for a file that is neither Python's, nor of an installed package, nor of this one."""
    here = file.rpartition("/")[0].endswith("zdp_bench/gradients/program")
    return not (here or "site-packages" in file or file.startswith((STDLIB, "<")))


def show_line(file: str, number: Any, code: str | None) -> str:
    """Return a line for a sentence."""
    code = (code or "").strip().split("\n")[0].strip()
    return f"{file.rpartition('/')[2]}, line {number}: {code}"


# ------------------------------------------------------------------ sizes that depend on the batch


def is_size(value: Any) -> bool:
    """True for a number that is computed from the number of examples."""
    if isinstance(value, Node):
        value = value.meta.get("val")
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


def symbolic_dims(value: Any) -> list[int]:
    """Return the dimensions of a tensor whose size depends on the number of examples."""
    return [dim for dim, size in enumerate(value.shape) if isinstance(size, torch.SymInt)]


def factor_of(size: Any) -> int:
    """Return c of a size of c x B; 0 if it is anything else."""
    expression = size.node.expr
    symbols = list(expression.free_symbols)
    if len(symbols) != 1:
        return 0
    factor, rest = expression.as_coeff_Mul()
    by_values = str(symbols[0]).startswith("u")
    return int(factor) if rest == symbols[0] and not by_values else 0


# ------------------------------------------------------------------------------------- a call


class Call:
    """One call of an operation: its arguments by name, and which of them hold examples.

    Attributes:
        kind: the operation's name; that of the one which makes a new tensor, if it writes.
        held: the arguments that hold examples.
        own: all tensors that number the examples.
        written: the arguments that the operation writes.
    """

    def __init__(self, node: Node, places: Places, own: set[Node]) -> None:
        target: Any = node.target
        self.node, self.places, self.own = node, places, own
        self.schema = target._schema
        self.name = name_of(node)
        self.kind = self.name
        if self.schema.is_mutable:
            self.kind = self.name.removesuffix("_")
        self.arguments = dict(named_arguments(node))
        self.tensors = [leaf for leaf in nodes_in(node.args, node.kwargs) if is_tensor(leaf)]
        self.held = [leaf for leaf in self.tensors if leaf in places]
        self.value = node.meta.get("val")
        self.results = tensors_in(self.value)
        self.written = written_by(node)

    def need(self, holds: bool, why: str) -> None:
        """Reject the call if a condition does not hold."""
        if not holds:
            raise Alone(f"{self.name} {why}", self.node)

    def need_no_sizes(self, allowed: frozenset[str]) -> None:
        """Reject numbers that are computed from how many examples there are."""
        for name, argument in self.arguments.items():
            has_size = any(map(is_size, tree_leaves(argument)))
            self.need(not has_size or name in allowed, "computes with the number of examples")

    def get(self, *names: str) -> Any:
        """Return the first argument of these names that is given; None if none is."""
        values = [self.arguments.get(name) for name in names]
        return next((value for value in values if value is not None), None)

    def place(self, node: Node) -> Place:
        place: Place = self.places[node]
        return place

    def dim(self, node: Node) -> int:
        """Return the dimension of the examples in an argument."""
        return self.place(node).dim

    def chosen_dim(self, node: Node) -> int:
        """Return the dimension of an argument that the call names as `dim`."""
        return int(self.arguments["dim"]) % max(1, self.rank(node))

    def rank(self, node: Node) -> int:
        """Return how many dimensions an argument has."""
        return int(node.meta["val"].dim())

    def factor(self, node: Node) -> int:
        """Return how many rows of its dimension of examples an argument has for each of them."""
        shape = node.meta["val"].shape
        return factor_of(shape[self.dim(node)])

    @property
    def result(self) -> Tensor:
        """The only result."""
        return self.results[0]

    @property
    def first(self) -> Node:
        """The first argument, which must hold the examples; no other may."""
        self.need(len(set(self.held)) == 1, "is given another tensor of examples")
        first = next(iter(self.arguments.values()))
        self.need(first is self.held[0], "takes its examples elsewhere")
        return self.held[0]

    @property
    def inner(self) -> int:
        """`inner` of all arguments that hold examples."""
        orders = {self.place(node).inner for node in self.held} - {ALIKE}
        self.need(len(orders) <= 1, "combines examples in different orders")
        return orders.pop() if orders else ALIKE

    def dims(self, value: Any, rank: int) -> set[int]:
        """Return dimensions, one or several, counted from the left."""
        every = value if isinstance(value, list | tuple) else [value]
        return {int(dim) % max(1, rank) for dim in every}
