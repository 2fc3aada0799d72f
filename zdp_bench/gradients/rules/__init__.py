"""Rules: per-sample gradients of each type of layer, from its input and output gradient.

A rule is one function, registered for exact layer types: a subclass may compute something else.
It returns a `LayerGradient` for each parameter of the layer itself. Every file in this folder is
found by itself. Layers with parameters but without a rule are differentiated by `any_layer`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from functools import cache

from torch import Tensor, nn

from zdp_bench.gradients.layer_gradient import LayerGradient

# (layer, input [B, ...], output gradient [B, ...]) -> gradients by the parameter's name
Rule = Callable[[nn.Module, Tensor, Tensor], dict[str, LayerGradient]]
_rules: dict[type[nn.Module], Rule] = {}


class NoRule(ValueError):  # noqa: N818  it is an answer, not an accident
    """Raised where book-keeping cannot serve a layer, or one call of it, but the reference can."""


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
