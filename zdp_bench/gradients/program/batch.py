"""Where the examples are in every tensor of a recorded program, or why they cannot be told apart.

`check` walks the operations once. Each tensor that holds examples has a `Place`. `RULES` says of
every operation that is known where the examples of its result are; an operation that is not known,
or whose call lets two examples meet, raises `Alone`. Nothing is run, and no value is looked at.

Arguments are read by their names in the operation's schema, never by position: `var(x, True)` has
no dimensions, and `max(x, y)` reduces nothing.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterator
from math import prod
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves

STDLIB = sysconfig.get_path("stdlib")
TRIAL = 7  # a number of examples that views are tried with


class Alone(Exception):  # noqa: N818 - it is an answer
    """The examples of a model must be run one at a time; states the operation and the line."""

    def __init__(
        self, reason: str, node: Node | None = None, line: str = "", layer: str = ""
    ) -> None:
        line = line or ("" if node is None else line_of(node))
        super().__init__(f"{reason} ({line})" if line else reason)
        self.layer = layer or ("" if node is None else module_of(node))


class Place(NamedTuple):
    """Where the examples are in a tensor.

    Dimension `dim` has o x B x `inner` numbers, in row-major order: those of an example are one
    index of the middle.
    """

    dim: int
    inner: int


Places = dict[Node, Any]  # a `Place`, or a tuple of them for an operation of several results


# ------------------------------------------------------------------------------ a call in a program


def name_of(node: Node) -> str:
    """Return the name of the operation that a node calls, as in `torch.ops.aten`."""
    target: Any = node.target
    return target._schema.name.split("::")[1] if hasattr(target, "_schema") else target.__name__


def line_of(node: Node) -> str:
    """Return the user's line that called an operation, as "net.py, line 12: x.sum()"."""
    frames = (node.meta.get("stack_trace") or "").strip().split("File ")
    own = [f for f in frames if ", line " in f and is_users(f.partition('", line ')[0].strip('"'))]
    if not own:
        return ""
    place, _, code = own[-1].partition("\n")
    file, line = place.split(", in ")[0].rsplit(", ", 1)
    return show_line(file.strip('"'), line.removeprefix("line "), code)


def is_users(file: str) -> bool:
    """True for a file that is neither Python's, nor of an installed package, nor of this one."""
    here = file.rpartition("/")[0].endswith("zdp_bench/gradients/program")
    return not (here or "site-packages" in file or file.startswith((STDLIB, "<")))


def show_line(file: str, number: Any, code: str | None) -> str:
    code = (code or "").strip().split("\n")[0].strip()
    return f"{file.rpartition('/')[2]}, line {number}: {code}"


def module_of(node: Node) -> str:
    """Return the name of the module whose forward function called an operation."""
    stack = list((node.meta.get("nn_module_stack") or {"": ("", None)}).values())
    return str(stack[-1][0]).removeprefix("model").removeprefix(".")


def holds_tensor(node: Any) -> bool:
    return isinstance(node, Node) and isinstance(node.meta.get("val"), Tensor)


