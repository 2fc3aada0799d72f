"""The per-example gradients of parameters that an operation of a program uses.

A *use* is an operation that combines parameters and examples: `x * scale`, `conv2d(x, weight)`. Its
*weights* are the arguments that depend on parameters: a parameter itself, a view of one
(`weight.T`), or a tensor computed from parameters (a normalised weight). The per-example gradients
of the weights follow from the other arguments and the gradient of the result, in one of these ways:

    as a layer      `conv2d(x, weight)` has the rule of `nn.Conv2d` (`layers`)
    directly        the gradient of a weight that is copied, or added to the examples, is the
                    gradient of the result
    elementwise     autograd differentiates `x * scale` with a copy of `scale` for each example
    by torch.func   any other operation, mapped over the examples

The gradients are then pulled back from a weight to its parameters, and added up over the uses of a
parameter. Two layers may therefore share one.
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

from zdp_bench.errors import is_out_of_memory
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
    """An argument that depends on parameters, but not on examples."""

    node: Node
    argument: str  # the argument's name
    is_view: bool  # True if it contains each entry of one parameter at most once


@dataclass(frozen=True)
class Other:
    """A tensor argument that does not depend on parameters, or depends on examples as well."""

    node: Node
    place: Place | None  # where the examples are; None if it contains none
    rank: int  # number of dimensions


@dataclass(frozen=True)
class Use:
    """One operation that combines parameters and examples.

    Attributes:
        name: name of the module that calls it.
        kind: name of the operation.
        target: the operation itself.
        arguments: arguments by name; nodes stand for tensors.
        weights: arguments that depend on parameters only.
        others: all other tensors among the arguments.
        place: where the examples are in the result.
        rank: number of dimensions of the result.
        layer: layer on the meta device whose rule is used for the operation; None if there is none.
    """

    name: str
    kind: str
    target: Any
    arguments: dict[str, Any]
    weights: list[Weight]
    others: list[Other]
    place: Place
    rank: int
    layer: nn.Module | None

    def examples_in(
        self,
        others: Sequence[Tensor],
    ) -> tuple[list[Tensor], list[Place]]:
        """Return the tensors in `others` that contain examples, and where the examples are.

        The result is empty for a weight that is copied or added, because its gradient does not
        depend on the examples.
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
        """Run the operation, with tensors in place of their nodes."""
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
    """Return an operation as a use of parameters.

    Args:
        node: the operation.
        weights: its arguments that depend on parameters only.
        others: all other tensors among its arguments.
        places: where the examples are in each tensor that contains some.

    Raises:
        NoRule: this module does not support the operation.
    """
    kind = name_of(node)
    target: Any = node.target
    if not isinstance(node.meta["val"], Tensor):
        raise NoRule(f"{kind} of parameters")
    if target._schema.is_mutable:
        raise NoRule(f"{kind} of a parameter, in place")
    arguments = dict(named_arguments(node))
    sizes = set(nodes_in(arguments)) - {*weights, *others}
    if sizes and kind not in COPIES:
        raise NoRule(f"{kind} of parameters and the batch size")
    place = places[node]
    if place.inner == ALIKE:  # only later operations decide which rows belong to an example
        raise NoRule(f"{kind} of a parameter and several rows per example")

    def place_of(other: Node) -> Place | None:
        other_place: Place | None = places.get(other)
        if other_place is not None and other_place.inner == ALIKE:
            return Place(other_place.dim, place.inner)
        return other_place

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
    """Return the name of the argument that a node is.

    For a node in a list, or one that is given twice, return the node's own name.
    """
    names = [name for name, value in arguments.items() if node in tree_leaves(value)]
    is_argument = len(names) == 1 and arguments[names[0]] is node
    return names[0] if is_argument else str(node)


def _is_view(node: Node) -> bool:
    """Return True if a weight contains each entry of one parameter at most once."""
    while node.op != "placeholder":
        if name_of(node) not in VIEWS_OF_A_PARAMETER:
            return False
        node = node.args[0]  # type: ignore[assignment]
    return True


# ------------------------------------------------------------------------ examples first


