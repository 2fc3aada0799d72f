"""Rules: per-sample gradients of each type of layer, from its input and output gradient.

A rule is a function that returns a `LayerGradient` for each of a layer's own parameters. It is
registered for exact layer types, because a subclass may compute something else. All modules in this
folder are imported automatically. Layers with parameters but without a rule are differentiated by
`any_layer`, which is vmap over torch.func's vjp of the layer.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp
from torch.nn.modules.batchnorm import _BatchNorm

from zdp_bench.errors import is_out_of_memory
from zdp_bench.gradients.layer_gradient import LayerGradient
from zdp_bench.gradients.mapping import map_rows

# (layer, input [B, ...], output gradient [B, ...]) -> gradients by the parameter's name
Rule = Callable[[nn.Module, Tensor, Tensor], dict[str, LayerGradient]]
_rules: dict[type[nn.Module], Rule] = {}


class NoRule(ValueError):  # noqa: N818 - a result, not an error
    """Raised if the fast engine does not support a layer or the way it is called.

    The reference engine is then used instead.
    """


def rule(*types: type[nn.Module]) -> Callable[[Rule], Rule]:
    """Register the decorated function as the rule of these layer types."""

    def register(function: Rule) -> Rule:
        _rules.update(dict.fromkeys(types, function))
        return function

    return register


def rule_of(layer: nn.Module) -> Rule | None:
    """Return the rule registered for exactly this type of layer."""
    return _all_rules().get(type(layer))


@cache
def _all_rules() -> dict[type[nn.Module], Rule]:
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        importlib.import_module(module.name)
    return _rules


# Memory for the per-sample gradients of a layer without a rule, which exist all at once. A model
# that needs more is differentiated by the reference engine, in chunks.
MAX_BYTES = 512 * 2**20


def any_layer(
    layer: nn.Module,
    x: Tensor,
    g: Tensor,
) -> dict[str, LayerGradient]:
    """Return the gradients of a layer without a rule.

    The layer must be deterministic and keep examples apart.

    Raises:
        NoRule: the layer is a batch norm, its gradients take too much memory, or torch.func does
            not support it.
    """
    if isinstance(layer, _BatchNorm):
        raise NoRule("batch norm, which mixes examples")
    # A parameter with two names in the layer has a gradient under each. Parameters of layers inside
    # this one belong to those layers.
    parameters = {
        name: parameter.detach()
        for name, parameter in layer._parameters.items()
        if parameter is not None and parameter.requires_grad
    }
    per_example = sum(parameter.nbytes for parameter in parameters.values())
    size = len(x) * per_example
    if size > MAX_BYTES:
        raise NoRule(f"a layer without a rule, whose per-example gradients take {size:,} bytes")

    def differentiate_one(example: Tensor, output_gradient: Tensor) -> dict[str, Tensor]:
        def compute_output(values: dict[str, Tensor]) -> Tensor:
            batch = (example.unsqueeze(0),)
            return functional_call(layer, values, batch, tie_weights=False).squeeze(0)

        pull_back = vjp(compute_output, parameters)[1]
        (gradients,) = pull_back(output_gradient)
        return gradients

    try:
        with torch.enable_grad():
            gradients = map_rows(differentiate_one, x, g)
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        reason = str(error).splitlines()[0]
        raise NoRule(
            f"a layer without a rule that torch.func cannot differentiate per example ({reason})"
        ) from None
    return {
        name: LayerGradient.from_gradients(gradient.detach())
        for name, gradient in gradients.items()
    }