def is_size(node: Any) -> bool:
    """True for a number that is computed from the number of examples."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


def symbolic_dims(value: Any) -> list[int]:
    """Return the dimensions of a tensor whose size depends on the number of examples."""
    return [dim for dim, size in enumerate(value.shape) if isinstance(size, torch.SymInt)]


def factor_of(size: Any) -> int:
    """Return c of a size of c x B; 0 if it is anything else."""
    expression = size.node.expr
    symbols = list(expression.free_symbols)
    factor, rest = expression.as_coeff_Mul()
    if len(symbols) != 1 or rest != symbols[0] or str(symbols[0]).startswith("u"):
        return 0
    return int(factor)


def at_trial(value: Any) -> Any:
    """Return a size, or a list of sizes, with `TRIAL` examples."""
    if isinstance(value, Node):
        value = value.meta["val"]
    if isinstance(value, list | tuple):
        return [at_trial(part) for part in value]
    if isinstance(value, torch.SymInt):
        expression = value.node.expr
        return int(expression.subs(dict.fromkeys(expression.free_symbols, TRIAL)))
    return value


class Call:
    """One call of an operation: its arguments by name, and which of them hold examples."""

    def __init__(self, node: Node, places: Places) -> None:
        self.node, self.places = node, places
        target: Any = node.target
        self.schema = target._schema
        self.kind = name_of(node)
        self.arguments = dict(named_arguments(node))
        leaves = [leaf for leaf in tree_leaves((node.args, node.kwargs)) if isinstance(leaf, Node)]
        self.tensors = [leaf for leaf in leaves if holds_tensor(leaf)]
        self.held = [leaf for leaf in self.tensors if leaf in places]
        self.value = node.meta.get("val")
        self.own: set[Node] = set()  # those that number the examples

    def fail(self, why: str) -> Alone:
        return Alone(f"{self.kind} {why}", self.node)

    def need(self, holds: bool, why: str) -> None:
        if not holds:
            raise self.fail(why)

    def get(self, *names: str, default: Any = None) -> Any:
        """Return the argument of one of these names."""
        for name in names:
            if name in self.arguments:
                value = self.arguments[name]
                return default if value is None else value
        return default

    @property
    def first(self) -> Node:
        """The first argument, which must hold the examples; no other may."""
        node = self.only("another tensor of examples")
        self.need(node is next(iter(self.arguments.values())), "takes its examples elsewhere")
        return node

    def only(self, why: str) -> Node:
        """The one argument that holds examples."""
        self.need(len(set(self.held)) == 1, f"takes {why}")
        return self.held[0]

    def place(self, node: Node) -> Place:
        return self.places[node]

    def rank(self, node: Node) -> int:
        return node.meta["val"].dim()

    def result(self, number: int = 0) -> Tensor:
        values = [value for value in tree_leaves(self.value) if isinstance(value, Tensor)]
        return values[number]

    def require_no_sizes(self, *allowed: str) -> None:
        """Reject numbers that are computed from how many examples there are."""
        for name, argument in self.arguments.items():
            sizes = any(is_size(leaf) for leaf in tree_leaves(argument))
            self.need(not sizes or name in allowed, "computes with the number of examples")

    def aligned(self, from_left: bool = False) -> Place:
        """Return the common place of all arguments that hold examples.

        Dimensions are counted as torch broadcasts, from the right: the last is -1.
        """
        return self.aligned_of(self.held, from_left)

    def aligned_of(self, nodes: list[Node], from_left: bool = False) -> Place:
        """Return the common place of some of the arguments."""
        found = set()
        for node in nodes:
            dim, inner = self.place(node)
            found.add(Place(dim if from_left else dim - self.rank(node), inner))
        self.need(len(found) == 1, "combines examples at different places")
        return found.pop()

    def from_right(self, node: Node) -> int | None:
        return self.place(node).dim - self.rank(node) if node in self.places else None

    def operands(self) -> tuple[Node, Node]:
        """Return the two factors of a matrix product."""
        if self.kind == "addmm":
            return self.get("mat1"), self.get("mat2")
        if self.kind == "baddbmm":
            return self.get("batch1"), self.get("batch2")
        return self.get("self"), self.get("other", "mat2")

    def is_own(self, node: Node) -> bool:
        """True if a tensor is `arange(B)`."""
        return node in self.own

    def dims(self, value: Any, rank: int) -> set[int]:
        every = value if isinstance(value, list | tuple) else [value]
        return {int(dim) % rank for dim in every}


def named_arguments(node: Node) -> Iterator[tuple[str, Any]]:
    """Yield an operation's arguments with their names, and its defaults."""
    target: Any = node.target
    for at, argument in enumerate(target._schema.arguments):
        if at < len(node.args):
            yield argument.name, node.args[at]
        elif argument.name in node.kwargs:
            yield argument.name, node.kwargs[argument.name]
        else:
            yield argument.name, argument.default_value if argument.has_default_value() else None


# ------------------------------------------------------------------------------- the rules, by kind


def by_number(call: Call) -> Place:
    """Each number of the result follows from the numbers at its own place."""
    call.require_no_sizes()
    place = call.aligned()
    return Place(place.dim + call.result().dim(), place.inner)


def like_first(call: Call) -> Place:
    """Its result has the shape of its first argument, whose numbers it does not read."""
    return call.place(call.first)


