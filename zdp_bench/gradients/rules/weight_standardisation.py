"""Convolutions with standardised weights: the convolution's own gradients, pulled back."""

from __future__ import annotations

from torch import Tensor, nn

from zdp_bench.gradients.layer_gradient import LayerGradient, transform
from zdp_bench.gradients.rules import rule
from zdp_bench.gradients.rules.convolution import complex_convolution, torch_convolution
from zdp_bench.nn.surgery import STANDARDISED, pull_back


@rule(*STANDARDISED.values())
def standardised_convolution(layer: nn.Module, x: Tensor, g: Tensor) -> dict[str, LayerGradient]:
    """The convolution's rule reads no weight, so it gives the gradient of the standardised one."""
    weight: Tensor = layer.weight  # type: ignore[assignment]
    plain = complex_convolution if weight.is_complex() else torch_convolution
    gradients = plain(layer, x, g)
    back, most = pull_back(weight.detach())
    gradients["weight"] = transform(gradients["weight"], back, most, weight[0].numel())
    return gradients
