"""The reference for one layer alone: vmap over records of the layer's own vector-Jacobian product. For layers without a rule."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from zdp_bench.gradients.rules import NoRule, Share, kept

# All of the layer's per-sample gradients are formed at once; above this the whole model goes to the reference, in chunks.
LARGEST = 512 * 2**20


def any_layer(layer: nn.Module, x: Tensor, g: Tensor) -> dict[str, Share]:
    """Any layer that turns one tensor [B, ...] into one tensor [B, ...], record by record and without drawing random numbers.

    Raises:
        NoRule: it does not.
    """
    if isinstance(layer, _BatchNorm):
        raise NoRule("batch norm, which mixes records")
    # A parameter under two names in the layer has a share under each; what a layer inside makes of it is that layer's share.
    moving = {
        name: p.detach()
        for name, p in layer._parameters.items()
        if p is not None and p.requires_grad
    }
    size = len(x) * sum(p.numel() * p.element_size() for p in moving.values())
    if size > LARGEST:
        raise NoRule(f"a layer without a rule, whose per-sample gradients take {size:,} bytes")

    def of_one(record: Tensor, output_gradient: Tensor) -> dict[str, Tensor]:
        def output(own: dict[str, Tensor]) -> Tensor:
            return functional_call(layer, own, (record.unsqueeze(0),), tie_weights=False).squeeze(0)

        return vjp(output, moving)[1](output_gradient)[0]

    try:
        with torch.enable_grad():
            gradients = vmap(of_one, randomness="error")(x, g)
    except RuntimeError as error:
        raise NoRule(
            f"a layer without a rule that torch.func cannot take apart ({str(error).splitlines()[0]})"
        ) from None
    return {name: kept(rows.detach()) for name, rows in gradients.items()}
