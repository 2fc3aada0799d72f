"""Check before the first private step that per-sample clipping protects the model.

Clipping bounds what an example does through its own loss. It bounds nothing if a layer mixes
samples, or writes what it saw into its own state. A layer's name does not tell (torchcvnn's
LayerNorm mixes, GroupNorm does not), so it is followed through a pass of the model on random
numbers what depends on what (`influence`). Where Python decides, it cannot be followed: such a
model's examples are run one at a time.

BatchNorm is the usual offender; `nn/surgery.py` replaces it on request.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils import checkpoint as checkpoints

from zdp_bench.algorithms import Algorithm
from zdp_bench.errors import UserError, first_line
from zdp_bench.gradients import Batch, Loss, per_example, run_alone, runs_alone, take_over
from zdp_bench.gradients.clipping import squared_norms, trainable
from zdp_bench.gradients.cross_check import same_draws
from zdp_bench.gradients.losses import DomainError, require_outputs_alone
from zdp_bench.gradients.parts import describe, takes_parts, unpack
from zdp_bench.gradients.watched import PROGRAMS, Departs
from zdp_bench.nn.precision import float32_products, repeatable
from zdp_bench.training.model_checks.examples import find_source
from zdp_bench.training.model_checks.influence import check_apart, mixing_error
from zdp_bench.training.model_checks.probes import (
    MORE,
    ROUNDED,
    SAMPLES,
    Innermost,
    describe_layer,
    describe_owner,
    differs,
    forward,
    gradients_of,
    probe,
)
from zdp_bench.training.model_checks.state import Guard, copy_apart, watch

log = logging.getLogger(__name__)

OWNED = (2, 1)  # examples of two shares


class Checked(NamedTuple):
    """What a check leaves."""

    # Buffers and frozen parameters that the output depends on. They are released with the model,
    # outside of any ε, so they must not come from the training examples.
    fixed_state: list[str]
    guard: Guard | None  # finds what has changed beside the weights since
    batch: Batch  # the examples it looked at


def check(
    model: nn.Module,
    algorithm: Algorithm,
    loss: Loss,
    like: Batch,
    forms_shares: bool = False,
    probe: Batch | None = None,
) -> Checked:
    """Reject a model that per-sample clipping does not protect.

    Args:
        model: in the mode and on the device of the training; a copy of it is checked.
        like: inputs [n, ...] and targets [n, ...] of the shapes and dtypes to come; no value is
            read.
        forms_shares: True if several examples may make one share.
        probe: public examples to check on. None: random numbers are drawn.

    Formal guarantees:
        - no sample's output, loss or gradient depends on another sample: whatever the values are,
          if torch can follow the model, else because each sample is run alone;
        - nor on how many samples there are: passes of any number call what the checked ones did, or
          are not used (`gradients.watched`);
        - a second pass leaves nothing behind, nor the first what depends on the samples, as far as
          three batches of random numbers can tell;
        - the algorithm's sum over a batch is the sum of its per-example contributions, each within
          its bound.

    Raises:
        UserError: one of these does not hold, or a parameter gets no gradient; names the layer.
    """
    device, original = next(model.parameters()).device, model
    _refuse_by_kind(model)
    devices = [device] if device.type == "cuda" else []
    draws, exact = torch.random.fork_rng(devices=devices), float32_products()
    with ExitStack() as inside:
        for context in (draws, exact, repeatable(device)):
            inside.enter_context(context)
        source = find_source(model, loss, like, probe)
        batch = source.draw(SAMPLES)
        model, algorithm = copy_apart(model, algorithm)
        inside.enter_context(takes_parts(model))
        _check_shapes(model, batch[0])
        try:
            program = check_apart(model, batch[0], source.draw(MORE)[0])
            if program is not None:
                PROGRAMS[model] = program
        except Departs as departs:
            run_alone(model, str(departs))
        guard = watch(original, batch[0], source.is_public)
        _check_shapes(model, batch[0][:1])
        _check_losses(original, model, loss, batch)
        if not runs_alone(model):
            _check_gradients(model, batch[0])
        _check_contributions(model, algorithm, batch, [OWNED] if forms_shares else [])
        take_over(original, model, batch[0])
        return Checked(_find_fixed_state(model, batch[0]), guard, batch)


def _refuse_by_kind(model: nn.Module) -> None:
    """Reject models whose later errors would be misleading."""
    for name, module in model.named_modules():
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


def _check_shapes(model: nn.Module, inputs: Tensor) -> None:
    device = inputs.device.type
    outside = torch.is_autocast_enabled(device)

    def note(name: str, leaves: bool, _: Any) -> None:
        if not leaves and torch.is_autocast_enabled(device) and not outside:
            raise UserError(
                f"{describe_layer(model, name)} runs under torch.autocast, which would round the "
                "gradients that are clipped: take autocast out of the forward function, and set "
                "precision=bf16, which keeps sums in float32."
            )

    inside = Innermost(model, note)
    try:
        with torch.enable_grad(), inside, _no_checkpoints(inside):
            output = forward(model, inputs)
    except UserError:
        raise
    except Exception as error:
        if "BatchNorm" in inside.name and "more than 1 value" in str(error):
            raise mixing_error(model, inside.stack[-1]) from None
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
    if output.isnan().any():
        raise DomainError(f"the model gives NaN for {describe(inputs)}.")


@contextmanager
def _no_checkpoints(inside: Innermost) -> Iterator[None]:
    """Reject both kinds of torch's checkpoints within."""

    def refuse(*_: object, **__: object) -> None:
        raise UserError(
            f"{describe_layer(inside.model, inside.stack[-1])}: torch.utils.checkpoint is called "
            "there, and per-example gradients cannot pass that: switch it off "
            "(set_grad_checkpointing(False) in timm, gradient_checkpointing_disable() in "
            "transformers), and set trainer.micro_batch to save memory."
        )

    kinds: Any = checkpoints
    held = kinds.CheckpointFunction, kinds._checkpoint_without_reentrant_generator
    refusing = type("Refusing", (), {"apply": refuse})
    kinds.CheckpointFunction, kinds._checkpoint_without_reentrant_generator = refusing, refuse
    try:
        yield
    finally:
        kinds.CheckpointFunction, kinds._checkpoint_without_reentrant_generator = held


