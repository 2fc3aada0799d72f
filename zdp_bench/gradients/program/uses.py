"""The per-example gradients of parameters that an operation of a program uses.

A *use* is an operation in which parameters and examples meet: `x * scale`, `conv2d(x, weight)`. Its
*weights* are the arguments that follow from parameters: a parameter itself, a view of one
(`weight.T`), or what was computed from some (a normalised weight). The per-example gradients of its
weights follow from the other arguments and the gradient of its result, in one of these ways:

    as a layer        `conv2d(x, weight)` has the rule of `nn.Conv2d` (`layers`)
    as it is          a weight that is only copied, or added to the examples, has the result's
    number by number  autograd differentiates `x * scale` with a copy of `scale` for each example
    by torch.func     any other operation, example by example

They are then pulled back from the weight to its parameters. All of them are added up over the uses
of a parameter, so that it does not matter whether two layers share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.func import vjp
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
from zdp_bench.gradients.mapping import map_rows
from zdp_bench.gradients.parts import Parts
from zdp_bench.gradients.program.autograd import graph_nodes
from zdp_bench.gradients.program.calls import (
    ALIKE,
    Place,
    Places,
    module_of,
    name_of,
    named_arguments,
    nodes_in,
    rank_of,
)
from zdp_bench.gradients.program.layers import LAYER_PRODUCTS, OF_MAPS, layer_of
from zdp_bench.gradients.program.table import BY_NUMBER, CUTS, EXPANDS, REPEATS, RESHAPES, VIEWS
from zdp_bench.gradients.rules import MAX_BYTES, NoRule, Rule, rule_of

Gradients = dict[str, LayerGradient]  # of the weights, by the argument's name
COPIES = (*EXPANDS, *REPEATS)
VIEWS_OF_A_PARAMETER = {*VIEWS, *CUTS, *RESHAPES, "alias", "getitem"} - {"unfold"}


@dataclass(frozen=True)
class Weight:
    """An argument that follows from parameters, and from no example."""

    node: Node
    argument: str  # its name
    is_view: bool  # it holds each number of one parameter at most once


@dataclass(frozen=True)
class Other:
    """An argument, a tensor, that follows from no parameter, or from examples as well."""

    node: Node
    place: Place | None  # of the examples; None if it holds none
    rank: int


@dataclass(frozen=True)
class Use:
    """One operation in which parameters and examples meet."""

    name: str  # of the module that calls it
    kind: str  # name of the operation
    target: Any  # the operation itself
    arguments: dict[str, Any]  # by name; nodes stand for tensors
    weights: list[Weight]
    others: list[Other]
    place: Place  # of the examples in the result
    rank: int  # of the result
    layer: nn.Module | None  # whose rule serves the operation; without memory

    def examples_in(
        self,
        others: Sequence[Tensor],
    ) -> tuple[list[Tensor], list[Place]]:
        """Return those of the `others` that hold examples which gradients depend on.

        The gradient of a weight that is copied or added is the result's, whatever the examples are.
        """
        if self.kind == "add" or self.kind in COPIES:
            return [], []
        examples, places = [], []
        for other, tensor in zip(self.others, others, strict=True):
            if other.place is not None:
                examples.append(tensor)
                places.append(other.place)
        return examples, places

    def call(self, tensors: dict[Node, Tensor]) -> Tensor:
        """Return the operation's result, with these tensors in the places of their nodes."""
        positional = []
        keywords = {}
        for argument in self.target._schema.arguments:
            value = self.arguments[argument.name]
            filled = tree_map(lambda leaf: tensors.get(leaf, leaf), value)
            if argument.kwarg_only:
                keywords[argument.name] = filled
            else:
                positional.append(filled)
        result: Tensor = self.target(*positional, **keywords)
        return result


