"""Check, before the first private step, that per-sample clipping protects a model.

Clipping bounds the influence of an example through its own loss. It bounds nothing if a layer mixes
samples. So a third-party model is recorded, and its operations are checked (`gradients.program`).
If they are not known to keep samples apart, each sample is processed alone. Models that would then
train differently than their author intends are refused here.

The most common such layer is BatchNorm, which `nn/surgery.py` replaces on request.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils import checkpoint as checkpoints

from zdp_bench.algorithms import Algorithm
from zdp_bench.errors import UserError, first_line, is_for_python, setting, setting_name
from zdp_bench.gradients import Batch, Loss, PerExample, per_example, reference
from zdp_bench.gradients.clipping import squared_norms, trainable
from zdp_bench.gradients.losses import (
    DomainError,
    are_alike,
    preserve_random_state,
    require_outputs_alone,
    set_seed,
)
from zdp_bench.gradients.parts import describe, map_leaves, takes_parts, unpack
from zdp_bench.gradients.program import State, copy_apart, state_of
from zdp_bench.nn.precision import float32_products, repeatable
from zdp_bench.privacy.noise import real_view
from zdp_bench.training.model_checks.examples import SAMPLES, find_source
from zdp_bench.training.model_checks.layers import Innermost, advice_on, describe_layer
from zdp_bench.training.model_checks.state import (
    require_loss_keeps_nothing,
    require_nothing_kept,
)
from zdp_bench.training.total import Total

log = logging.getLogger(__name__)

OWNED = (2, 1)  # numbers of examples in two shares


class Checked(NamedTuple):
    """The result of a check.

    Attributes:
        fixed_state: names of the buffers and frozen parameters that the output depends on. They are
            released with the model, and no ε covers them, so they must not come from the training
            examples.
        batch: the examples on which the model was checked.
    """

    fixed_state: list[str]
    batch: Batch


def check(
    model: nn.Module,
    algorithm: Algorithm,
    loss: Loss,
    like: Batch,
    forms_shares: bool = False,
    probe: Batch | None = None,
) -> Checked:
    """Reject a model that per-sample clipping cannot protect, or that would not train as intended.

    Args:
        model: the model, in the mode and on the device of the training. It is not changed.
        algorithm: the algorithm that trains it.
        loss: the loss.
        like: inputs [n, ...] and targets [n, ...] with the training set's shapes and dtypes. No
            value is read.
        forms_shares: whether several examples may form one share.
        probe: public examples for the checks. Default: random numbers. Needed if model or loss
            cannot run on random inputs.

    Formal guarantees:
        - No sample's output, loss or gradient depends on another sample, or on the number of
          samples: every operation that runs on a batch is known to keep samples apart. Otherwise,
          each sample is processed alone, in a copy of the model.
        - A forward pass stores nothing in the model.
        - On the checked examples, an example's share of the algorithm's sum is within its bound.

    Raises:
        UserError: one of these does not hold, or a parameter gets no gradient. The message names
            the layer.
    """
    device = next(model.parameters()).device
    _refuse_parameter_hooks(model)
    _refuse_by_kind(model)
    devices = [device] if device.type == "cuda" else []
    with ExitStack() as inside:
        for context in (preserve_random_state(devices), float32_products(), repeatable(device)):
            inside.enter_context(context)
        source = find_source(model, loss, like, probe)
        batch = source.draw(SAMPLES)
        inside.enter_context(takes_parts(model))
        _check_shapes(copy_apart(model), batch[0])
        require_nothing_kept(model, batch[0])
        state = state_of(model, batch[0])
        _refuse_norms(model, state)
        with _explaining_ones(state):
            _check_shapes(copy_apart(model), batch[0][:1])
            _check_losses(model, loss, batch)
        if not state.alone:  # else, Python code may skip layers for some examples
            _check_gradients(model, batch[0])
        _check_sums(algorithm, batch, [OWNED] if forms_shares else [])
        return Checked(_find_fixed_state(model, state, batch[0]), batch)


@contextmanager
def _explaining_ones(state: State) -> Iterator[None]:
    """Say in an error why there is one example, where a model's examples run one at a time."""
    try:
        yield
    except DomainError as error:
        if not state.alone:
            raise
        raise DomainError(f"{error} Examples run one at a time, because {state.alone}.") from None