def _check_losses(original: nn.Module, model: nn.Module, loss: Loss, batch: Batch) -> None:
    """Reject a loss that needs more than one example's outputs; log if others change it."""
    alone, targets = per_example(loss), batch[1]
    with torch.no_grad():
        output = forward(model, batch[0])
    losses = require_outputs_alone(original, alone, output, targets)
    with torch.enable_grad():
        try:
            together = alone.loss(output, unpack(targets))
        except Exception:
            together = losses  # it is never given a batch
        mixes = not isinstance(together, Tensor) or differs(losses, together, ROUNDED)
        with torch.no_grad():  # a loss that draws numbers differs from itself
            mixes = mixes and not differs(losses, alone(output, targets), ROUNDED)
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


def _moves(alone: Loss, output: Tensor, targets: Tensor) -> bool:
    """True if some example's loss, alone, has a gradient with respect to its outputs."""
    output = output.detach().requires_grad_()
    losses = alone(output, targets)
    if not losses.requires_grad:
        return False
    (g,) = torch.autograd.grad(losses.sum(), output)
    scale = float(output.detach().abs().max())
    return bool((g.abs() * scale > 1e-5).any())


def _check_gradients(model: nn.Module, inputs: Tensor) -> None:
    """Reject a parameter that the output does not depend on."""
    with torch.enable_grad():
        reached = gradients_of(model, forward(model, inputs))
    for name in trainable(model):
        if name not in reached:
            raise UserError(
                f"parameter '{name}' has no influence on the model's output, so it would be "
                "trained by noise alone: take it out, or set requires_grad=False on it."
            )


def _check_contributions(
    model: nn.Module, algorithm: Algorithm, batch: Batch, shares: list[Any]
) -> None:
    """Reject a sum over a batch that is not that of its shares."""
    inside = Innermost(model)
    try:
        with inside:
            with same_draws():
                each = algorithm.contributions(batch, *shares)
            total = {name: torch.zeros_like(share[0]) for name, share in each.items()}
            with same_draws():
                algorithm.accumulate(total, batch, *shares)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{inside.name} has no per-example gradient: torch says: {first_line(error)} Use "
            "another layer there."
        ) from None
    _check_bounds(algorithm, each)
    sizes = {
        name: float(share.detach().abs().max()) if share.numel() else 0.0
        for name, share in each.items()
    }
    # The gradient of a bias before a norm is all rounding errors: they are compared with the rest.
    rounding = 1e-5 * max(sizes.values(), default=0.0) + 1e-12
    for name, share in each.items():
        whole = share.sum(dim=0)
        if (
            float((whole - total[name]).abs().max() if whole.numel() else 0.0)
            > 1e-3 * sizes[name] + rounding
        ):
            if not type(algorithm).__module__.startswith("zdp_bench."):
                raise UserError(
                    f"{type(algorithm).__name__}.accumulate does not add the sum of what its "
                    f"contributions() returns for '{name}'. It must add no noise either: that is "
                    "drawn for it."
                )
            raise UserError(
                f"{describe_owner(model, name)}: its rule for per-example gradients does not fit "
                "the way this model uses it; set algorithm.gradients=reference."
            )


def _check_bounds(algorithm: Algorithm, shares: dict[str, Tensor]) -> None:
    mechanism = algorithm.mechanism()
    squares = {name: squared_norms(share) for name, share in shares.items()}  # each [B]
    whole = sum(squares.values())
    for block in mechanism.blocks:
        moved = whole if mechanism.joint else squares[block.name]
        if math.isfinite(block.bound) and bool(
            (torch.as_tensor(moved).sqrt() > block.bound * (1 + 1e-4)).any()
        ):
            raise UserError(
                f"an example's contribution to '{block.name}' exceeds its bound {block.bound:g}: "
                "no ε would hold."
            )


def _find_fixed_state(model: nn.Module, inputs: Tensor) -> list[str]:
    """Return the names of buffers and frozen parameters that the output depends on."""
    fixed = []
    with torch.no_grad():
        before = forward(model, inputs)
        for name, buffer in model.named_buffers():
            if not (buffer.dtype.is_complex or buffer.dtype.is_floating_point):
                continue
            held = buffer.clone()
            buffer.mul_(1.5).add_(0.5)
            if differs(before, forward(model, inputs), tolerance=0.0):
                fixed.append(name)
            buffer.copy_(held)
    frozen = {
        name: parameter
        for name, parameter in model.named_parameters()
        if not parameter.requires_grad
    }
    if frozen:
        for parameter in frozen.values():
            parameter.requires_grad_(True)
        with torch.enable_grad():
            found = torch.autograd.grad(
                probe(forward(model, inputs)), list(frozen.values()), allow_unused=True
            )
        fixed += [
            name for name, gradient in zip(frozen, found, strict=True) if gradient is not None
        ]
    return sorted(fixed)
