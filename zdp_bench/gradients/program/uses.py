"""The per-example gradients of parameters that an operation of a program uses.

An operation whose weight is a parameter is a layer: `conv2d(x, weight, bias, stride)` has the rule
of `nn.Conv2d`. So there is one answer to what a layer's per-example gradient is (`rules`), and it
serves a weight that two layers share, one in an adapter or in `F.linear` as well. Broadcast
arithmetic with a parameter (`x * scale + shift`) has a rule here, and other operations are
differentiated by torch.func, one by one.

A weight may be computed from parameters (`weight.T`, a normalised one): its gradient is pulled back
to them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.func import vjp, vmap
from torch.fx import Node
from torch.utils._pytree import tree_leaves, tree_map

from zdp_bench.gradients.clipping import squared_norms
from zdp_bench.gradients.layer_gradient import (
    FORM_BYTES,
    LayerGradient,
    Summands,
    contract,
    summands_of,
    transform,
)
from zdp_bench.gradients.parts import Parts
from zdp_bench.gradients.program.calls import Place, module_of, name_of, named_arguments
from zdp_bench.gradients.program.table import BY_NUMBER, CUTS, EXPANDS, REPEATS, RESHAPES, VIEWS
from zdp_bench.gradients.rules import MAX_BYTES, NoRule, Rule, rule_of

Gradients = dict[str, LayerGradient]
COPIES = (*EXPANDS, *REPEATS)


@dataclass(frozen=True)
class Weight:
    """A place in an operation's arguments, for a tensor that follows from parameters."""

    number: int


@dataclass(frozen=True)
class Held:
    """A place in an operation's arguments, for another tensor."""

    number: int


@dataclass(frozen=True)
class Use:
    """One operation that parameters and examples meet in."""

    name: str  # of the module that calls it
    kind: str
    target: Any
    arguments: dict[str, Any]  # by name, with `Weight` and `Held` for tensors
    by_keyword: frozenset[str]
    weights: tuple[str, ...]  # names of the arguments that are weights
    views: tuple[bool, ...]  # whether each is a parameter, or a view of one
    places: tuple[Place | None, ...]  # of the `Held` ones; None holds no examples
    ranks: tuple[int, ...]  # of the `Held` ones
    place: Place  # of the result
    rank: int
    layer: nn.Module | None  # without memory, whose rule serves the operation

    @property
    def reads_examples(self) -> bool:
        """False if its gradients follow from the output's gradient alone."""
        return self.kind not in (*COPIES, "add")

    def whole(self, examples: list[Tensor]) -> list[Tensor]:
        """Return `rows` of the `Held` tensors of examples, with the rank that they had."""
        pairs = zip(self.places, self.ranks, strict=True)
        of_examples = [(place, rank) for place, rank in pairs if place is not None]
        return [_whole(row, *of) for row, of in zip(examples, of_examples, strict=True)]

    def call(self, weights: Any, held: Any) -> Tensor:
        """Return what the operation makes of other tensors."""

        def fill(value: Any) -> Any:
            if isinstance(value, Weight):
                return weights[value.number]
            return held[value.number] if isinstance(value, Held) else value

        given = {name: tree_map(fill, value) for name, value in self.arguments.items()}
        positional = [value for name, value in given.items() if name not in self.by_keyword]
        result: Tensor = self.target(*positional, **{name: given[name] for name in self.by_keyword})
        return result


