"""`check_model`: check whether per-example clipping protects your own model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zdp_bench.algorithms import Algorithm, Problem
from zdp_bench.config.plugins import check_plugin
from zdp_bench.errors import UserError, for_python
from zdp_bench.gradients import Batch, Loss, per_example
from zdp_bench.gradients.losses import DomainError
from zdp_bench.gradients.parts import map_leaves, pack
from zdp_bench.library.arguments import (
    require_kinds,
    require_loss,
    require_module,
    with_python_numbers,
)
from zdp_bench.privacy.mechanism import Sampling
from zdp_bench.registry import lookup
from zdp_bench.training import model_checks
from zdp_bench.training.model_checks.examples import SAMPLES


@with_python_numbers
def check_model(
    model: nn.Module,
    loss: Loss,
    batch: tuple[Any, Any],
    *,
    algorithm: str = "dp_sgd",
    public: bool = False,
    **options: Any,
) -> list[str]:
    """Reject a model that per-example clipping does not protect; see `training.model_checks.check`.

    Args:
        model: Model, in training mode. It is not changed.
        loss: Function of (outputs, targets) that returns one loss per example, [B], never a mean.
        batch: Examples (inputs, targets), [B, ...], with the shapes and dtypes of the training set.
            Inputs in a tuple or a dictionary are the model's arguments, in order or by name.
        algorithm: Name of the algorithm that will train the model. Default: `dp_sgd`.
        public: Whether to run the checks on these examples. Default: False; only their shapes and
            dtypes are then read, and the checks draw random numbers.
        options: Options of the algorithm, as in the configuration: `per_layer=True`.

    Returns:
        Names of the buffers and frozen parameters that the output depends on. No ε covers them, so
        they count as public.

    Raises:
        UserError: A guarantee does not hold. The message names the layer and says how to fix it.
    """
    settings = {"name": algorithm, "noise_multiplier": 1.0, "max_grad_norm": 1.0} | options
    with for_python():  # errors name settings as arguments
        require_module(model)
        require_loss(loss)
        require_kinds({"batch": batch, "public": public} | options)
    algorithm_options = check_plugin("algorithm", settings).options
    example_loss = per_example(loss)
    packed = pack(batch[0]), pack(batch[1])
    empty_inputs = map_leaves(lambda leaf: leaf[:0], packed[0])
    sampling = Sampling("poisson", 1.0, SAMPLES, SAMPLES)
    probe = packed if public else None
    with for_python():  # errors name settings as arguments
        problem = Problem(model, example_loss, sampling, like=empty_inputs)
        private_algorithm = lookup("algorithm", algorithm)(problem, **algorithm_options)
        checked = check(model, private_algorithm, example_loss, packed, probe=probe)
    return checked.fixed_state


def require_gradients(caller: str, device: torch.device) -> None:
    """Reject a call while torch records no gradients, or rounds them under autocast.

    Args:
        caller: name of the called function, for the error.
        device: device of the model.

    Raises:
        UserError: such a context is entered.
    """
    if not torch.is_grad_enabled():
        raise UserError(
            f"{caller} computes gradients: call it outside torch.no_grad() and "
            "torch.inference_mode()."
        )
    kind = device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        # In a context around several steps, it would also keep copies of earlier weights.
        raise UserError(
            f"{caller} computes gradients that are clipped: call it outside torch.autocast(). For "
            'a forward pass in bfloat16, give make_private precision="bf16", which keeps sums in '
            "float32."
        )


def check(
    model: nn.Module,
    algorithm: Algorithm,
    loss: Loss,
    example_batch: Batch,
    forms_shares: bool = False,
    probe: Batch | None = None,
) -> model_checks.Checked:
    """Return the result of `model_checks.check`, whose arguments these are.

    If random inputs may be why the check fails, the error suggests `probe`.
    """
    try:
        return model_checks.check(model, algorithm, loss, example_batch, forms_shares, probe)
    except DomainError as error:
        if probe is not None:
            raise
        raise UserError(
            f"{error} If the reason is that the check uses random inputs, give "
            "probe=(inputs, targets) with examples that are public or made up."
        ) from None
