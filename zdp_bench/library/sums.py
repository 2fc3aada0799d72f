"""`clipped_sum`: the sum of clipped gradients, for a loop that adds its own noise."""

from __future__ import annotations

from typing import Any

from torch import nn

from zdp_bench import gradients
from zdp_bench.errors import UserError, for_python, is_out_of_memory
from zdp_bench.gradients import ClippedSum, Loss
from zdp_bench.gradients.parts import pack, takes_parts
from zdp_bench.library.arguments import (
    require_kinds,
    require_loss,
    require_module,
    with_python_numbers,
)
from zdp_bench.library.model_check import check_model


@with_python_numbers
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
    """Return Σᵢ min(1, C/‖gᵢ‖)·gᵢ over the examples of a batch, and the norms before clipping.

    It has no ε by itself: no noise is added, and the model is not checked (see `check_model`). For
    details, see `gradients.clipped_sum`.

    Args:
        model: Model whose parameters with `requires_grad=True` have the gradients gᵢ.
        loss: Function of (outputs, targets) that returns one loss per example, [B], never a mean.
        batch: Examples (inputs, targets), [B, ...]. Inputs in a tuple or a dictionary are the
            model's arguments, in order or by name.
        bound: Clipping norm C.
        per_layer: Whether to clip each of the L layers at C/√L. Default: False.
        gamma: If given, gᵢ is scaled by C/(‖gᵢ‖ + γ) instead. Default: None.
        complex_scale: Factor on the gradients of complex parameters before clipping. Default: 1.
        engine: "fast", "reference" or "auto". Default: "auto".

    Returns:
        The sums by parameter name, and the norms, [B].

    Raises:
        UserError: The gradients of the model cannot be computed per example.
    """
    require_module(model)
    require_loss(loss)
    numbers = {"bound": bound, "per_layer": per_layer, "gamma": gamma}
    with for_python():  # errors name settings as arguments
        require_kinds(numbers | {"batch": batch, "complex_scale": complex_scale})
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
            check_model(model, loss, batch)  # raises a clearer error if the model is the reason
        raise