def use_of(node: Node, weights: list[Node], held: list[Node], places: dict[Node, Any]) -> Use:
    """Return an operation as a use of the parameters that `weights` follow from."""
    if not isinstance(node.meta["val"], Tensor):
        raise NoRule(f"{name_of(node)} of parameters")
    target: Any = node.target
    if target._schema.is_mutable:
        raise NoRule(f"{name_of(node)} of a parameter in place")

    def mark(leaf: Any) -> Any:
        if leaf in weights:
            return Weight(weights.index(leaf))
        return Held(held.index(leaf)) if leaf in held else leaf

    arguments = dict(named_arguments(node))
    named = {name: tree_map(mark, value) for name, value in arguments.items()}
    sized = any(isinstance(leaf, Node) for leaf in tree_leaves(named))
    if sized and name_of(node) not in COPIES:
        raise NoRule(f"{name_of(node)} of parameters and the number of examples")
    names = [_name_of_argument(arguments, weight) for weight in weights]
    values = dict(zip(names, [weight.meta["val"] for weight in weights], strict=True))
    return Use(
        name=module_of(node),
        kind=name_of(node),
        target=target,
        arguments=named,
        by_keyword=frozenset(one.name for one in target._schema.arguments if one.kwarg_only),
        weights=tuple(names),
        views=tuple(map(_is_view, weights)),
        places=tuple(places.get(leaf) for leaf in held),
        ranks=tuple(leaf.meta["val"].dim() for leaf in held),
        place=places[node],
        rank=node.meta["val"].dim(),
        layer=_layer_of(name_of(node), arguments, values),
    )


def _name_of_argument(arguments: dict[str, Any], node: Node) -> str:
    found = [name for name, value in arguments.items() if node in tree_leaves(value)]
    return found[0] if len(found) == 1 and arguments[found[0]] is node else str(node)


def _is_view(node: Node) -> bool:
    """True if a weight holds each number of one parameter at most once."""
    kinds = {*VIEWS, *CUTS, *RESHAPES, "alias", "getitem"} - {"unfold"}
    while node.op != "placeholder":
        if name_of(node) not in kinds:
            return False
        node = node.args[0]  # type: ignore[assignment]
    return True


# ------------------------------------------------------------------------- operations as layers


def _layer_of(kind: str, given: dict[str, Any], weights: dict[str, Tensor]) -> nn.Module | None:
    """Return the layer that an operation is, without memory; None if it is none with a rule."""
    make = _LAYERS.get(kind)
    if make is None or not set(weights) <= {"weight", "bias", "other", "mat2"}:
        return None
    with torch.device("meta"):
        return make(given)


def _shape(given: dict[str, Any]) -> Tensor:
    value: Tensor = given["weight"].meta["val"]
    return value


def _linear(given: dict[str, Any]) -> nn.Module | None:
    weight = _shape(given)
    if weight.dim() != 2:
        return None
    return nn.Linear(weight.shape[1], weight.shape[0], dtype=weight.dtype)


def _product(given: dict[str, Any]) -> nn.Module | None:
    node: Any = given.get("other", given.get("mat2"))
    right = node.meta["val"]
    if right.dim() != 2:
        return None
    return nn.Linear(right.shape[0], right.shape[1], dtype=right.dtype)


def _convolution(kind: type[nn.Module], transposed: bool) -> Callable[..., nn.Module | None]:
    def make(given: dict[str, Any]) -> nn.Module:
        weight = _shape(given)
        first, second, groups = weight.shape[0], weight.shape[1], given["groups"]
        channels = (first, second * groups) if transposed else (second * groups, first)
        dims = weight.dim() - 2
        numbers = {
            name: _each(given[name], dims)
            for name in ("stride", "padding", "dilation", "output_padding")
            if name in given
        }
        bias = given["bias"] is not None
        size = tuple(weight.shape[2:])
        return kind(*channels, size, groups=groups, bias=bias, dtype=weight.dtype, **numbers)

    return make


def _each(value: Any, dims: int) -> Any:
    if isinstance(value, str):
        return value
    values = tuple(value) if isinstance(value, list | tuple) else (value,)
    return values * dims if len(values) == 1 else values


def _embedding(given: dict[str, Any]) -> nn.Module:
    table, padding = _shape(given), given["padding_idx"]
    rows, width = table.shape
    return nn.Embedding(rows, width, padding_idx=None if padding < 0 else padding)


def _layer_norm(given: dict[str, Any]) -> nn.Module:
    return nn.LayerNorm(list(given["normalized_shape"]), given["eps"])


