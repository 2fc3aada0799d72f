"""The reference for a single layer that has no rule: torch.func's vmap over its own vjp."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from zdp_bench.gradients.layer_gradient import LayerGradient
from zdp_bench.gradients.rules import NoRule

# All of the layer's per-sample gradients exist at once; beyond this the whole model goes to the
# reference, in chunks.
MAX_BYTES = 512 * 2**20


def any_layer(layer: nn.Module, x: Tensor, g: Tensor) -> dict[str, LayerGradient]:
    """Differentiate a deterministic layer that maps [B, ...] to [B, ...] example by example.

    Raises:
        NoRule: the layer is another one.
    """
    if isinstance(layer, _BatchNorm):
        raise NoRule("batch norm, which mixes records")
    # A parameter under two names in the layer has a gradient under each. Layers inside this one
    # account for their own parameters.
    parameters = {
        name: p.detach()
        for name, p in layer._parameters.items()
        if p is not None and p.requires_grad
    }
    size = len(x) * sum(p.nbytes for p in parameters.values())
    if size > MAX_BYTES:
        raise NoRule(f"a layer without a rule, whose per-sample gradients take {size:,} bytes")

    def differentiate_one(example: Tensor, output_gradient: Tensor) -> dict[str, Tensor]:
        def output(own: dict[str, Tensor]) -> Tensor:
            one = functional_call(layer, own, (example.unsqueeze(0),), tie_weights=False)
            return one.squeeze(0)

        return vjp(output, parameters)[1](output_gradient)[0]

    try:
        with torch.enable_grad():
            gradients = vmap(differentiate_one, randomness="error")(x, g)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise NoRule(
            f"a layer without a rule that torch.func cannot take apart ({reason})"
        ) from None
    return {name: LayerGradient.of(own.detach()) for name, own in gradients.items()}