def move_examples_first(tensor: Tensor, place: Place, examples: int) -> Tensor:
    """Return a tensor with the dimension of the examples first, [B, ...].

    If this dimension contains several rows of each example, they get a dimension of their own.
    """
    size = tensor.shape[place.dim]
    if size == examples:
        return tensor if place.dim == 0 else tensor.movedim(place.dim, 0)
    outer = size // (examples * place.inner)
    split = tensor.unflatten(place.dim, (outer, examples, place.inner))
    examples_first = split.movedim(place.dim + 1, 0)
    return examples_first.flatten(place.dim + 1, place.dim + 2)


def _as_batches_of_one(rows: Tensor, place: Place, rank: int) -> Tensor:
    """Return [B, *], where each example has `rank` dimensions, as a batch has."""
    if rows.dim() > rank:
        return rows
    return rows.unsqueeze(1 + place.dim)


# --------------------------------------------------------------------------------- gradients


@dataclass(frozen=True)
class _Origin:
    """A parameter that a weight depends on."""

    key: str  # key of the parameter's gradient in the rule's result
    parameter: nn.Parameter
    weight: Weight
    tensor: Tensor  # the weight, with autograd's graph back to the parameter


def bind(
    use: Use,
    weights: Sequence[Tensor],
    others: Sequence[Tensor],
) -> tuple[dict[str, nn.Parameter], Rule]:
    """Return the parameters that the weights of one call depend on, and the rule for the call.

    The rule takes the examples of the call and the gradient of its result, both [B, ...].
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
        gradients = call.differentiate(x, g)
        return {
            origin.key: _pull_back(gradients[origin.weight.argument], origin) for origin in origins
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
    """Return the parameters that a weight was computed from; a parameter itself in a list."""
    if weight.is_leaf:
        return [weight]
    leaves = [node for node in graph_nodes(weight) if hasattr(node, "variable")]
    return [leaf.variable for leaf in leaves]


def _pull_back(gradient: LayerGradient, origin: _Origin) -> LayerGradient:
    """Return the gradients of a parameter from those of a weight that depends on it."""
    weight, parameter = origin.tensor, origin.parameter
    if weight is parameter:
        return gradient

    def pull_back(gradients: Tensor) -> Tensor:
        gradients = gradients.to(weight.dtype).resolve_conj()
        with torch.enable_grad():
            (parameter_gradients,) = grad(
                weight,
                parameter,
                gradients,
                retain_graph=True,
                is_grads_batched=gradients.dim() > weight.dim(),
            )
        return parameter_gradients.detach()

    if origin.weight.is_view:  # the same entries in another order
        return transform(gradient, pull_back, 1.0, 1)
    examples_at_once = max(1, FORM_BYTES // max(1, parameter.nbytes))

    def per_sample(start: int, stop: int) -> Tensor:
        return pull_back(gradient.per_sample(start, stop))

    # This adds up the gradients that are measured. If the weight's gradients were added up first,
    # pulling the sum back could enlarge its rounding errors by an unknown factor.
    def weighted_sum(factors: Tensor) -> Tensor:
        sums = []
        start = 0
        for chunk in factors.split(examples_at_once):
            stop = start + len(chunk)
            sums.append(contract(per_sample(start, stop), chunk))
            start = stop
        return torch.stack(sums).sum(dim=0)

    def norms() -> Tensor:
        examples = len(summands_of(gradient).mass)
        squares = []
        for start in range(0, examples, examples_at_once):
            stop = min(start + examples_at_once, examples)
            squares.append(squared_norms(per_sample(start, stop)))
        return torch.cat(squares)

    return LayerGradient(per_sample, weighted_sum, squared_norms=norms)


@dataclass(frozen=True)
class _Call:
    """A use with the tensors of one call, except its examples."""

    use: Use
    trained: list[Weight]  # weights that depend on trainable parameters
    tensors: dict[Node, Tensor]  # all weights, and other arguments without examples

    def differentiate(self, x: Parts, g: Tensor) -> Gradients:
        """Return the gradients of the trained weights.

        Args:
            x: the arguments that contain examples, each [B, ...].
            g: the gradient of the result, [B, ...].

        Raises:
            NoRule: they take too much memory, or torch.func does not support the operation.
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
            gradients = [g if alpha == 1 else g * alpha.conjugate()]
        elif use.kind in BY_NUMBER and use.kind != "masked_fill":  # whose value must be a scalar
            gradients = self._differentiate_by_number(x, g)
        else:
            gradients = self._differentiate_by_torch(x, g)
        weight_gradients = {}
        for weight, broadcast in zip(self.trained, gradients, strict=True):
            gradient = _add_broadcast(broadcast, self.tensors[weight.node])
            weight_gradients[weight.argument] = LayerGradient.from_gradients(gradient)
        return weight_gradients

    def _differentiate_by_number(self, x: Parts, g: Tensor) -> list[Tensor]:
        """Differentiate elementwise arithmetic, with weights expanded to the shape of g."""
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
        """Differentiate any operation by torch.func, mapped over the examples."""
        nodes = [weight.node for weight in self.trained]
        values = [self.tensors[node] for node in nodes]

        def differentiate_one(
            g: Tensor,
            example: dict[Node, Tensor],
        ) -> tuple[Tensor, ...]:
            def compute_output(*weights: Tensor) -> Tensor:
                trained = dict(zip(nodes, weights, strict=True))
                return self.use.call(self.tensors | example | trained)

            pull_back = vjp(compute_output, *values)[1]
            gradients: tuple[Tensor, ...] = pull_back(g)
            return gradients

        try:
            with torch.enable_grad():
                return list(map_rows(differentiate_one, g, self._examples(x)))
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            reason = str(error).splitlines()[0]
            raise NoRule(
                f"{self.use.kind}, which torch.func cannot differentiate per example ({reason})"
            ) from None

    def _examples(self, x: Parts) -> dict[Node, Tensor]:
        """Return each argument that contains examples, [B, *], as batches of one example."""
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
    """Return the gradients by the rule of the layer that an operation corresponds to."""
    rule = rule_of(layer)
    assert rule is not None  # `layer_of` returns layers with a rule only
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
    return {name: _add_maps(gradient, maps) for name, gradient in rule(layer, x, g).items()}


