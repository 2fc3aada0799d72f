"""Sums of clipped per-sample gradients: Σᵢ min(1, C/‖gᵢ‖)·gᵢ, with gᵢ PyTorch's own `.grad` convention.

`reference` (torch.func, any model) defines what is right; `fast` (book-keeping) gives the same numbers near the price of an
ordinary backward pass. `clipped_sum` picks: fast where every layer of the model has a rule, else the reference.
"""

from __future__ import annotations

from typing import Literal

from torch import nn

from zdp_bench.gradients import fast, reference
from zdp_bench.gradients.clipping import Batch, ClippedSum, Loss

Engine = Literal["auto", "fast", "reference"]

__all__ = ["Batch", "ClippedSum", "Engine", "Loss", "clipped_sum"]


def clipped_sum(
    model: nn.Module,
    loss: Loss,
    batch: Batch,
    bound: float,
    *,
    per_layer: bool = False,
    complex_scale: float = 1.0,
    engine: Engine = "auto",
) -> ClippedSum:
    """Σᵢ clip(gᵢ) over the records of a batch, and the norms before clipping.

    Args:
        model: any mix of real and complex parameters; those with `requires_grad=False` are left out.
        loss: (outputs, targets) -> one loss per record, shape [B]; never a mean.
        batch: (inputs [B, ...], targets [B, ...]); B may be 0.
        bound: C. Flat: ‖clip(gᵢ)‖ ≤ C over all parameters. Per layer: each of the L layers is clipped at C/√L, weight and bias
            jointly, so the whole is again ≤ C.
        complex_scale: factor on the gradients of complex parameters, before norms are taken: ½ turns `.grad` = 2∂L/∂θ̄ into the
            Wirtinger derivative ∂L/∂θ̄.

    Formal guarantees:
        - ‖contribution of one record‖₂ ≤ bound, whatever inputs, weights or targets are, NaN and ∞ included (such a record
          contributes zero);
        - the sum is linear in the batch: cut it anyhow and the parts add up to the whole.
    """
    chosen = engine
    if engine == "auto":
        chosen = "fast" if not fast.unsupported(model) else "reference"
    module = fast if chosen == "fast" else reference
    return module.clipped_sum(model, loss, batch, bound, per_layer=per_layer, complex_scale=complex_scale)
