"""`check_model`: check whether per-example clipping protects your own model."""

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
    require_module(model)
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


def require_gradients(caller: str) -> None:
    """Reject a call of the function `caller` while torch records no gradients."""
    if not torch.is_grad_enabled():
        raise UserError(
            f"{caller} computes gradients: call it outside torch.no_grad() and "
            "torch.inference_mode()."
        )


def require_module(model: Any) -> None:
    """Reject a model that is not a `torch.nn` module, or whose weights cannot be trained here.

    Raises:
        UserError: The model is not a module, a layer is a TorchScript module, or its weights are
            sharded, not initialized, on the meta device, or all frozen.
    """
    modules = dict(model.named_modules()) if isinstance(model, nn.Module) else {}
    scripted = [name for name, part in modules.items() if isinstance(part, torch.jit.ScriptModule)]
    if not modules or "" in scripted:  # "" is the name of the model itself
        raise UserError("model: a torch.nn module is required, not a TorchScript module.")
    if scripted:
        raise UserError(
            f"model: layer '{scripted[0]}' is a TorchScript module, whose operations cannot be "
            "traced: use the torch.nn module that it was compiled from."
        )
    parameters = [*model.parameters()]
    # Compared by name, because torch may be built without distributed training.
    class_names = set()
    for part in [*modules.values(), *parameters]:
        class_names |= {cls.__name__ for cls in type(part).__mro__}
    if class_names & {"DTensor", "FullyShardedDataParallel"}:
        raise UserError(
            "model: its weights are sharded across processes (FSDP or tensor parallelism), so no "
            "process has the whole gradient of an example to clip: pass the whole model in each."
        )
    if any(isinstance(p, UninitializedParameter) for p in parameters):
        raise UserError(
            "model: a lazy module has no weights before its first call: call the model once on "
            "made-up inputs of the right shape, and then create the optimizer."
        )
    if any(p.is_meta for p in parameters):
        raise UserError(
            "model: its weights are on the device 'meta', which stores no values: move it to a "
            "real device and load or initialize its weights."
        )
    if not any(p.requires_grad for p in parameters):
        raise UserError("no parameter of the model requires a gradient: there is nothing to train.")


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