def _rms_norm(given: dict[str, Any]) -> nn.Module:
    return nn.RMSNorm(list(given["normalized_shape"]), given["eps"])


def _group_norm(given: dict[str, Any]) -> nn.Module:
    channels = given["input"].meta["val"].shape[1]
    return nn.GroupNorm(given["num_groups"], channels, given["eps"])


def _instance_norm(given: dict[str, Any]) -> nn.Module:
    value = given["input"].meta["val"]
    kinds = {3: nn.InstanceNorm1d, 4: nn.InstanceNorm2d, 5: nn.InstanceNorm3d}
    return kinds[value.dim()](value.shape[1], given["eps"], affine=True)


def _prelu(given: dict[str, Any]) -> nn.Module:
    return nn.PReLU(_shape(given).numel())


_LAYERS: dict[str, Callable[[dict[str, Any]], nn.Module | None]] = {
    "linear": _linear,
    "matmul": _product,
    "mm": _product,
    "conv1d": _convolution(nn.Conv1d, False),
    "conv2d": _convolution(nn.Conv2d, False),
    "conv3d": _convolution(nn.Conv3d, False),
    "conv_transpose1d": _convolution(nn.ConvTranspose1d, True),
    "conv_transpose2d": _convolution(nn.ConvTranspose2d, True),
    "conv_transpose3d": _convolution(nn.ConvTranspose3d, True),
    "embedding": _embedding,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "instance_norm": _instance_norm,
    "prelu": _prelu,
}
# Layers of maps [B, C, *]: of several maps an example, each has its gradient, and they are added.
OF_MAPS = ("conv", "group_norm", "instance_norm", "prelu")


# --------------------------------------------------------------------------------- examples first


def rows(tensor: Tensor, place: Place, examples: int) -> Tensor:
    """Return [B, ...]: the examples of a tensor first, its dimension `dim` without them behind."""
    size = tensor.shape[place.dim]
    if size == examples:
        return tensor if place.dim == 0 else tensor.movedim(place.dim, 0)
    outer = size // (examples * place.inner)
    apart = tensor.unflatten(place.dim, (outer, examples, place.inner))
    return apart.movedim(place.dim + 1, 0).flatten(place.dim + 1, place.dim + 2)


def _whole(row: Tensor, place: Place, rank: int) -> Tensor:
    """Return `rows` with a dimension in the place of the examples': what a batch of one has."""
    return row if row.dim() > rank else row.unsqueeze(1 + place.dim)


# ------------------------------------------------------------------------------------- gradients


def bind(
    use: Use, weights: tuple[Tensor, ...], held: tuple[Tensor, ...]
) -> tuple[dict[str, nn.Parameter], Rule]:
    """Return the parameters that a call's weights follow from, and the rule of their gradients.

    The rule takes the examples' arguments and the output's gradient, examples first.
    """
    own: dict[str, nn.Parameter] = {}
    sources: dict[str, list[str]] = {}
    for name, weight in zip(use.weights, weights, strict=True):
        if not weight.requires_grad:
            continue
        parameters = _parameters_of(weight)
        names = [
            f"{name} {number}" if len(parameters) > 1 else name for number in range(len(parameters))
        ]
        sources[name] = names
        own.update(zip(names, parameters, strict=True))
    others = [None if place else tensor for place, tensor in zip(use.places, held, strict=True)]
    values = [weight.detach() for weight in weights]
    operands = Operands(use, values, others, [weight.requires_grad for weight in weights])

    def pulled(_: nn.Module, x: Any, g: Tensor) -> Gradients:
        of_weights = _gradients(operands, x, g)
        gradients = {}
        for name, names in sources.items():
            number = use.weights.index(name)
            weight, gradient = weights[number], of_weights[name]
            for key in names:
                gradients[key] = gradient
                if weight is not own[key]:
                    gradients[key] = _pull_back(gradient, weight, own[key], use.views[number])
        return gradients

    return own, pulled