def use_of(
    node: Node,
    weights: list[Node],
    others: list[Node],
    places: Places,
) -> Use:
    """Return an operation as a use of the parameters that `weights` follow from.

    Args:
        node: the operation.
        weights: its arguments that follow from parameters.
        others: all other tensors among its arguments.
        places: where the examples are in each tensor that holds some.

    Raises:
        NoRule: its per-example gradients are beyond this module.
    """
    kind = name_of(node)
    target: Any = node.target
    if not isinstance(node.meta["val"], Tensor):
        raise NoRule(f"{kind} of parameters")
    if target._schema.is_mutable:
        raise NoRule(f"{kind} of a parameter in place")
    arguments = dict(named_arguments(node))
    sizes = set(nodes_in(arguments)) - {*weights, *others}
    if sizes and kind not in COPIES:
        raise NoRule(f"{kind} of parameters and the number of examples")
    place = places[node]
    if place.inner == ALIKE:  # which rows are an example's, later operations say
        raise NoRule(f"{kind} of a parameter to several rows an example")

    def place_of(other: Node) -> Place | None:
        own: Place | None = places.get(other)
        is_alike = own is not None and own.inner == ALIKE
        return Place(own.dim, place.inner) if own is not None and is_alike else own

    names = [_name_of_argument(arguments, weight) for weight in weights]
    return Use(
        name=module_of(node),
        kind=kind,
        target=target,
        arguments=arguments,
        weights=[
            Weight(weight, name, _is_view(weight))
            for weight, name in zip(weights, names, strict=True)
        ],
        others=[Other(other, place_of(other), rank_of(other)) for other in others],
        place=place,
        rank=rank_of(node),
        layer=layer_of(kind, arguments, names),
    )


def _name_of_argument(arguments: dict[str, Any], node: Node) -> str:
    """Return the name of the argument that a node is; the node's if it is in a list, or twice."""
    names = [name for name, value in arguments.items() if node in tree_leaves(value)]
    is_argument = len(names) == 1 and arguments[names[0]] is node
    return names[0] if is_argument else str(node)


def _is_view(node: Node) -> bool:
    """True if a weight holds each number of one parameter at most once."""
    while node.op != "placeholder":
        if name_of(node) not in VIEWS_OF_A_PARAMETER:
            return False
        node = node.args[0]  # type: ignore[assignment]
    return True


# ------------------------------------------------------------------------ examples in front


def rows(tensor: Tensor, place: Place, examples: int) -> Tensor:
    """Return [B, ...]: the dimension of the examples in front.

    Where there are several numbers of each example in it, they keep a dimension of their own.
    """
    size = tensor.shape[place.dim]
    if size == examples:
        return tensor if place.dim == 0 else tensor.movedim(place.dim, 0)
    outer = size // (examples * place.inner)
    apart = tensor.unflatten(place.dim, (outer, examples, place.inner))
    in_front = apart.movedim(place.dim + 1, 0)
    return in_front.flatten(place.dim + 1, place.dim + 2)


def _as_batches_of_one(rows: Tensor, place: Place, rank: int) -> Tensor:
    """Return [B, *]: each example with the `rank` that a tensor of a batch has."""
    if rows.dim() > rank:
        return rows
    return rows.unsqueeze(1 + place.dim)


# --------------------------------------------------------------------------------- gradients


@dataclass(frozen=True)
class _Origin:
    """A parameter that a weight follows from."""

    key: str  # by which the rule returns the parameter's gradient
    parameter: nn.Parameter
    weight: Weight
    tensor: Tensor  # the weight, as autograd follows it from the parameter


def bind(
    use: Use,
    weights: Sequence[Tensor],
    others: Sequence[Tensor],
) -> tuple[dict[str, nn.Parameter], Rule]:
    """Return the parameters that one call's weights follow from, and the rule of their gradients.

    The rule takes the examples of the call and the gradient of its result, examples in front.
    """
    origins = []
    tensors = {}
    for weight, tensor in zip(use.weights, weights, strict=True):
        tensors[weight.node] = tensor.detach()
        if tensor.requires_grad:
            origins += _origins_of(weight, tensor)
    for other, tensor in zip(use.others, others, strict=True):
        if other.place is None:
            tensors[other.node] = tensor
    trained = {origin.weight: None for origin in origins}
    call = _Call(use, list(trained), tensors)

    def rule(
        _: nn.Module,
        x: Any,
        g: Tensor,
    ) -> Gradients:
        of_weights = call.differentiate(x, g)
        return {
            origin.key: _pull_back(of_weights[origin.weight.argument], origin) for origin in origins
        }

    return {origin.key: origin.parameter for origin in origins}, rule


def _origins_of(weight: Weight, tensor: Tensor) -> list[_Origin]:
    parameters = _parameters_behind(tensor)
    keys = [weight.argument]
    if len(parameters) > 1:
        keys = [f"{weight.argument} {number}" for number in range(len(parameters))]
    return [
        _Origin(key, parameter, weight, tensor)
        for key, parameter in zip(keys, parameters, strict=True)
    ]


