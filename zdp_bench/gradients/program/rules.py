"""Where the examples are in the results of an operation, for each kind of operation.

A rule takes a `Call` and returns the `Place` of the examples in its result, or a tuple of places
for several results. Most rules reject operations on the dimension of the examples and leave the
rest to `by_sizes`, which finds the examples by the sizes of a result, because the batch size is a
symbol. A result in which examples were added up has no dimension of this size, and one that pairs
examples has two.
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
    batch_dim,
    count_dims,
    factor_of,
    is_size,
    list_places,
    nodes_in,
    rank_of,
    symbolic_dims,
)

Rule = Callable[[Call], Any]

# Operations whose default is the last dimension.
ALONG_LAST = {"sort", "argsort", "topk", "glu", "linalg_cross"}
# Reasons to reject a call. They follow the operation's name, as in "sort operates along the batch
# dimension".
ALONG_BATCH = "operates along the batch dimension"
BATCH_NOT_FIRST = "does not take the examples in its batch dimension"
DIFFERENT_DIMS = "combines tensors with different batch dimensions"
INDEXES_BATCH = "indexes the batch dimension"
USES_POSITION = "depends on an example's position in the batch"
SPLITS_BATCH = "splits the batch dimension"
MOVES_ENTRIES = "moves entries from one example to another"


# ------------------------------------------------------------------------------ along which dims


def by_sizes(call: Call) -> Any:
    """Return where the dimension of the examples is in each result, which must keep it whole.

    This is sufficient for elementwise operations, products, reductions and views, because none of
    them can exchange examples without a change in the sizes of its result.
    """
    inner = call.inner
    factors = {call.factor(node) for node in call.examples}
    places = []
    for result in call.results:
        dims = symbolic_dims(result)
        call.require(len(dims) > 0, "combines the examples of a batch, or selects some")
        call.require(len(dims) == 1, "combines each example with all others")
        factor = factor_of(result.shape[dims[0]])
        call.require({factor} == factors, SPLITS_BATCH)
        places.append(Place(dims[0], inner))
    is_several = isinstance(call.node.meta["val"], list | tuple)
    return tuple(places) if is_several else places[0]


def along(call: Call) -> Any:
    """Rule of operations that mix or move entries along dimensions whose sizes do not change."""
    rank = call.results[0].dim()
    dims = _dims_of(call, rank)
    call.require(dims is not None and dims != [], "operates along all dimensions")
    result = by_sizes(call)
    dim = list_places(result)[0].dim
    call.require(dim not in count_dims(dims, rank), ALONG_BATCH)
    return result


def _dims_of(call: Call, rank: int) -> Any:
    """Return the dimensions that an operation works along; None for all."""
    dims = call.get("dim", "dims")
    if dims is not None:
        return dims
    if call.kind in ALONG_LAST:
        return -1
    if not call.kind.startswith("fft_"):
        return None
    sizes = call.get("s")
    count = rank if sizes is None else len(sizes)
    return list(range(-count, 0))


def in_last(count: int) -> Rule:
    """Return the rule of operations on the last `count` dimensions of the first argument."""

    def rule(call: Call) -> Any:
        node = call.first
        call.require(call.dim(node) < rank_of(node) - count, ALONG_BATCH)
        return by_sizes(call)

    return rule


def in_rows(*ranks: int) -> Rule:
    """Return the rule of operations that process each row of dimension 0 separately.

    Args:
        ranks: numbers of dimensions of the first argument for which this holds. Default: any.
    """

    def rule(call: Call) -> Any:
        node = call.first
        is_batch = not ranks or rank_of(node) in ranks
        call.require(is_batch and call.dim(node) == 0, BATCH_NOT_FIRST)
        return by_sizes(call)

    return rule


def all_in_rows(call: Call) -> Any:
    """Rule of operations that process each row of dimension 0 of several arguments separately."""
    for node in call.examples:
        call.require(call.dim(node) == 0, BATCH_NOT_FIRST)
    return by_sizes(call)


def normalised(call: Call) -> Any:
    """Rule of normalisations over the last dimensions."""
    shape = call.get("normalized_shape")
    return in_last(len(shape))(call)


def padded(call: Call) -> Any:
    """Rule of padding, which changes the last dimensions."""
    widths = call.get("pad")
    return in_last(len(widths) // 2)(call)


def batch_norm(call: Call) -> Any:
    """Rule of batch norm, which keeps examples apart if it uses given statistics."""
    call.require(call.get("training") is False, "computes its statistics from the batch")
    return in_rows()(call)


def instance_norm(call: Call) -> Any:
    """Rule of instance norm, which normalises each channel of each row separately."""
    call.require(call.get("use_input_stats") is True, "uses running statistics")
    call.require(call.get("running_mean") is None, "updates running statistics")
    call.require(call.dim(call.first) < 2, "normalises over the batch dimension")
    return by_sizes(call)


def squeezed(call: Call) -> Any:
    """Rule of squeeze: for a batch of one example, it would remove the batch dimension too."""
    node = call.first
    dims = count_dims(call.get("dim"), rank_of(node))
    call.require(call.dim(node) not in dims, "would remove the batch dimension of a single example")
    return by_sizes(call)


def matrices(call: Call) -> Any:
    """Rule of operations on the last two dimensions of each argument."""
    for node in call.examples:
        call.require(call.dim(node) < rank_of(node) - 2, ALONG_BATCH)
    return by_sizes(call)


def recurrent(call: Call) -> Any:
    """Rule of recurrent operations.

    The sequences have the examples in dimension 0 or 1 (see `batch_first`), and the states in
    dimension 1. Lengths must be those of the examples.
    """
    sequences = call.get("input")
    lengths = call.get("lengths")
    states = tree_leaves(call.get("hx"))
    is_packed = call.kind.startswith("packed_")
    is_batch = call.holds_examples(sequences) and rank_of(sequences) == 3
    call.require(is_batch, "is not called on a batch of sequences")
    batch_first = is_packed or call.get("batch_first")
    call.require(call.dim(sequences) == (0 if batch_first else 1), "runs along the batch dimension")
    has_lengths = not is_packed or call.holds_examples(lengths)
    call.require(has_lengths, "takes lengths that are not those of the examples")
    others = set(call.examples) - {sequences, lengths, *states}
    call.require(not others, "has a weight that depends on the examples")
    for state in states:
        has_batch = call.holds_examples(state) and call.dim(state) == 1
        call.require(has_batch, "has a first state without one row per example")
    return by_sizes(call)


def einsum(call: Call) -> Any:
    """Rule of einsum: one letter stands for the examples in each term, and in the result."""
    nodes = call.get("tensors")
    ranks = [rank_of(node) for node in nodes]
    terms, result = _spell_out(call.get("equation"), ranks)
    letters = set()
    for term, node in zip(terms, nodes, strict=True):
        if call.holds_examples(node):
            letters.add(term[call.dim(node)])
    call.require(len(letters) == 1, DIFFERENT_DIMS)
    letter = letters.pop()
    for term, node in zip(terms, nodes, strict=True):
        times = 1 if call.holds_examples(node) else 0
        call.require(term.count(letter) == times, "sums over the examples")
    call.require(result.count(letter) == 1, "sums over the examples")
    return by_sizes(call)


def _spell_out(
    equation: str,
    ranks: list[int],
) -> tuple[list[str], str]:
    """Return an equation's terms and result, with letters in place of dots.

    For example "...i,ij" of ranks 3 and 2 has the terms "abi" and "ij", and the result "abj".
    """
    left, arrow, result = equation.replace(" ", "").partition("->")
    if not arrow:
        single = {letter for letter in left if left.count(letter) == 1} - {",", "."}
        dots = "..." if "..." in left else ""
        result = dots + "".join(sorted(single))
    terms = left.split(",")
    widths = []  # number of dimensions that the dots in each term stand for
    for term, rank in zip(terms, ranks, strict=True):
        letters = term.replace("...", "")
        widths.append(rank - len(letters) if "..." in term else 0)
    unused_letters = filter(str.isalpha, map(chr, range(0x100, 0x200)))  # not valid in an equation
    widest = max(widths)
    dot_letters = "".join(unused_letters)[:widest]
    spelled = [
        term.replace("...", dot_letters[widest - width :])
        for term, width in zip(terms, widths, strict=True)
    ]
    return spelled, result.replace("...", dot_letters)


# ------------------------------------------------------------------- other sizes of the dimension


def reshaped(call: Call) -> Any:
    """Rule of reshaping, which keeps the order of all entries.

    The number of entries from one example to the next therefore does not change.
    """
    call.require("dtype" not in call.arguments, "reinterprets the entries as another type")
    source = next(iter(call.arguments.values()))
    call.require(call.holds_examples(source), "does not take the examples as its first argument")
    (result,) = call.results
    dims = symbolic_dims(result)
    call.require(len(dims) == 1, SPLITS_BATCH)
    dim, inner = call.place(source)
    row = prod(source.meta["val"].shape[dim + 1 :])  # entries of one row
    new_dim, factor = batch_dim(result)
    new_row = prod(result.shape[new_dim + 1 :])
    if inner == ALIKE:
        if row == new_row and factor == call.factor(source):
            return Place(new_dim, ALIKE)
        inner = call.factor(source)  # any order is valid for rows that are alike
    distance = inner * row  # entries from one example to the next
    call.require(new_row > 0 and distance % new_row == 0, MOVES_ENTRIES)
    new_inner = distance // new_row
    call.require(factor > 0 and factor % new_inner == 0, MOVES_ENTRIES)
    return Place(new_dim, new_inner)


def repeated(call: Call) -> Any:
    """Rule of operations that append copies of a tensor along its dimensions."""
    if not call.examples:
        return _repeated_constant(call)
    node = call.first
    call.require_no_sizes()
    (result,) = call.results
    new_dims = result.dim() - rank_of(node)
    return Place(new_dims + call.dim(node), call.inner)


def _repeated_constant(call: Call) -> Any:
    """Rule of `repeated` for a tensor without examples.

    If the tensor has several rows in the dimension of the examples, each example has whole copies.
    """
    place = constant(call)
    (result,) = call.results
    source = next(iter(call.arguments.values())).meta["val"]
    dim = place.dim - (result.dim() - source.dim())
    rows = source.shape[dim] if dim >= 0 else 1
    if rows == 1:
        return place
    _, factor = batch_dim(result)
    return Place(place.dim, factor)


def repeated_in_place(call: Call) -> Any:
    """Rule of `repeat_interleave`, which inserts copies of each row after it."""
    node = call.first
    times = call.get("repeats")
    call.require(call.get("dim") is not None, "flattens the batch dimension")
    call.require(isinstance(times, int), "takes the number of repeats from a tensor")
    if call.chosen_dim(node) != call.dim(node):
        return by_sizes(call)
    return Place(call.dim(node), call.inner * times)


def joined(call: Call) -> Any:
    """Rule of concatenation. Along the dimension of the examples, tensors keep their order."""
    for node in call.tensors:
        is_empty = node.meta["val"].shape == (0,)  # such as a cache before the first token
        is_joined = is_empty or call.holds_examples(node)
        call.require(is_joined, "joins examples with a tensor without any")
    dim = call.common_dim
    if call.kind == "stack" or call.chosen_dim(call.examples[0]) != dim:
        return by_sizes(call)
    return Place(dim, call.inner or 1)  # any order is valid for rows that are alike


def cut(call: Call) -> Any:
    """Rule of splitting. Along the dimension of the examples, each piece must contain them all."""
    node = call.first
    place = call.place(node)
    if call.chosen_dim(node) != place.dim:
        call.require_no_sizes()
        return by_sizes(call)
    for piece in call.results:
        size = piece.shape[place.dim]
        factor = factor_of(size) if is_size(size) else 0
        is_whole = factor > 0 and place.inner > 0 and factor % place.inner == 0
        call.require(is_whole, SPLITS_BATCH)
    return (place,) * len(call.results)


# -------------------------------------------------------------------------- numbers of no example


def constant(call: Call) -> Any:
    """Rule of tensors whose entries are equal for all examples, or drawn for each."""
    (result,) = call.results
    dim, factor = batch_dim(result)
    call.require(factor > 0, "computes with the batch size")
    return Place(dim, 1 if factor == 1 else ALIKE)


def filled(call: Call) -> Any:
    """Rule of filling and expanding: that of `constant` unless an argument contains examples."""
    return by_sizes(call) if call.examples else constant(call)


def numbers(call: Call) -> Any:
    """Rule of `arange(B)`, which may only be used to index the examples."""
    call.require(call.get("start") in (None, 0), USES_POSITION)
    call.require(call.get("step") in (None, 1), USES_POSITION)
    (result,) = call.results
    _, factor = batch_dim(result)
    call.require(factor == 1, USES_POSITION)
    return Place(0, 1)


# -------------------------------------------------------------------------------------- indices


def from_table(*tables: str) -> Rule:
    """Return the rule of elementwise lookups in arguments that contain no examples.

    Args:
        tables: names of these arguments.
    """

    def rule(call: Call) -> Any:
        for table in tables:
            depends_on_examples = call.holds_examples(call.get(table))
            call.require(not depends_on_examples, "reads a table that depends on the examples")
        scales_gradients = call.get("scale_grad_by_freq")
        call.require(not scales_gradients, "scales gradients by frequencies in the batch")
        return by_sizes(call)

    return rule


def gathered(call: Call) -> Any:
    """Rule of indexing along one dimension by an index of the same rank, as in `gather`."""
    source, index = call.get("self"), call.get("index")
    if call.kind == "gather" and not call.holds_examples(source):
        is_along_examples = call.chosen_dim(index) == call.dim(index)
        call.require(is_along_examples, USES_POSITION)
        return by_sizes(call)
    nodes = nodes_in(source, index, call.get("src"))
    for node in nodes:
        call.require(call.holds_examples(node), "combines examples with a tensor without any")
    shapes = {(call.dim(node), rank_of(node)) for node in nodes}
    call.require(len(shapes) == 1, DIFFERENT_DIMS)
    call.require(call.chosen_dim(nodes[0]) != call.dim(nodes[0]), INDEXES_BATCH)
    return by_sizes(call)


def selected(call: Call) -> Any:
    """Rule of indexing along one dimension, as in `index_select` and `index_add`."""
    source, index = call.get("self"), call.get("index")
    if call.kind == "index_select" and not call.holds_examples(source):
        return by_sizes(call)
    call.require(not call.holds_examples(index), "takes an index that depends on the examples")
    call.require(call.holds_examples(source), "writes to a tensor that contains no examples")
    call.require(call.chosen_dim(source) != call.common_dim, INDEXES_BATCH)
    return by_sizes(call)


def indexed(call: Call) -> Any:
    """Rule of indexing along several dimensions, as in `x[a, :, b]`.

    The dimension of the examples may only be indexed by `arange(B)`.
    """
    source = call.get("self")
    indices = _indices_by_dim(call)
    for index in indices.values():
        call.require(not _is_mask(index), "selects entries by values")
    if not call.holds_examples(source):
        call.require(call.numbering.isdisjoint(indices.values()), USES_POSITION)
        return by_sizes(call)
    place = call.place(source)
    example_index = indices.pop(place.dim, None)
    if example_index is None:
        depends_on_examples = any(map(call.holds_examples, indices.values()))
        call.require(not depends_on_examples, "applies the indices of one example to others")
        return by_sizes(call)
    is_identity = example_index in call.numbering and place.inner == 1
    call.require(is_identity, INDEXES_BATCH)
    call.require(call.numbering.isdisjoint(indices.values()), USES_POSITION)
    return by_sizes(call)


def _indices_by_dim(call: Call) -> dict[int, Node]:
    """Return the indices of a call by dimension."""
    indices = enumerate(call.get("indices"))
    return {dim: index for dim, index in indices if index is not None}


def _is_mask(index: Node) -> bool:
    return index.meta["val"].dtype in (torch.bool, torch.uint8)


def put(call: Call) -> Any:
    """Rule of `x[mask] = number`, with a mask of the same examples, and `x[:, index] = number`."""
    source, values = call.get("self"), call.get("values")
    indices = _indices_by_dim(call)
    call.require(call.holds_examples(source), "writes to a tensor that contains no examples")
    call.require(not call.holds_examples(values), "writes values that depend on the examples")
    place = call.place(source)
    masks = [index for index in indices.values() if _is_mask(index)]
    if not masks:
        depends_on_examples = any(map(call.holds_examples, indices.values()))
        call.require(not depends_on_examples, "takes an index that depends on the examples")
        call.require(place.dim not in indices, INDEXES_BATCH)
        return place
    mask = masks[0]
    call.require(list(indices) == [0], "combines a mask with other indices")
    call.require(call.holds_examples(mask), "takes a mask that does not depend on the examples")
    call.require(call.dim(mask) == place.dim, DIFFERENT_DIMS)
    is_one_row = rank_of(values) <= rank_of(source) - rank_of(mask)
    call.require(is_one_row, "writes more than one value at a mask")
    return by_sizes(call)