def over_dims(call: Call) -> Place:
    """It reduces dimensions: none of them may be the batch's, and without a list all are."""
    if call.get("other") is not None:
        return by_number(call)
    call.require_no_sizes()
    rank = call.rank(call.held[0])
    call.need(all(call.rank(node) == rank for node in call.tensors), "broadcasts what it reduces")
    place = call.aligned()
    dim, over = place.dim + rank, call.get("dim")
    call.need(over is not None and over != [] and rank > 0, "reduces all dimensions")
    gone = call.dims(over, rank)
    call.need(dim not in gone, "reduces the dimension of the examples")
    if call.result().dim() < rank:
        dim -= sum(other < dim for other in gone)
    return Place(dim, place.inner)


def along_dims(call: Call) -> Place:
    """It mixes or moves the numbers along dimensions, which stay."""
    call.require_no_sizes()
    node = call.first
    place, rank = call.place(node), call.rank(node)
    default = -1 if call.kind in LAST else None
    along = call.get("dim", "dims", default=default)
    if call.kind.startswith("fft_"):
        along = _transformed(call, rank)
    call.need(along is not None and along != [], "mixes all dimensions")
    call.need(place.dim not in call.dims(along, rank), "mixes the dimension of the examples")
    return place


def _transformed(call: Call, rank: int) -> Any:
    """Return the dimensions of a Fourier transform."""
    dims, sizes = call.get("dim"), call.get("s")
    if dims is None and sizes is not None:
        dims = [*range(-len(sizes), 0)]
    return [*range(rank)] if dims is None else [*dims] if isinstance(dims, list | tuple) else dims


def in_last(number: int) -> Callable[[Call], Place]:
    """It works on the last dimensions of its first argument."""

    def rule(call: Call) -> Place:
        call.require_no_sizes()
        node = call.first
        place, rank = call.place(node), call.rank(node)
        call.need(place.dim < rank - number, "works along the dimension of the examples")
        return place

    return rule


def in_rows(*ranks: int) -> Callable[[Call], Place]:
    """It takes the rows of dimension 0 apart, if its first argument has one of these ranks."""

    def rule(call: Call) -> Place:
        call.require_no_sizes()
        node = call.first
        place, rank = call.place(node), call.rank(node)
        batched = not ranks or rank in ranks
        call.need(batched and place.dim == 0, "does not have the examples in its first dimension")
        return place

    return rule


def all_in_rows(call: Call) -> Place:
    """As `in_rows`, of several arguments."""
    call.require_no_sizes()
    place = call.aligned(from_left=True)
    call.need(place.dim == 0, "does not have the examples in its first dimension")
    return place


