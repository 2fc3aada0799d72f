"""Cut a chain of layers so that each one learns from feedback instead of from the layers behind it
(for DP-DFA).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from zdp_bench.errors import UserError
from zdp_bench.gradients.clipping import layers


@dataclass
class Seen:
    """One forward pass, cut in front of every layer that learns by feedback; each part keeps its
    own graph.

    Attributes:
        arrived: layer -> its input, with the graph that leads back to the layer before.
        outputs: fully connected layer -> its output z, a leaf [B, n].
    """

    arrived: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)

    def clear(self) -> None:
        """Forget the pass."""
        self.arrived.clear()
        self.outputs.clear()


def cut_input(seen: Seen, name: str, layer: nn.Module, arguments: tuple[Any, ...]) -> tuple[Tensor]:
    """Hook before a layer: keep its input, and give it a copy without a graph."""
    if name in seen.arrived:
        raise UserError(
            f"algorithm=dp_dfa: layer '{name}' is called twice; feedback alignment needs a chain "
            "of layers."
        )
    # a MapLinear takes whole maps
    seen.arrived[name] = arguments[0].flatten(1) if isinstance(layer, nn.Linear) else arguments[0]
    return (arguments[0].detach(),)


def cut_output(
    seen: Seen, name: str, layer: nn.Module, arguments: tuple[Any, ...], output: Tensor
) -> Tensor:
    """Hook after a fully connected layer: its output becomes a leaf."""
    if output.dim() != 2:
        raise UserError(
            f"algorithm=dp_dfa: layer '{name}' answers with {output.dim() - 1} dimensions a "
            "record; it must be one."
        )
    seen.outputs[name] = output.detach().requires_grad_()
    return seen.outputs[name]


def split_chain(model: nn.Module) -> tuple[list[str], dict[str, nn.Linear]]:
    """Return the names of the layers in front of the fully connected ones, and these by name, in
    the model's order.

    Raises:
        UserError: there is no fully connected layer, or another layer with parameters behind the
            first.
    """
    owners = [names[0].rpartition(".")[0] for names in layers(model)]
    kinds = {name: model.get_submodule(name) for name in owners}
    first = next(
        (i for i, name in enumerate(owners) if isinstance(kinds[name], nn.Linear)), len(owners)
    )
    for name in owners[first:]:
        if not isinstance(kinds[name], nn.Linear):
            raise UserError(
                f"algorithm=dp_dfa: layer '{name}' ({type(kinds[name]).__name__}) stands behind a "
                "fully connected layer, and "
                "feedback has no rule for it. Take a network that ends in linear layers, with "
                "activations that train nothing."
            )
    if first == len(owners):
        raise UserError(
            "algorithm=dp_dfa: the network has no fully connected layer, so there is nothing to "
            "carry the error to."
        )
    return owners[:first], {name: kinds[name] for name in owners[first:]}  # type: ignore[misc]