def _parameters_behind(weight: Tensor) -> list[Any]:
    """Return the parameters that a weight is, or was computed from."""
    if weight.is_leaf:
        return [weight]
    leaves = [node for node in graph_nodes(weight) if hasattr(node, "variable")]
    return [leaf.variable for leaf in leaves]


def _pull_back(gradient: LayerGradient, origin: _Origin) -> LayerGradient:
    """Return the gradients of a parameter, from those of a weight that follows from it."""
    weight, parameter = origin.tensor, origin.parameter
    if weight is parameter:
        return gradient

    def pull_back(gradients: Tensor) -> Tensor:
        gradients = gradients.to(weight.dtype).resolve_conj()
        with torch.enable_grad():
            (of_parameter,) = grad(
                weight,
                parameter,
                gradients,
                retain_graph=True,
                is_grads_batched=gradients.dim() > weight.dim(),
            )
        return of_parameter.detach()

    if origin.weight.is_view:  # the same numbers at other places
        return transform(gradient, pull_back, 1.0, 1)
    at_once = max(1, FORM_BYTES // parameter.nbytes)

    def per_sample(start: int, stop: int) -> Tensor:
        return pull_back(gradient.per_sample(start, stop))

    # The sum is that of the gradients which were measured: how far rounding errors of another
    # sum would be stretched on their way back is not known.
    def weighted_sum(factors: Tensor) -> Tensor:
        sums = []
        start = 0
        for chunk in factors.split(at_once):
            stop = start + len(chunk)
            sums.append(contract(per_sample(start, stop), chunk))
            start = stop
        return torch.stack(sums).sum(dim=0)

    def norms() -> Tensor:
        examples = len(summands_of(gradient).mass)
        squares = []
        for start in range(0, examples, at_once):
            stop = min(start + at_once, examples)
            squares.append(squared_norms(per_sample(start, stop)))
        return torch.cat(squares)

    return LayerGradient(per_sample, weighted_sum, squared_norms=norms)


@dataclass(frozen=True)
class _Call:
    """A use with the tensors of one call, except its examples."""

    use: Use
    trained: list[Weight]  # weights whose gradients are wanted
    tensors: dict[Node, Tensor]  # all weights, and other arguments that hold no examples

    def differentiate(self, x: Parts, g: Tensor) -> Gradients:
        """Return the gradients of the trained weights.

        Args:
            x: the arguments that hold examples, [B, ...] each.
            g: the gradient of the result, [B, ...].

        Raises:
            NoRule: they take too much memory, or torch.func cannot take the operation apart.
        """
        use = self.use
        if use.layer is not None:
            return _differentiate_layer(use, use.layer, x.leaves, g)
        bytes_per_example = sum(self.tensors[weight.node].nbytes for weight in use.weights)
        size = len(g) * bytes_per_example
        if size > MAX_BYTES:
            raise NoRule(f"{use.kind}, whose per-example gradients take {size:,} bytes")
        g = _as_batches_of_one(g, use.place, use.rank)
        if use.kind in REPEATS:
            copied = use.weights[0]
            gradients = [_add_copies(g, self.tensors[copied.node])]
        elif use.kind in EXPANDS:
            gradients = [g]
        elif use.kind == "add":
            is_scaled = use.weights[0].argument == "other"  # input + alpha · other
            alpha = use.arguments["alpha"] if is_scaled else 1
            gradients = [g if alpha == 1 else g * alpha]
        elif use.kind in BY_NUMBER and use.kind != "masked_fill":  # which takes one number alone
            gradients = self._differentiate_by_number(x, g)
        else:
            gradients = self._differentiate_by_torch(x, g)
        of_weights = {}
        for weight, wide in zip(self.trained, gradients, strict=True):
            gradient = _add_broadcast(wide, self.tensors[weight.node])
            of_weights[weight.argument] = LayerGradient.from_gradients(gradient)
        return of_weights

    def _differentiate_by_number(self, x: Parts, g: Tensor) -> list[Tensor]:
        """Differentiate broadcast arithmetic: copies of a weight, one for each number of g."""
        tensors = dict(self.tensors)
        for node, examples in self._examples(x).items():
            _, *shape = examples.shape
            missing = g.dim() - examples.dim()
            tensors[node] = examples.reshape(len(g), *[1] * missing, *shape)
        for weight in self.use.weights:
            tensors[weight.node] = tensors[weight.node].expand(g.shape)
        copies = []
        for weight in self.trained:
            copy = tensors[weight.node].clone().requires_grad_()
            tensors[weight.node] = copy
            copies.append(copy)
        with torch.enable_grad():
            result = self.use.call(tensors)
        return list(grad(result, copies, g.to(result.dtype)))

    def _differentiate_by_torch(self, x: Parts, g: Tensor) -> list[Tensor]:
        """Differentiate any operation for one example after another, in one pass of torch.func."""
        nodes = [weight.node for weight in self.trained]
        values = [self.tensors[node] for node in nodes]

        def differentiate_one(
            g: Tensor,
            example: dict[Node, Tensor],
        ) -> tuple[Tensor, ...]:
            def output(*weights: Tensor) -> Tensor:
                trained = dict(zip(nodes, weights, strict=True))
                return self.use.call(self.tensors | example | trained)

            pull_back = vjp(output, *values)[1]
            gradients: tuple[Tensor, ...] = pull_back(g)
            return gradients

        try:
            with torch.enable_grad():
                return list(map_rows(differentiate_one, g, self._examples(x)))
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise NoRule(
                f"{self.use.kind}, which torch.func cannot take apart ({reason})"
            ) from None

    def _examples(self, x: Parts) -> dict[Node, Tensor]:
        """Return [B, *] for each argument that holds examples, one with its batch's rank."""
        arguments = [other for other in self.use.others if other.place is not None]
        examples = {}
        for argument, tensor in zip(arguments, x.leaves, strict=True):
            assert argument.place is not None
            examples[argument.node] = _as_batches_of_one(tensor, argument.place, argument.rank)
        return examples


def _differentiate_layer(
    use: Use,
    layer: nn.Module,
    examples: list[Tensor],
    g: Tensor,
) -> Gradients:
    """Return the gradients by the rule of the layer that the operation is."""
    rule = rule_of(layer)
    assert rule is not None  # `layer_of` makes no other
    (x,) = examples
    if use.kind in LAYER_PRODUCTS:
        transposed = rule(layer, x, g)["weight"]
        gradient = transform(transposed, lambda gradients: gradients.mT, 1.0, 1)
        return {use.weights[0].argument: gradient}
    has_several_maps = use.kind in OF_MAPS and g.dim() > use.rank
    if not has_several_maps:
        return rule(layer, x, g)
    maps = g.shape[1]
    x, g = x.flatten(0, 1), g.flatten(0, 1)
    return {name: _add_maps(of_maps, maps) for name, of_maps in rule(layer, x, g).items()}


def _add_maps(gradient: LayerGradient, maps: int) -> LayerGradient:
    """Return the gradients of examples, from those of the `maps` that each has."""

    def per_sample(start: int, stop: int) -> Tensor:
        of_maps = gradient.per_sample(start * maps, stop * maps)
        return of_maps.unflatten(0, (-1, maps)).sum(dim=1)

    def weighted_sum(factors: Tensor) -> Tensor:
        return gradient.weighted_sum(factors.repeat_interleave(maps))

    def summands() -> Summands:
        mass, number = summands_of(gradient)
        mass_of_maps = mass.unflatten(0, (-1, maps))
        return Summands(mass_of_maps.sum(dim=1), number * maps)

    return LayerGradient(per_sample, weighted_sum, summands=summands)


def _add_broadcast(gradients: Tensor, weight: Tensor) -> Tensor:
    """Add up [B, *] over the dimensions that a weight was broadcast along: [B, *shape]."""
    if gradients.is_complex() and not weight.is_complex():
        gradients = gradients.real
    examples = len(gradients)
    missing = gradients.dim() - 1 - weight.dim()
    total = gradients.sum_to_size(examples, *[1] * missing, *weight.shape)
    return total.reshape(examples, *weight.shape)


def _add_copies(gradients: Tensor, weight: Tensor) -> Tensor:
    """Add up the gradients [B, *] of copies that lie behind each other: [B, *shape]."""
    shape = gradients.shape[1:]
    missing = len(shape) - weight.dim()
    sizes = [1] * missing + list(weight.shape)
    copies_and_sizes: list[int] = []
    for whole, size in zip(shape, sizes, strict=True):
        copies_and_sizes += [whole // size, size]
    apart = gradients.reshape(len(gradients), *copies_and_sizes)
    dims_of_copies = list(range(1, apart.dim(), 2))
    return apart.sum(dim=dims_of_copies)
