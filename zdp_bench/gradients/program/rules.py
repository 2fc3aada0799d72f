"""Where the examples are in the results of an operation, by its kind.

Most rules state what must not happen to the dimension of the examples and leave the rest to `kept`,
which reads from the sizes of a result where its examples are: the number of examples is a symbol. A
result that examples were added up in has no such dimension, one that pairs them has two.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from zdp_bench.gradients.program.calls import (
    ALIKE,
    Call,
    Place,
    factor_of,
    is_size,
    nodes_in,
    symbolic_dims,
)

Rule = Callable[[Call], Any]  # returns a `Place`, or a tuple of them for several results

NONE = frozenset[str]()
LAST = {"sort", "argsort", "topk", "glu", "linalg_cross"}  # along the last, if none is given


# ------------------------------------------------------------------------------ along which dims


def kept(call: Call) -> Any:
    """Return where the dimension of the examples is in each result, which all keep it whole.

    It suffices for operations that work number by number, take a product or a sum over dimensions,
    or a view: none of them can exchange examples without a trace in the sizes of its result.
    """
    inner = call.inner
    factors = {call.factor(node) for node in call.held}
    found = []
    for value in call.results:
        dims = symbolic_dims(value)
        call.need(len(dims) > 0, "combines the examples of a batch, or picks some")
        call.need(len(dims) == 1, "combines each example with every other")
        whole = {factor_of(value.shape[dims[0]])} == factors
        call.need(whole, "takes the dimension of the examples apart")
        found.append(Place(dims[0], inner))
    return tuple(found) if isinstance(call.value, list | tuple) else found[0]


def along(call: Call) -> Any:
    """It mixes or moves the numbers along dimensions, which stay."""
    rank = call.results[0].dim()
    dims = _dims_of(call, rank)
    call.need(dims is not None and dims != [], "mixes all dimensions")
    found = kept(call)
    place = found if isinstance(found, Place) else found[0]
    call.need(place.dim not in call.dims(dims, rank), "mixes the dimension of the examples")
    return found


def _dims_of(call: Call, rank: int) -> Any:
    dims, sizes = call.get("dim", "dims"), call.get("s")
    if dims is not None:
        return dims
    if call.kind in LAST:
        return -1
    if not call.kind.startswith("fft_"):
        return None
    last = rank if sizes is None else len(sizes)
    return [*range(-last, 0)]


def in_last(number: int) -> Rule:
    """It works on the last dimensions of its first argument."""

    def rule(call: Call) -> Any:
        node = call.first
        before = call.rank(node) - number
        call.need(call.dim(node) < before, "works along the dimension of the examples")
        return kept(call)

    return rule


def in_rows(*ranks: int) -> Rule:
    """It takes the rows of dimension 0 apart, if its first argument has one of these ranks."""

    def rule(call: Call) -> Any:
        node = call.first
        batched = not ranks or call.rank(node) in ranks
        is_first = call.dim(node) == 0
        call.need(batched and is_first, "does not have the examples in its first dimension")
        return kept(call)

    return rule


def all_in_rows(call: Call) -> Any:
    """As `in_rows`, of several arguments."""
    for node in call.held:
        is_first = call.dim(node) == 0
        call.need(is_first, "does not have the examples in its first dimension")
    return kept(call)


def normalised(call: Call) -> Any:
    return in_last(len(call.get("normalized_shape")))(call)


def padded(call: Call) -> Any:
    return in_last(len(call.get("pad")) // 2)(call)


def batch_norm(call: Call) -> Any:
    call.need(call.get("training") is False, "takes its statistics from all examples")
    return in_rows()(call)


def instance_norm(call: Call) -> Any:
    """Each row of each channel is normalised by itself."""
    call.need(call.get("use_input_stats") is True, "uses running statistics")
    call.need(call.get("running_mean") is None, "keeps statistics of the examples")
    call.need(call.dim(call.first) < 2, "normalises over the examples")
    return kept(call)


def squeezed(call: Call) -> Any:
    """Of one example, its dimension would be squeezed out too."""
    node = call.first
    dims = call.dims(call.get("dim"), call.rank(node))
    call.need(call.dim(node) not in dims, "squeezes out a single example")
    return kept(call)


def matrices(call: Call) -> Any:
    """It works on the last two dimensions of each argument."""
    for node in call.held:
        before = call.rank(node) - 2
        call.need(call.dim(node) < before, "works along the dimension of the examples")
    return kept(call)


def recurrent(call: Call) -> Any:
    """Its input has the examples first or second, its states second, and lengths are their own."""
    inputs, lengths = call.get("input"), call.get("lengths")
    states = tree_leaves(call.get("hx"))
    is_batch = inputs in call.held and call.rank(inputs) == 3
    call.need(is_batch, "has no batch of sequences")
    is_packed = call.kind.startswith("packed_")
    batch = 0 if is_packed or call.get("batch_first") else 1
    call.need(call.dim(inputs) == batch, "runs along the examples")
    call.need(not is_packed or lengths in call.held, "is given lengths of no example")
    call.need(set(call.held) <= {inputs, lengths, *states}, "has a weight of the examples")
    for state in states:
        fits = state in call.held and call.dim(state) == 1
        call.need(fits, "has a first state of other examples")
    return kept(call)


def einsum(call: Call) -> Any:
    """The examples have one letter, in each term that holds them and in the result."""
    nodes = call.get("tensors")
    terms, result = _letters(call, [call.rank(node) for node in nodes])
    pairs = list(zip(terms, nodes, strict=True))
    letters = {term[call.dim(node)] for term, node in pairs if node in call.held}
    call.need(len(letters) == 1, "combines examples at different places")
    letter = letters.pop()
    for term, node in pairs:
        call.need(term.count(letter) == (node in call.held), "sums over the examples")
    call.need(result.count(letter) == 1, "sums over the examples")
    return kept(call)


def _letters(call: Call, ranks: list[int]) -> tuple[list[str], str]:
    """Return an equation's terms and result, with letters in place of dots."""
    left, arrow, result = call.get("equation").replace(" ", "").partition("->")
    if not arrow:
        once = sorted(letter for letter in set(left) - {",", "."} if left.count(letter) == 1)
        result = ("..." if "..." in left else "") + "".join(once)
    free = [letter for letter in map(chr, range(0x100, 0x200)) if letter.isalpha()]
    terms, most = [], 0
    for term, rank in zip(left.split(","), ranks, strict=True):
        width = rank - len(term.replace("...", ""))
        if "..." in term:
            most = max(most, width)
        terms.append((term, width))
    named = [term.replace("...", "".join(free[most - width : most])) for term, width in terms]
    return named, result.replace("...", "".join(free[:most]))