def _parameters_of(weight: Tensor) -> list[Any]:
    """Return the parameters that a weight was computed from."""
    if weight.is_leaf:
        return [weight]
    found, seen, left = [], set(), [weight.grad_fn]
    while left:
        node: Any = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        left += [of for of, _ in node.next_functions]
    return found


def _pull_back(
    gradient: LayerGradient, weight: Tensor, parameter: Tensor, is_view: bool
) -> LayerGradient:
    """Return the gradients of a parameter, from those of a weight that was computed from it."""

    def back(gradients: Tensor) -> Tensor:
        batched = gradients.dim() > weight.dim()
        gradients = gradients.to(weight.dtype).resolve_conj()
        with torch.enable_grad():
            (found,) = grad(
                weight, parameter, gradients, retain_graph=True, is_grads_batched=batched
            )
        return found.detach()

    if is_view:  # the same numbers, at other places
        return transform(gradient, back, 1.0, 1)
    few = max(1, FORM_BYTES // parameter.nbytes)

    def form(start: int, stop: int) -> Tensor:
        return back(gradient.per_sample(start, stop))

    # The sum is that of the gradients which were measured: how far rounding errors of another
    # sum would be stretched on their way back is not known.
    def weighted_sum(factors: Tensor) -> Tensor:
        parts = [
            contract(form(at, at + len(some)), some)
            for at, some in zip(range(0, len(factors), few), factors.split(few), strict=True)
        ]
        return torch.stack(parts).sum(dim=0)

    def norms(examples: int) -> Tensor:
        starts = range(0, examples, few)
        return torch.cat([squared_norms(form(at, min(at + few, examples))) for at in starts])

    def count() -> int:
        return len(summands_of(gradient).mass)

    return LayerGradient(form, weighted_sum, squared_norms=lambda: norms(count()))


@dataclass(frozen=True)
class Operands:
    """What an operation combines in one call, beside its examples."""

    use: Use
    weights: list[Tensor]
    others: list[Tensor | None]  # in the place of `Held` ones that hold no examples
    wanted: list[bool]  # which weights have gradients

    def held(self, examples: list[Tensor]) -> list[Tensor]:
        """Return all `Held` tensors, with these in the places of the examples."""
        left = iter(examples)
        return [next(left) if other is None else other for other in self.others]


def _gradients(operands: Operands, x: Parts, g: Tensor) -> Gradients:
    """Return the gradients of an operation's weights, by the argument's name."""
    use = operands.use
    if use.layer is not None and (rule := rule_of(use.layer)):
        return _of_layer(use, rule, x.leaves, g)
    size = len(g) * sum(weight.nbytes for weight in operands.weights)
    if size > MAX_BYTES:
        raise NoRule(f"{use.kind}, whose per-example gradients take {size:,} bytes")
    whole = _whole(g, use.place, use.rank)
    if use.kind in REPEATS:
        gradients = [_unrepeated(whole, operands.weights[0])]
    elif use.kind in EXPANDS:
        gradients = [whole]
    elif use.kind == "add":
        scale = use.arguments["alpha"] if use.weights[0] == "other" else 1
        gradients = [whole if scale == 1 else whole * scale] * len(use.weights)
    elif use.kind in BY_NUMBER and use.kind != "masked_fill":  # which takes one number alone
        gradients = _by_number(operands, x, whole)
    else:
        gradients = _by_torch(operands, x, whole)
    pairs = zip(use.weights, gradients, operands.weights, strict=True)
    return {name: LayerGradient.of(_reduce(found, weight)) for name, found, weight in pairs}


def _of_layer(use: Use, rule: Any, examples: list[Tensor], g: Tensor) -> Gradients:
    layer, (x,) = use.layer, examples
    assert layer is not None
    if use.kind in ("matmul", "mm"):
        found = rule(layer, x, g)["weight"]
        return {use.weights[0]: transform(found, lambda gradient: gradient.mT, 1.0, 1)}
    if not use.kind.startswith(OF_MAPS) or g.dim() == use.rank:
        gradients: Gradients = rule(layer, x, g)
        return gradients
    pieces = g.shape[1]
    of_pieces = rule(layer, x.flatten(0, 1), g.flatten(0, 1))
    return {name: _add_pieces(gradient, pieces) for name, gradient in of_pieces.items()}


def _add_pieces(gradient: LayerGradient, pieces: int) -> LayerGradient:
    """Return the gradients of examples, from those of so many pieces of each."""

    def per_sample(start: int, stop: int) -> Tensor:
        each = gradient.per_sample(start * pieces, stop * pieces)
        return each.unflatten(0, (-1, pieces)).sum(dim=1)

    def summands() -> Summands:
        each = summands_of(gradient)
        return Summands(each.mass.unflatten(0, (-1, pieces)).sum(dim=1), each.number * pieces)

    return LayerGradient(
        per_sample,
        lambda factors: gradient.weighted_sum(factors.repeat_interleave(pieces)),
        summands=summands,
    )


def _reduce(gradients: Tensor, weight: Tensor) -> Tensor:
    """Add up [B, *] over the dimensions that a weight was broadcast along: [B, *shape]."""
    if gradients.is_complex() and not weight.is_complex():
        gradients = gradients.real
    more = gradients.dim() - 1 - weight.dim()
    dims = [*range(1, 1 + more)]
    sizes = zip(weight.shape, gradients.shape[1 + more :], strict=True)
    dims += [1 + more + at for at, (own, size) in enumerate(sizes) if own == 1 and size != 1]
    reduced = gradients.sum(dim=dims) if dims else gradients
    return reduced.reshape(len(gradients), *weight.shape)


def _unrepeated(gradients: Tensor, weight: Tensor) -> Tensor:
    """Add up the gradients [B, *] of copies that lie behind each other: [B, *shape]."""
    shape = gradients.shape[1:]
    sizes = [*[1] * (len(shape) - weight.dim()), *weight.shape]
    pairs = [(whole // size, size) for whole, size in zip(shape, sizes, strict=True)]
    apart = gradients.reshape(len(gradients), *[number for pair in pairs for number in pair])
    return apart.sum(dim=[*range(1, 2 * len(shape), 2)])


def _by_number(operands: Operands, x: Parts, g: Tensor) -> list[Tensor]:
    """Differentiate broadcast arithmetic: every weight once for each number of the result."""
    use = operands.use
    shape = g.shape
    wide = [weight.expand(shape[1:]).expand(shape) for weight in operands.weights]
    wide = [
        weight.clone().requires_grad_() if wanted else weight
        for weight, wanted in zip(wide, operands.wanted, strict=True)
    ]
    examples = []
    for one in use.whole(x.leaves):
        missing = use.rank - (one.dim() - 1)
        examples.append(one.reshape(len(one), *[1] * missing, *one.shape[1:]))
    with torch.enable_grad():
        result = use.call(wide, operands.held(examples))
    trained = [weight for weight in wide if weight.requires_grad]
    found = iter(grad(result, trained, g.to(result.dtype)))
    return [next(found) if w.requires_grad else torch.zeros_like(w) for w in wide]


def _by_torch(operands: Operands, x: Parts, g: Tensor) -> list[Tensor]:
    """Differentiate an operation for one example after another, in one pass of torch.func."""
    use = operands.use
    whole = use.whole(x.leaves)

    def differentiate_one(gradient: Tensor, *examples: Tensor) -> tuple[Tensor, ...]:
        held = operands.held(list(examples))
        back = vjp(lambda *weights: use.call(weights, held), *operands.weights)[1]
        found: tuple[Tensor, ...] = back(gradient)
        return found

    try:
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")
            return list(vmap(differentiate_one, randomness="error")(g, *whole))
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise NoRule(f"{use.kind}, which torch.func cannot take apart ({reason})") from None