def padded(call: Call) -> Place:
    node = call.first
    call.require_no_sizes()
    place, rank = call.place(node), call.rank(node)
    call.need(place.dim < rank - len(call.get("pad")) // 2, "pads the dimension of the examples")
    return place


def batch_norm(call: Call) -> Place:
    call.need(call.get("training") is False, "takes its statistics from all examples")
    return in_rows()(call)


def instance_norm(call: Call) -> Place:
    call.need(call.get("use_input_stats") is True, "uses running statistics")
    call.need(call.get("running_mean") is None, "keeps statistics of the examples")
    return in_rows()(call)


def normalised(call: Call) -> Place:
    return in_last(len(call.get("normalized_shape")))(call)


def view(call: Call) -> Place:
    """A view without arithmetic: of a trial's memory, the same rows must be found in the result."""
    call.require_no_sizes()  # such as an index that depends on how many examples there are
    node = call.first
    place, value = call.place(node), node.meta["val"]
    shape = at_trial(list(value.shape))
    tried = torch.empty(shape, device="meta")
    arguments = {name: at_trial(value) for name, value in call.arguments.items()}
    arguments[next(iter(arguments))] = tried
    if call.kind == "squeeze":  # of one example the batch's dimension would go too
        dims = call.get("dim", default=[dim for dim, size in enumerate(shape) if size == 1])
        call.need(place.dim not in call.dims(dims, len(shape)), "squeezes out a single example")
    result = _call_by_name(call.node.target, arguments)
    results = [result] if isinstance(result, Tensor) else list(result)
    wanted = shape[place.dim], tried.stride(place.dim)
    dims = set()
    for one in results:
        layout = list(zip(one.shape, one.stride(), strict=True))
        call.need(layout.count(wanted) == 1, "takes the dimension of the examples apart")
        dims.add(layout.index(wanted))
    call.need(len(dims) == 1, "takes the dimension of the examples apart")
    return Place(dims.pop(), place.inner)


def _call_by_name(target: Any, arguments: dict[str, Any]) -> Any:
    names = [(one.name, one.kwarg_only) for one in target._schema.arguments]
    positional = [arguments[name] for name, by_name in names if not by_name]
    return target(*positional, **{name: arguments[name] for name, by_name in names if by_name})


def reshaped(call: Call) -> Place:
    """The order of all numbers stays, and with it how many follow between two examples."""
    call.require_no_sizes("size", "shape", "sizes")
    call.need("dtype" not in call.arguments, "reads the numbers as those of another type")
    source = next(iter(call.arguments.values()))
    call.need(source in call.places, "takes its examples elsewhere")
    place, before, after = call.place(source), source.meta["val"].shape, call.result().shape
    dims = symbolic_dims(call.result())
    call.need(len(dims) == 1, "splits the dimension of the examples")
    factor = factor_of(after[dims[0]])
    between = place.inner * prod(before[place.dim + 1 :])
    behind = prod(after[dims[0] + 1 :])
    fits = factor and behind and between % behind == 0 and factor % (between // behind) == 0
    call.need(bool(fits), "moves numbers between examples")
    return Place(dims[0], between // behind)


def repeated(call: Call) -> Place:
    if not call.held:
        return constant(call)
    call.require_no_sizes()
    node = call.first
    place, rank = call.place(node), call.rank(node)
    return Place(place.dim + call.result().dim() - rank, place.inner)


def repeated_in_place(call: Call) -> Place:
    call.require_no_sizes()
    node = call.first
    place, rank, dim = call.place(node), call.rank(node), call.get("dim")
    call.need(dim is not None, "flattens the examples")
    call.need(isinstance(call.get("repeats"), int), "repeats each row as often as a tensor says")
    if dim % rank != place.dim:
        return place
    return Place(place.dim, place.inner * call.get("repeats"))


def joined(call: Call) -> Place:
    call.require_no_sizes()
    others = [node for node in call.tensors if node not in call.places]
    none = all(node.meta["val"].shape == (0,) for node in others)  # a cache before its first word
    call.need(none, "joins examples with what is none")
    place = call.aligned(from_left=True)
    along = call.get("dim", default=0) % call.result().dim()
    if call.kind == "stack":
        return Place(place.dim + (along <= place.dim), place.inner)
    call.need(along != place.dim, "joins examples in one dimension")
    return place


def product(call: Call) -> Place:
    """A matrix product: no example may be in the dimension that is summed."""
    call.require_no_sizes()
    left, right = call.operands()
    added = call.get("self") if call.kind in ("addmm", "baddbmm") else None
    a, b = (call.from_right(node) for node in (left, right))
    if a is not None and b is not None:
        call.need(a < -2 and b < -2, "multiplies examples with each other")
        end = call.aligned_of([left, right]).dim
    elif a is not None:
        call.need(a != -1, "sums over the examples")
        end = a + (call.rank(right) == 1)
    else:
        assert b is not None
        call.need(b != (-2 if call.rank(right) > 1 else -1), "sums over the examples")
        end = b + (call.rank(left) == 1 and b < -2)
    held = [node for node in (left, right) if node in call.places]
    inner = call.aligned_of(held).inner
    if added in call.places:
        same = call.from_right(added) == end and call.place(added).inner == inner
        call.need(same, "adds examples at another place")
    return Place(end + call.result().dim(), inner)


def linear(call: Call) -> Place:
    call.need(call.held == [call.get("input")], "has a weight of the examples")
    return in_last(1)(call)


def bilinear(call: Call) -> Place:
    call.require_no_sizes()
    inputs = {call.get("input1"), call.get("input2")}
    call.need(set(call.held) <= inputs, "has a weight of the examples")
    place = call.aligned()
    call.need(place.dim < -1, "sums over the examples")
    return Place(place.dim + call.result().dim(), place.inner)


def einsum(call: Call) -> Place:
    """The examples have one letter, in each term that holds them and in the result."""
    call.require_no_sizes()
    nodes = call.get("tensors")
    terms, result = _letters(call, [call.rank(node) for node in nodes])
    pairs = list(zip(terms, nodes, strict=True))
    letters = {term[call.place(node).dim] for term, node in pairs if node in call.places}
    inner = {call.place(node).inner for _, node in pairs if node in call.places}
    call.need(len(letters) == len(inner) == 1, "combines examples at different places")
    letter = letters.pop()
    once = all(term.count(letter) == (node in call.places) for term, node in pairs)
    call.need(once and result.count(letter) == 1, "sums over the examples")
    return Place(result.index(letter), inner.pop())


def _letters(call: Call, ranks: list[int]) -> tuple[list[str], str]:
    """Return an equation's terms and result, with letters in place of dots."""
    left, arrow, result = call.get("equation").replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow:
        once = sorted(letter for letter in set(left) - {",", "."} if left.count(letter) == 1)
        result = ("..." if "..." in left else "") + "".join(once)
    free = [letter for letter in map(chr, range(0x100, 0x200)) if letter.isalpha()]
    widths = [rank - len(term.replace("...", "")) for term, rank in zip(terms, ranks, strict=True)]
    most = max((w for w, term in zip(widths, terms, strict=True) if "..." in term), default=0)
    named = [
        term.replace("...", "".join(free[most - width : most]))
        for term, width in zip(terms, widths, strict=True)
    ]
    return named, result.replace("...", "".join(free[:most]))


def embedding(call: Call) -> Place:
    call.require_no_sizes()
    call.need(call.held == [call.get("indices")], "has a table of the examples")
    call.need(not call.get("scale_grad_by_freq"), "scales gradients by the batch's words")
    return call.place(call.held[0])


def attention(call: Call) -> Place:
    call.require_no_sizes()
    place = call.aligned()
    call.need(place.dim < -2, "lets examples attend to each other")
    return Place(place.dim + call.result().dim(), place.inner)


def recurrent(call: Call) -> tuple[Place, ...]:
    """Its output has the examples where its input has them; states have them second."""
    call.require_no_sizes()
    inputs, states = call.get("input"), tree_leaves(call.get("hx"))
    call.need(inputs in call.places and call.rank(inputs) == 3, "has no batch of sequences")
    batch = 0 if call.get("batch_first") else 1
    place = call.place(inputs)
    call.need(place.dim == batch, "runs along the examples")
    call.need(set(call.held) <= {inputs, *states}, "has a weight of the examples")
    for state in states:
        fits = state in call.places and call.place(state).dim == 1
        same = fits and call.place(state).inner == place.inner
        call.need(same, "has a first state of other examples")
    state = Place(1, place.inner)
    return (place, state, state)


def cell(call: Call) -> Any:
    place = all_in_rows(call)
    return (place, place) if isinstance(call.value, list | tuple) else place


def gathered(call: Call) -> Place:
    """An index along one dimension, which has the shape of what it indexes."""
    call.require_no_sizes()
    place = call.aligned(from_left=True)
    tensors = [call.get(name) for name in ("self", "index", "src") if call.get(name) is not None]
    nodes = [node for node in tensors if isinstance(node, Node)]
    call.need(set(nodes) <= {*call.held}, "indexes examples by what is none")
    rank = call.rank(nodes[0])
    call.need(all(call.rank(node) == rank for node in nodes), "indexes examples of another shape")
    call.need(call.get("dim") % rank != place.dim, "indexes the examples")
    return place


def selected(call: Call) -> Place:
    """An index of no example along one dimension, as in `index_select` and `index_add`."""
    call.require_no_sizes()
    call.need(call.get("index") not in call.places, "indexes by numbers of the examples")
    place = call.aligned(from_left=True)
    call.need(call.get("self") in call.places, "indexes what holds no examples")
    rank = call.rank(call.get("self"))
    call.need(call.get("dim") % rank != place.dim, "indexes the examples")
    return place


def indexed(call: Call) -> Place:
    """An index of several dimensions, `x[a, :, b]`; of the examples' own only by `arange(B)`."""
    call.require_no_sizes()
    source, indices = call.get("self"), call.get("indices")
    used = {dim: index for dim, index in enumerate(indices) if index is not None}
    kinds = [index.meta["val"].dtype for index in used.values()]
    call.need(not {torch.bool, torch.uint8} & {*kinds}, "selects by values")
    width = max(call.rank(index) for index in used.values())
    side_by_side = max(used) - min(used) + 1 == len(used)
    start = min(used) if side_by_side else 0
    by_examples = [index for index in used.values() if index in call.places]
    found: Place | None = None
    if by_examples:
        place = call.aligned_of(by_examples)
        found = Place(start + width + place.dim, place.inner)
    if source not in call.places:
        call.need(found is not None, "indexes no examples")
        assert found is not None
        call.need(not any(map(call.is_own, by_examples)), "numbers the examples")
        return found
    place = call.place(source)
    if place.dim in used:
        call.need(call.is_own(used[place.dim]), "indexes the examples")
        others = [index for dim, index in used.items() if dim != place.dim]
        call.need(not any(map(call.is_own, others)), "numbers the examples")
        call.need(place.inner == 1, "indexes the examples")
        assert found is not None
        return Place(found.dim, place.inner)
    call.need(found is None, "indexes examples by others")
    before = sum(dim not in used for dim in range(place.dim))
    after_block = not side_by_side or min(used) < place.dim
    return Place(before + width * after_block, place.inner)


def put(call: Call) -> Place:
    """`x[mask] = number`, with a mask of the same examples; `x[:, index] = number`."""
    call.require_no_sizes()
    source, values = call.get("self"), call.get("values")
    used = {dim: index for dim, index in enumerate(call.get("indices")) if index is not None}
    call.need(source in call.places, "writes examples into what holds none")
    call.need(values not in call.places, "writes examples by an index")
    place = call.place(source)
    call.need(not symbolic_dims(values.meta["val"]), "writes numbers of the examples")
    masks = [index for index in used.values() if index.meta["val"].dtype == torch.bool]
    if not masks:
        none = not any(index in call.places for index in used.values())
        call.need(none and place.dim not in used, "writes at an index of the examples")
        return place
    call.need(list(used) == [0] and place.dim < call.rank(masks[0]), "is given no mask alone")
    rest = call.rank(source) - call.rank(masks[0])
    call.need(call.rank(values) <= rest, "writes several numbers at a mask")
    call.need(masks[0] in call.places, "writes at a mask of no example")
    return call.aligned(from_left=True)


def own_index(call: Call) -> Place:
    """`arange(B)`, which may do nothing but index the examples by themselves."""
    start, step = call.get("start", default=0), call.get("step", default=1)
    plain = start == 0 and step == 1 and is_size(call.get("end"))
    call.need(plain and factor_of(call.result().shape[0]) == 1, "numbers the examples")
    return Place(0, 1)


def constant(call: Call) -> Place:
    """Numbers that are the same for all examples, or drawn for each."""
    call.require_no_sizes("size", "repeats")
    dims = symbolic_dims(call.result())
    one = len(dims) == 1 and factor_of(call.result().shape[dims[0]]) == 1
    call.need(one, "computes with the number of examples")
    return Place(dims[0], 1)


def filled(call: Call) -> Place:
    """As `constant`, or written over what is there, or drawn for each number."""
    return by_number(call) if call.held else constant(call)


def expanded(call: Call) -> Place:
    call.require_no_sizes("size")
    source = next(iter(call.arguments.values()))
    if source not in call.places:
        return constant(call)
    place = call.place(source)
    return Place(place.dim + call.result().dim() - call.rank(source), place.inner)


# ------------------------------------------------------------------------------------- the table


def _words(names: str) -> list[str]:
    return names.split()


Rule = Callable[[Call], Any]
LAST = {"sort", "argsort", "topk", "glu"}  # along the last dimension, if none is given
BY_NUMBER = _words("""
    __and__ __or__ __xor__ abs acos acosh add addcdiv addcmul angle asin asinh atan atan2 atanh
    bernoulli bitwise_and bitwise_not bitwise_or bitwise_xor ceil celu clamp clamp_max clamp_min
    clip clone complex conj_physical _conj contiguous copysign cos cosh deg2rad detach digamma div
    dropout alpha_dropout elu eq erf erfc erfinv exp exp2 expm1 float_power floor floor_divide
    fmax fmin fmod frac ge gelu greater gt hardshrink hardsigmoid hardswish hardtanh heaviside
    hypot imag isfinite isinf isnan le leaky_relu lerp less lgamma lift_fresh_copy log log10 log1p
    log2 logaddexp log_sigmoid logical_and logical_not logical_or logical_xor logit lt masked_fill
    maximum minimum mish mul multiply nan_to_num ne neg polar positive pow rad2deg real reciprocal
    relu relu6 remainder resolve_conj resolve_neg round rrelu rsqrt rsub selu sgn sigmoid sign
    silu sin sinc sinh softplus softshrink sqrt square sub subtract tan tanh threshold _to_copy to
    true_divide trunc type_as where xlogy special_expit special_xlog1py alias copy
""")
OVER_DIMS = _words("""
    all amax amin any argmax argmin cosine_similarity count_nonzero kthvalue linalg_vector_norm
    logsumexp max mean median min mode nanmean nansum norm prod std std_mean sum var var_mean
""")
ALONG_DIMS = _words("""
    argsort cummax cummin cumprod cumsum fft_fft fft_fft2 fft_fftn fft_fftshift fft_ifft fft_ifft2
    fft_ifftn fft_ifftshift fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn flip glu
    log_softmax logcumsumexp roll softmax sort topk
""")
VIEWS = _words("""
    adjoint chunk diagonal mH mT matrix_H moveaxis movedim narrow numpy_T permute select slice split
    split_with_sizes squeeze swapaxes swapdims t transpose unbind unfold unsqueeze
""")
RESHAPES = _words("_unsafe_view flatten reshape reshape_as unflatten view view_as")
CONSTANTS = _words("empty full new_empty new_full new_ones new_zeros ones rand randn zeros")
FILLS = _words("""
    empty_like exponential fill full_like normal ones_like rand_like randn_like uniform zero
    zeros_like
""")
MAPS = {1: (3,), 2: (4,), 3: (5,)}  # the rank of batches of maps
RULES: dict[str, Rule] = {
    **dict.fromkeys(BY_NUMBER, by_number),
    **dict.fromkeys(OVER_DIMS, over_dims),
    **dict.fromkeys(ALONG_DIMS, along_dims),
    **dict.fromkeys(VIEWS, view),
    **dict.fromkeys(RESHAPES, reshaped),
    **dict.fromkeys(CONSTANTS, constant),
    **dict.fromkeys(FILLS, filled),
    **dict.fromkeys(("tril", "triu"), in_last(2)),
    **dict.fromkeys(("pixel_shuffle", "pixel_unshuffle"), in_last(3)),
    **dict.fromkeys(("layer_norm", "rms_norm"), normalised),
    **dict.fromkeys(("group_norm", "prelu", "feature_dropout", "channel_shuffle"), in_rows()),
    **dict.fromkeys(("im2col",), in_rows(4)),
    **dict.fromkeys(("col2im",), in_rows(3)),
    **dict.fromkeys(("cat", "concat", "stack"), joined),
    **dict.fromkeys(("matmul", "mm", "bmm", "addmm", "baddbmm"), product),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), recurrent),
    **dict.fromkeys(("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"), cell),
    **dict.fromkeys(("gather", "scatter", "scatter_add", "scatter_reduce"), gathered),
    **dict.fromkeys(("index_select", "index_add", "index_copy", "index_fill"), selected),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), expanded),
    **dict.fromkeys(("view_as_real", "one_hot"), like_first),
    "view_as_complex": in_last(1),
    "pad": padded,
    "constant_pad_nd": padded,
    "batch_norm": batch_norm,
    "instance_norm": instance_norm,
    "repeat": repeated,
    "repeat_interleave": repeated_in_place,
    "linear": linear,
    "bilinear": bilinear,
    "einsum": einsum,
    "embedding": embedding,
    "scaled_dot_product_attention": attention,
    "grid_sampler": all_in_rows,
    "index": indexed,
    "index_put": put,
    "arange": own_index,
    "leaf": in_rows(),
}
for _number, _ranks in MAPS.items():
    for _kind in ("conv{}d", "max_pool{}d", "avg_pool{}d", "adaptive_avg_pool{}d"):
        RULES[_kind.format(_number)] = in_rows(*_ranks)
    for _kind in ("conv_transpose{}d", "adaptive_max_pool{}d", "max_pool{}d_with_indices"):
        RULES[_kind.format(_number)] = in_rows(*_ranks)
    for _kind in ("upsample_nearest{}d", "_upsample_nearest_exact{}d"):
        RULES[_kind.format(_number)] = in_rows(*_ranks)
