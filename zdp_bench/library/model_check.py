"""The check of a model of your own before its first private step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zdp_bench.algorithms import Algorithm, Problem
from zdp_bench.config.plugins import check_plugin
from zdp_bench.gradients import Batch, Loss, per_example
from zdp_bench.gradients.parts import pack, takes_parts
from zdp_bench.privacy.mechanism import Sampling
from zdp_bench.registry import lookup
from zdp_bench.training import model_checks
from zdp_bench.training.model_checks.probes import INTEGERS, draw_synthetic, forward
from zdp_bench.training.model_checks.state import Guard, copy_apart, watch


def check_model(
    model: nn.Module,
    loss: Loss,
    batch: tuple[Any, Any],
    *,
    algorithm: str = "dp_sgd",
    examples: int = model_checks.SAMPLES,
    **options: Any,
) -> list[str]:
    """Refuse a model that per-example clipping does not protect; see `training.model_checks.check`.

    Args:
        loss: (outputs, targets) -> one loss per example, [B]; never a mean.
        batch: (inputs, targets) of the shapes and dtypes to come, [B, ...]; no value is read. A
            model of several inputs has them in a tuple or, by name, in a dictionary.
        examples: how many a step will process at once.
        options: of the algorithm, as in the configuration: `per_layer=True`.

    Returns:
        The names of buffers and frozen parameters that the output depends on: they are public.

    Raises:
        UserError: names the layer that breaks a guarantee, and the mend.
    """
    given = {"name": algorithm, "noise_multiplier": 1.0, "max_grad_norm": 1.0} | options
    own = check_plugin("algorithm", given).options
    inputs, targets = pack(batch[0]), pack(batch[1])
    of_one = per_example(loss)
    problem = Problem(model, of_one, Sampling("poisson", 1.0, examples, examples), like=inputs)
    return check(
        model, lookup("algorithm", algorithm)(problem, **own), of_one, (inputs, targets), examples
    )


def check(
    model: nn.Module,
    algorithm: Algorithm,
    loss: Loss,
    like: Batch,
    examples: int,
    forms_shares: bool = False,
) -> list[str]:
    """Return what `model_checks.check` does, for inputs that may be `Parts`."""
    with takes_parts(model):
        outputs = count_outputs(model, like)
        return model_checks.check(model, algorithm, loss, like, outputs, examples, forms_shares)


def count_outputs(model: nn.Module, like: Batch) -> int:
    """Return how many classes a model that `takes_parts` may tell apart: the size of dimension 1.

    Integer targets of the check are drawn below it.
    """
    device = next(model.parameters()).device
    twin, _ = copy_apart(model)
    with torch.no_grad():
        try:
            outputs: Any = forward(twin, draw_synthetic(like[0], 1, INTEGERS, device))
        except Exception:  # whatever the model raises, the check says so with the layer's name
            return INTEGERS
    has_classes = isinstance(outputs, Tensor) and outputs.dim() > 1
    return max(INTEGERS, outputs.shape[1]) if has_classes else INTEGERS


def guard(model: nn.Module, like: Batch) -> Guard:
    """Return the guard of a model that was checked, for inputs that may be `Parts`."""
    return watch(model, synthetic(model, like)[0])


def synthetic(model: nn.Module, like: Batch) -> Batch:
    """Return the random examples that the check looks at, for a model that `takes_parts`."""
    device = next(model.parameters()).device
    below = INTEGERS, count_outputs(model, like)
    inputs, targets = (
        draw_synthetic(part, model_checks.SAMPLES, most, device)
        for part, most in zip(like, below, strict=True)
    )
    return inputs, targets