def _refuse_parameter_hooks(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        hooks = parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
        if hooks:
            raise UserError(
                f"parameter '{name}' has a hook, which no private step calls: remove it, or "
                "put what it does into the model."
            )


def _refuse_by_kind(model: nn.Module) -> None:
    """Reject layers that are known to be unsuitable, by their type."""
    for name, module in model.named_modules():
        if isinstance(module, _NormBase) and module.training:
            if not isinstance(module, nn.modules.instancenorm._InstanceNorm):
                raise _mixing_error(model, name)
            if module.track_running_stats:
                raise UserError(
                    f"{describe_layer(model, name)} stores training examples in 'running_mean', "
                    "which no noise covers: build it with track_running_stats=False."
                )
        if any(isinstance(hook, WeightNorm) for hook in module._forward_pre_hooks.values()):
            raise UserError(
                f"{describe_layer(model, name)}: torch.nn.utils.weight_norm writes its weight anew "
                "in every pass, beside the parameters that train: use "
                "torch.nn.utils.parametrizations.weight_norm, or no norm of the weight."
            )
        if getattr(module, "sparse", False) and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            raise UserError(
                f"{describe_layer(model, name)} has sparse gradients, which cannot be clipped by "
                "their norm: build it with sparse=False."
            )


def _mixing_error(model: nn.Module, name: str) -> UserError:
    without = "without make_private" if is_for_python() else "with algorithm=sgd"
    return UserError(
        f"{describe_layer(model, name)} lets one example see another, so clipping bounds nothing "
        f"and no ε would hold: {advice_on(model.get_submodule(name))}, or train {without}, which "
        "claims none."
    )


def _refuse_norms(model: nn.Module, state: State) -> None:
    """Reject a norm over the batch, which would be another layer if it sees one example alone."""
    parts = state.layer.split(".") if state.alone else []
    for end in range(len(parts), 0, -1):
        name = ".".join(parts[:end])
        if "Norm" in type(model.get_submodule(name)).__name__:
            raise _mixing_error(model, name)


def _check_shapes(model: nn.Module, inputs: Tensor) -> None:
    device = inputs.device.type
    outside = torch.is_autocast_enabled(device)

    def note(name: str) -> None:
        if torch.is_autocast_enabled(device) and not outside:
            raise UserError(
                f"{describe_layer(model, name)} runs under torch.autocast, which would round the "
                "gradients that are clipped: take autocast out of the forward function, and set "
                f"{setting('precision', 'bf16')}, which keeps sums in float32."
            )

    inside = Innermost(model, note)
    try:
        with torch.enable_grad(), inside, _no_checkpoints(inside):
            output = model(map_leaves(torch.clone, inputs))
    except UserError:
        raise
    except Exception as error:
        raise DomainError(
            f"the model cannot take {describe(inputs)}: {inside.name} says: {first_line(error)}"
        ) from None
    if not isinstance(output, Tensor) or output.dim() == 0 or len(output) != len(inputs):
        is_tensor = isinstance(output, Tensor)
        shape = list(output.shape) if is_tensor else type(output).__name__
        rule = "its first dimension must be that of the examples"
        one = "put it into a module that returns one tensor, the examples first (`output.logits`)"
        raise UserError(
            f"the model answers {len(inputs)} examples with {shape}: {rule if is_tensor else one}."
        )
    if isinstance(output, FakeTensor):  # of the recording of the model's program
        raise UserError(
            "the model keeps a tensor of an earlier pass outside of its modules (in a global or a "
            "closure), which clipping cannot bound: compute the output from inputs and weights "
            "only."
        )
    if output.isnan().any():
        raise DomainError(f"the model gives NaN for {describe(inputs)}.")


@contextmanager
def _no_checkpoints(inside: Innermost) -> Iterator[None]:
    """Reject calls of torch's checkpoints, of both kinds, in the block."""

    def refuse(*_: object, **__: object) -> None:
        raise UserError(
            f"{describe_layer(inside.model, inside.stack[-1])}: torch.utils.checkpoint is called "
            "there, and per-example gradients cannot pass that: switch it off "
            "(set_grad_checkpointing(False) in timm, gradient_checkpointing_disable() in "
            f"transformers), and set {setting_name('trainer.micro_batch')} to save memory."
        )

    kinds: Any = checkpoints
    held = kinds.CheckpointFunction, kinds._CheckpointFrame  # reentrant, and not
    refusing = type("Refusing", (), {"apply": refuse})
    kinds.CheckpointFunction, kinds._CheckpointFrame = refusing, refuse
    try:
        yield
    finally:
        kinds.CheckpointFunction, kinds._CheckpointFrame = held


def _check_losses(
    model: nn.Module,
    loss: Loss,
    batch: Batch,
) -> None:
    """Reject a loss that needs several examples; warn if an example's loss depends on others."""
    alone, targets = per_example(loss), batch[1]
    with torch.no_grad():
        output = reference.compute_outputs(model, batch[0])
    losses = require_outputs_alone(model, alone, output, targets)
    if isinstance(alone.loss, nn.Module):
        require_loss_keeps_nothing(alone.loss, output[:1], unpack(targets[:1].clone()))
    _require_same_losses(alone, output, targets)
    with torch.enable_grad():
        try:
            together = alone.loss(output, unpack(targets.clone()))
        except Exception:
            together = losses  # the loss never gets a batch in training
        mixes = not isinstance(together, Tensor) or not are_alike(losses, together, losses)
        with torch.no_grad():  # a loss that draws random numbers differs at every call
            mixes = mixes and are_alike(losses, alone(output, targets), losses)
        if mixes and not _moves(alone, output, targets):
            raise UserError(
                "the loss of one example alone has no gradient: it compares the examples of a "
                "batch with each other (a contrastive loss?), so that no example's influence could "
                "be bounded. Make what is compared one example, ((a, b), target), and let the "
                "model take both."
            )
    if mixes:
        log.warning(
            "the loss of an example depends on its batch: it is computed for each example "
            "separately, so that no other can affect it. Check that this is intended"
        )


def _require_same_losses(
    alone: PerExample,
    output: Tensor,
    targets: Tensor,
) -> None:
    """Reject a loss that, with the same draws, is another or fails when it is called again."""
    losses = []
    for _ in range(2):
        set_seed(0)
        try:
            losses.append(alone(output, targets).detach())
        except UserError:  # such as on what an earlier call has left
            raise alone.make_state_error() from None
    first, again = losses
    if not are_alike(first, again, first):
        raise alone.make_state_error()


def _moves(
    alone: Loss,
    output: Tensor,
    targets: Tensor,
) -> bool:
    """Return True if the loss of single examples has a gradient with respect to the outputs."""
    output = output.detach().requires_grad_()
    losses = alone(output, targets)
    if not losses.requires_grad:
        return False
    (g,) = torch.autograd.grad(losses.sum(), output)
    scale = float(output.detach().abs().max())
    return bool((g.abs() * scale > 1e-5).any())


def _check_gradients(model: nn.Module, inputs: Tensor) -> None:
    """Reject a parameter on which the output does not depend."""
    trained = trainable(model)
    with torch.enable_grad():
        output = reference.compute_outputs(model, inputs)
        try:
            found = torch.autograd.grad(_probe(output), [*trained.values()], allow_unused=True)
        except RuntimeError as error:
            raise UserError(f"the model has no gradient: torch says: {first_line(error)}") from None
    for name, gradient in zip(trained, found, strict=True):
        if gradient is None:
            raise UserError(
                f"parameter '{name}' has no influence on the model's output, so it would be "
                "trained by noise alone: take it out, or set requires_grad=False on it."
            )


def _probe(output: Tensor) -> Tensor:
    """Return a real number that depends on every entry of the output."""
    real = real_view(output)
    weights = torch.linspace(0.5, 1.5, real.numel(), device=real.device, dtype=real.dtype)
    return (weights.view_as(real) * real).sum()


def _check_sums(
    algorithm: Algorithm,
    batch: Batch,
    shares: list[Any],
) -> None:
    """Reject an algorithm that cannot sum the model's gradients, or that exceeds its bounds."""
    model = algorithm.problem.model
    inside, mechanism = Innermost(model), algorithm.mechanism()
    alone = [(1,)] if shares else []

    def accumulate(given: Batch, owned: list[Any]) -> dict[str, Tensor]:
        total = Total(mechanism, given[0].device)
        set_seed(0)
        algorithm.accumulate(total, given, *owned)
        return total.all_blocks()

    try:
        with inside:
            whole = accumulate(batch, shares)
            ones = zip(batch[0].split(1), batch[1].split(1), strict=True)
            each = [accumulate(one, alone) for one in ones]
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{inside.name} has no per-example gradient: torch says: {first_line(error)} Use "
            "another layer there."
        ) from None
    for total in each:
        squares = {name: squared_norms(share.unsqueeze(0)) for name, share in total.items()}
        for block in mechanism.blocks:
            moved = sum(squares.values()) if mechanism.joint else squares[block.name]
            beyond = torch.as_tensor(moved).sqrt() > block.bound * (1 + 1e-4)
            if math.isfinite(block.bound) and bool(beyond.any()):
                raise UserError(
                    f"an example's contribution to '{block.name}' exceeds its bound "
                    f"{block.bound:g}: no ε would hold."
                )
    if not type(algorithm).__module__.startswith("zdp_bench."):
        _check_foreign(algorithm, batch, shares, whole)


