"""The check of your own model before its first private step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter

from zdp_bench.algorithms import Algorithm, Problem
from zdp_bench.config.plugins import check_plugin
from zdp_bench.errors import UserError, for_python
from zdp_bench.gradients import Batch, Loss, per_example
from zdp_bench.gradients.losses import DomainError
from zdp_bench.gradients.parts import map_leaves, pack
from zdp_bench.privacy.mechanism import Sampling
from zdp_bench.registry import lookup
from zdp_bench.training import model_checks
from zdp_bench.training.model_checks.examples import SAMPLES


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
        loss: (outputs, targets) -> one loss per example, [B]; never a mean.
        batch: (inputs, targets) of the shapes and dtypes to come, [B, ...]. A model of several
            inputs has them in a tuple or, by name, in a dictionary.
        public: check on the batch's examples. Else no value of them is read, and the check draws
            random numbers.
        options: of the algorithm, as in the configuration: `per_layer=True`.

    Returns:
        The names of buffers and frozen parameters that the output depends on: they are public.

    Raises:
        UserError: names the layer that breaks a guarantee, and the mend.
    """
    given = {"name": algorithm, "noise_multiplier": 1.0, "max_grad_norm": 1.0} | options
    require_module(model)
    own = check_plugin("algorithm", given).options
    packed, of_one = (pack(batch[0]), pack(batch[1])), per_example(loss)
    empty = map_leaves(lambda leaf: leaf[:0], packed[0])
    with for_python():
        problem = Problem(model, of_one, Sampling("poisson", 1.0, SAMPLES, SAMPLES), like=empty)
        private, probe = lookup("algorithm", algorithm)(problem, **own), packed if public else None
        return check(model, private, of_one, packed, probe=probe).fixed_state


def require_gradients(caller: str) -> None:
    """Reject a call where torch keeps no graph."""
    if not torch.is_grad_enabled():
        raise UserError(
            f"{caller} computes gradients: call it outside torch.no_grad() and "
            "torch.inference_mode()."
        )


def require_module(model: Any) -> None:
    """Reject what has no weights of torch's own that could be trained here."""
    modules = [*model.named_modules()] if isinstance(model, nn.Module) else []
    compiled = [name for name, part in modules if isinstance(part, torch.jit.ScriptModule)]
    if not modules or "" in compiled:
        raise UserError("model: a torch.nn module is required, not one of torch.jit.")
    if compiled:
        raise UserError(
            f"model: layer '{compiled[0]}' is of torch.jit, whose operations cannot be followed: "
            "put the torch.nn module there from which it was made."
        )
    parameters = [*model.parameters()]
    kinds = {kind.__name__ for part in [model, *parameters] for kind in type(part).__mro__}
    kinds |= {kind.__name__ for _, part in modules for kind in type(part).__mro__}
    if kinds & {"DTensor", "FullyShardedDataParallel"}:
        raise UserError(
            "model: its weights are split among processes (FSDP, or tensor parallel), and no "
            "process has an example's whole gradient to clip: give the whole model to each."
        )
    if any(isinstance(p, UninitializedParameter) for p in parameters):
        raise UserError(
            "model: a lazy module has no weights before its first call: call the model once on a "
            "batch of the right shape, made up, and make the optimizer after that."
        )
    if any(p.is_meta for p in parameters):
        raise UserError("model: its weights are on the device 'meta', which holds no numbers.")
    if not any(p.requires_grad for p in parameters):
        raise UserError("no parameter of the model requires a gradient: there is nothing to train.")


def check(
    model: nn.Module,
    algorithm: Algorithm,
    loss: Loss,
    like: Batch,
    forms_shares: bool = False,
    probe: Batch | None = None,
) -> model_checks.Checked:
    """Return the result of `model_checks.check`; suggest `probe` where it may help."""
    try:
        return model_checks.check(model, algorithm, loss, like, forms_shares, probe)
    except DomainError as error:
        if probe is not None:
            raise
        raise UserError(
            f"{error} If that is because the check runs on random numbers, give "
            "probe=(inputs, targets): examples that are public, or made up."
        ) from None