RULES["upsample_linear1d"] = in_rows(3)
RULES["upsample_bilinear2d"] = RULES["upsample_bicubic2d"] = in_rows(4)
RULES["_upsample_bilinear2d_aa"] = RULES["_upsample_bicubic2d_aa"] = in_rows(4)
RULES["upsample_trilinear3d"] = in_rows(5)

# They may write over their first argument.
IN_PLACE = {by_number, filled, gathered, selected, put, along_dims}
# What may be done with `arange(B)` before it indexes.
OF_INDEX = {"view", "reshape", "unsqueeze", "expand", "to", "_to_copy", "alias", "clone"}


# -------------------------------------------------------------------------------------- the walk


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
    own: set[Node] = set()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        found = _place_of(node, places, own)
        if found is None:
            continue
        places[node] = found
        _require_consistent(node, found)
    for output in tree_leaves(graph.output_node().args):
        if not isinstance(output, Node) or places.get(output) != Place(0, 1) or output in own:
            raise Alone("the output does not have one row for each example", output)
    return places


def _place_of(node: Node, places: Places, own: set[Node]) -> Any:
    """Return where the examples are after one operation; None if it holds none."""
    if name_of(node) == "getitem":
        source, number = cast(tuple[Node, int], node.args)
        if source not in places:
            return None
        place = places[source]
        return place[number] if isinstance(place, tuple) and not isinstance(place, Place) else place
    if not hasattr(node.target, "_schema"):
        if any(leaf in places for leaf in tree_leaves((node.args, node.kwargs))):
            raise Alone(f"{name_of(node)} is not known to keep examples apart", node)
        return None  # arithmetic of sizes
    call = Call(node, places)
    call.own = own
    if call.kind in ("sym_size", "sym_numel", "sym_stride", "sym_storage_offset"):
        return None
    written = _written(call)
    if any(argument.op == "placeholder" and argument not in places for argument in written):
        raise Alone("the model changes its parameters or buffers in its forward pass", node)
    values = [value for value in tree_leaves(call.value) if isinstance(value, Tensor)]
    reads_shape = call.kind in CONSTANTS  # `x.new_zeros(4)` takes the type of `x`, and no number
    holds_none = reads_shape or not call.held
    if holds_none and not any(symbolic_dims(value) for value in values):
        sizes = any(is_size(leaf) for leaf in tree_leaves((node.args, node.kwargs)))
        call.need(not sizes or not values, "computes with the number of examples")
        return None
    kind = call.kind.removesuffix("_") if call.schema.is_mutable else call.kind
    rule = RULES.get(kind)
    namespace = call.schema.name.partition("::")[0]
    call.need(namespace in ("aten", "zdp_bench"), "is an operator of its own")
    call.need(rule is not None, "is not known to keep examples apart")
    assert rule is not None
    if any(argument in own for argument in call.held) and kind != "index":
        call.need(kind in OF_INDEX and not written, "numbers the examples")
        own.add(node)
    if kind == "arange":
        own.add(node)
    call.need(not written or rule in IN_PLACE, "is not known to keep examples apart in place")
    place = rule(call)
    for argument in written:
        call.need(places.get(argument) == place, "writes examples to another place")
    return place


def _written(call: Call) -> list[Node]:
    """Return the arguments that an operation writes."""
    found = []
    for argument in call.schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            leaves = tree_leaves(call.arguments[argument.name])
            found += [leaf for leaf in leaves if isinstance(leaf, Node)]
    return found


def _require_consistent(node: Node, place: Any) -> None:
    """Reject a place that the sizes of the results contradict."""
    several = isinstance(place, tuple) and not isinstance(place, Place)
    values = node.meta["val"]
    values = list(values) if isinstance(values, list | tuple) else [values]
    places = list(place) if several else [place] * len(values)
    for value, own in zip(values, places, strict=False):
        dims = symbolic_dims(value)
        factor = factor_of(value.shape[dims[0]]) if len(dims) == 1 else 0
        if dims != [own.dim] or not factor or factor % own.inner:
            raise Alone(f"{name_of(node)} does not keep the dimension of the examples", node)