def _add_maps(gradient: LayerGradient, maps: int) -> LayerGradient:
    """Return the gradients of examples from those of their maps, `maps` per example."""

    def per_sample(start: int, stop: int) -> Tensor:
        map_gradients = gradient.per_sample(start * maps, stop * maps)
        return map_gradients.unflatten(0, (-1, maps)).sum(dim=1)

    def weighted_sum(factors: Tensor) -> Tensor:
        return gradient.weighted_sum(factors.repeat_interleave(maps))

    def summands() -> Summands:
        mass, count = summands_of(gradient)
        mass_of_maps = mass.unflatten(0, (-1, maps))
        return Summands(mass_of_maps.sum(dim=1), count * maps)

    return LayerGradient(per_sample, weighted_sum, summands=summands)


def _add_broadcast(gradients: Tensor, weight: Tensor) -> Tensor:
    """Add up gradients [B, *] over the dimensions along which a weight was broadcast.

    Returns:
        Gradients of the weight, [B, *shape].
    """
    if gradients.is_complex() and not weight.is_complex():
        gradients = gradients.real
    examples = len(gradients)
    missing = gradients.dim() - 1 - weight.dim()
    total = gradients.sum_to_size(examples, *[1] * missing, *weight.shape)
    return total.reshape(examples, *weight.shape)


def _add_copies(gradients: Tensor, weight: Tensor) -> Tensor:
    """Add up the gradients [B, *] of a repeated weight's copies.

    Returns:
        Gradients of the weight, [B, *shape].
    """
    shape = gradients.shape[1:]
    missing = len(shape) - weight.dim()
    sizes = [1] * missing + list(weight.shape)
    copies_and_sizes: list[int] = []
    for whole, size in zip(shape, sizes, strict=True):
        copies_and_sizes += [whole // size, size]
    split = gradients.reshape(len(gradients), *copies_and_sizes)
    dims_of_copies = list(range(1, split.dim(), 2))
    return split.sum(dim=dims_of_copies)