def _check_foreign(
    algorithm: Algorithm,
    batch: Batch,
    shares: list[Any],
    total: dict[str, Tensor],
) -> None:
    """Reject a third-party algorithm whose sum is not that of its `contributions`."""
    set_seed(0)
    rows = algorithm.contributions(batch, *shares)
    set_seed(0)
    again = algorithm.contributions(batch, *shares)
    for name, share in rows.items():
        scale = float(share.detach().abs().max()) if share.numel() else 0.0
        wrong = (share.sum(dim=0) - total[name]).abs().max() if total[name].numel() else 0.0
        draws = not torch.equal(share.nan_to_num(), again[name].nan_to_num())
        if not draws and float(wrong) > 1e-2 * scale + 1e-12:
            raise UserError(
                f"{type(algorithm).__name__}.accumulate does not add the sum of what its "
                f"contributions() returns for '{name}'. It must add no noise either: that is "
                "drawn for it."
            )


def _find_fixed_state(
    model: nn.Module,
    state: State,
    inputs: Tensor,
) -> list[str]:
    """Return the names of buffers and frozen parameters on which the output depends."""
    buffers = {
        name
        for name, buffer in model.named_buffers()
        if buffer.dtype.is_complex or buffer.dtype.is_floating_point
    }
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    if state.program is not None:
        return sorted((buffers | frozen) & state.program.names_used(model))
    if state.alone:
        return sorted(buffers | frozen)
    moved = partial(_moves_output, copy_apart(model), inputs)
    return sorted(name for name in buffers | frozen if moved(name))


@torch.no_grad()
def _moves_output(
    model: nn.Module,
    inputs: Tensor,
    name: str,
) -> bool:
    """Return True if the output changes when the tensor with this name is changed."""
    owner, _, own = name.rpartition(".")
    held = getattr(model.get_submodule(owner), own)
    set_seed(0)
    before, kept = model(inputs), held.clone()
    held.mul_(1.5).add_(0.5)
    set_seed(0)
    after = model(inputs)
    held.copy_(kept)
    return not torch.equal(before, after)
