"""The sum of clipped gradients, for a loop that adds and accounts for its own noise."""

from __future__ import annotations

from typing import Any

from torch import nn

from zdp_bench import gradients
from zdp_bench.errors import UserError
from zdp_bench.gradients import ClippedSum, Loss
from zdp_bench.gradients.parts import pack, takes_parts
from zdp_bench.library.model_check import check_model, require_module
from zdp_bench.training.batches import is_out_of_memory


def clipped_sum(
    model: nn.Module,
    loss: Loss,
    batch: tuple[Any, Any],
    bound: float,
    *,
    per_layer: bool = False,
    gamma: float | None = None,
    complex_scale: float = 1.0,
    engine: gradients.Engine = "auto",
) -> ClippedSum:
    """Return Σᵢ min(1, C/‖gᵢ‖)·gᵢ over a batch, and the norms before; see `gradients.clipped_sum`.

    No noise is on it, and the model is not checked (`check_model`): by itself it has no ε.

    Args:
        loss: (outputs, targets) -> one loss per example, [B]; never a mean.
        batch: (inputs, targets), [B, ...] each. Inputs in a tuple or a dictionary are the model's
            arguments, in order or by name.
        bound: C.
    """
    require_module(model)
    try:
        with takes_parts(model):
            return gradients.clipped_sum(
                model,
                loss,
                (pack(batch[0]), pack(batch[1])),
                bound,
                per_layer=per_layer,
                gamma=gamma,
                complex_scale=complex_scale,
                engine=engine,
            )
    except Exception as error:
        if not isinstance(error, UserError) and not is_out_of_memory(error):
            check_model(model, loss, batch)  # says what of the model cannot be served
        raise