# ------------------------------------------------------------------- other sizes of the dimension


def reshaped(call: Call) -> Any:
    """The order of all numbers stays, and with it how many follow between two examples."""
    call.need("dtype" not in call.arguments, "reads the numbers as those of another type")
    source = next(iter(call.arguments.values()))
    call.need(source in call.held, "takes its examples elsewhere")
    dims = symbolic_dims(call.result)
    call.need(len(dims) == 1, "splits the dimension of the examples")
    dim, inner = call.place(source)
    row = prod(source.meta["val"].shape[dim + 1 :])  # numbers of an index of the dimension
    new_row = prod(call.result.shape[dims[0] + 1 :])
    factor = factor_of(call.result.shape[dims[0]])
    if inner == ALIKE and row == new_row and factor == call.factor(source):
        return Place(dims[0], ALIKE)
    if inner == ALIKE:
        inner = call.factor(source)  # rows that are alike are in this order, too
    between = inner * row  # numbers from an example to the next
    call.need(new_row > 0 and between % new_row == 0, "moves numbers between examples")
    new_inner = between // new_row
    call.need(factor > 0 and factor % new_inner == 0, "moves numbers between examples")
    return Place(dims[0], new_inner)


def repeated(call: Call) -> Any:
    """Copies behind each other."""
    if not call.held:
        return constant(call)
    node = call.first
    call.need_no_sizes(NONE)
    new_dims = call.result.dim() - call.rank(node)
    return Place(new_dims + call.dim(node), call.inner)


def repeated_in_place(call: Call) -> Any:
    """Copies of each row behind it."""
    node = call.first
    times = call.get("repeats")
    call.need(call.get("dim") is not None, "flattens the examples")
    call.need(isinstance(times, int), "repeats each row as often as a tensor says")
    if call.chosen_dim(node) != call.dim(node):
        return kept(call)
    return Place(call.dim(node), call.inner * times)


def joined(call: Call) -> Any:
    """Of two tensors behind each other in the dimension of the examples, the order is theirs."""
    others = [node for node in call.tensors if node not in call.held]
    none = all(node.meta["val"].shape == (0,) for node in others)  # a cache before its first word
    call.need(none, "joins examples with what is none")
    dims = {call.dim(node) for node in call.held}
    call.need(len(dims) == 1, "combines examples at different places")
    dim = dims.pop()
    if call.kind == "stack" or call.chosen_dim(call.held[0]) != dim:
        return kept(call)
    return Place(dim, call.inner or 1)  # rows that are alike are in this order, too


def cut(call: Call) -> Any:
    """Pieces along a dimension; along that of the examples, each has all of them."""
    node = call.first
    place = call.place(node)
    if call.chosen_dim(node) != place.dim:
        call.need_no_sizes(NONE)
        return kept(call)
    for value in call.results:
        size = value.shape[place.dim]
        factor = factor_of(size) if is_size(size) else 0
        whole = factor > 0 and place.inner > 0 and factor % place.inner == 0
        call.need(whole, "takes the dimension of the examples apart")
    return (place,) * len(call.results)


# -------------------------------------------------------------------------- numbers of no example


def constant(call: Call) -> Any:
    """Numbers that are the same for all examples, or drawn for each."""
    dims = symbolic_dims(call.result)
    factor = factor_of(call.result.shape[dims[0]]) if len(dims) == 1 else 0
    call.need(factor > 0, "computes with the number of examples")
    return Place(dims[0], 1 if factor == 1 else ALIKE)


def filled(call: Call) -> Any:
    """As `constant`; or written over what is there, or copies of it."""
    return kept(call) if call.held else constant(call)


def own_index(call: Call) -> Any:
    """`arange(B)`, which may do nothing but index the examples by themselves."""
    call.need(call.get("start") in (None, 0), "numbers the examples")
    call.need(call.get("step") in (None, 1), "numbers the examples")
    (size,) = call.result.shape
    call.need(is_size(size) and factor_of(size) == 1, "numbers the examples")
    return Place(0, 1)


# -------------------------------------------------------------------------------------- indices


def from_table(*tables: str) -> Rule:
    """It looks numbers up, for each by itself, in arguments that hold no examples."""

    def rule(call: Call) -> Any:
        none = not any(call.get(table) in call.held for table in tables)
        call.need(none, "looks up in a table of the examples")
        call.need(not call.get("scale_grad_by_freq"), "scales gradients by the batch's words")
        return kept(call)

    return rule


def gathered(call: Call) -> Any:
    """An index along one dimension, which has the shape of what it indexes."""
    if call.kind == "gather" and call.get("self") not in call.held:
        index = call.get("index")
        along_examples = call.chosen_dim(index) == call.dim(index)
        call.need(along_examples, "indexes by the place of an example")
        return kept(call)
    nodes = nodes_in(call.get("self"), call.get("index"), call.get("src"))
    call.need(set(nodes) <= {*call.held}, "indexes examples by what is none")
    shapes = {(call.dim(node), call.rank(node)) for node in nodes}
    call.need(len(shapes) == 1, "indexes examples at another place")
    call.need(call.chosen_dim(nodes[0]) != call.dim(nodes[0]), "indexes the examples")
    return kept(call)


def selected(call: Call) -> Any:
    """An index of one dimension, as in `index_select` and `index_add`."""
    source, index = call.get("self"), call.get("index")
    if call.kind == "index_select" and source not in call.held:
        return kept(call)
    call.need(index not in call.held, "indexes by numbers of the examples")
    call.need(source in call.held, "indexes what holds no examples")
    dims = {call.dim(node) for node in call.held}
    call.need(len(dims) == 1, "combines examples at different places")
    call.need(call.chosen_dim(source) not in dims, "indexes the examples")
    return kept(call)


def indexed(call: Call) -> Any:
    """An index of several dimensions, `x[a, :, b]`; of the examples' own only by `arange(B)`."""
    source, used = call.get("self"), _used(call)
    call.need(not any(map(_is_mask, used.values())), "selects by values")
    by_examples = [index for index in used.values() if index in call.held]
    if source not in call.held:
        call.need(not set(by_examples) & call.own, "numbers the examples")
        return kept(call)
    place = call.place(source)
    own = used.pop(place.dim, None)
    if own is None:
        call.need(not by_examples, "indexes examples by others")
        return kept(call)
    call.need(own in call.own and place.inner == 1, "indexes the examples")
    call.need(not set(used.values()) & call.own, "numbers the examples")
    return kept(call)


def _used(call: Call) -> dict[int, Node]:
    """Return the indices of a call by dimension."""
    indices = enumerate(call.get("indices"))
    return {dim: index for dim, index in indices if index is not None}


def _is_mask(index: Node) -> bool:
    return index.meta["val"].dtype in (torch.bool, torch.uint8)


def put(call: Call) -> Any:
    """`x[mask] = number`, with a mask of the same examples; `x[:, index] = number`."""
    source, values = call.get("self"), call.get("values")
    used = _used(call)
    call.need(source in call.held, "writes examples into what holds none")
    call.need(values not in call.held, "writes examples by an index")
    place = call.place(source)
    masks = [index for index in used.values() if _is_mask(index)]
    if not masks:
        none = not any(index in call.held for index in used.values())
        call.need(none and place.dim not in used, "writes at an index of the examples")
        return place
    mask = masks[0]
    call.need(list(used) == [0], "is given no mask alone")
    call.need(mask in call.held, "writes at a mask of no example")
    call.need(call.dim(mask) == place.dim, "combines examples at different places")
    rest = call.rank(source) - call.rank(mask)
    call.need(call.rank(values) <= rest, "writes several numbers at a mask")
    return kept(call)
