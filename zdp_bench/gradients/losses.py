"""The loss as the engines call it: for one example at a time.

Clipping bounds an example's effect through its own loss. It bounds nothing if that loss also
depends on other examples: on their outputs, their targets, or their number. No loss is therefore
called on a batch of several examples, unless it provably keeps them apart. A loss gets copies of
outputs and targets, so that it cannot change them for a later call.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy

from zdp_bench.errors import UserError, first_line, is_out_of_memory
from zdp_bench.gradients.clipping import Loss, split_batch, trainable
from zdp_bench.gradients.mapping import map_rows
from zdp_bench.gradients.outside_state import Restore, preserve_outside_state
from zdp_bench.gradients.parts import advice_on_parts, describe, unpack
from zdp_bench.gradients.program import copy_apart
from zdp_bench.gradients.program.autograd import graph_nodes


class DomainError(UserError):
    """Raised if the loss or the model fails on its inputs."""


# Largest difference that counts as rounding, relative to the largest number.
ROUNDING = 1e-4


# This is no TypeError, because Python would turn a TypeError in `==` into False.
class _NotCrossEntropy(Exception):  # noqa: N818
    """Raised if a loss does anything with its arguments but compute their cross-entropy."""


class _Rows(Tensor):
    """A placeholder for outputs or targets, whose numbers the loss cannot read.

    Only `cross_entropy` without reduction accepts it. It computes each row from this row alone, so
    it may process all rows at once, which takes a twentieth of vmap's time.
    """

    tensor: Tensor  # the outputs or targets [B, ...] that it stands for

    @staticmethod
    def wrap(tensor: Tensor) -> _Rows:
        rows = torch.empty(0, device="meta").as_subclass(_Rows)
        vars(rows)["tensor"] = tensor
        return rows

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        _: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        if func is not cross_entropy:
            raise _NotCrossEntropy
        outputs, targets = [vars(rows)["tensor"] for rows in args]
        losses = func(outputs, targets, **kwargs)
        if losses.shape != (len(outputs),):  # a mean, or several losses per row
            raise _NotCrossEntropy
        return _Rows.wrap(losses)


class _Differentiated(torch.autograd.Function):
    """A loss whose gradient with respect to the output is known."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, loss: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradients with respect to output [1, ...], loss and gradient."""
        (gradient,) = ctx.saved_tensors
        return factor * gradient, None, None


def draw_seeds(examples: int) -> list[int]:
    """Draw a seed for the random numbers of each example."""
    seeds: list[int] = torch.randint(2**62, (examples,)).tolist()
    return seeds


def seed_torch(seed: int) -> None:
    """Seed torch's random number generators on all devices."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:  # the same numbers, but faster: `manual_seed` records a stack trace for absent devices
        torch.default_generator.manual_seed(seed)


def set_seed(seed: int) -> None:
    """Seed the random number generators of torch, Python and NumPy."""
    seed_torch(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def preserve_random_state(devices: list[torch.device] | None = None) -> Iterator[None]:
    """Restore the random states of Python, NumPy and torch on exit.

    Args:
        devices: GPUs whose states are restored. Default: all.
    """
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def are_alike(first: Tensor, second: Tensor, reference: Tensor) -> bool:
    """Return True if two tensors have the same shape and type and differ by rounding only.

    Args:
        first: a tensor.
        second: a tensor.
        reference: tensor whose largest finite magnitude sets the scale of rounding, such as the
            values of the whole batch.
    """
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    largest = 0.0
    if reference.numel():
        largest = float(reference.detach().abs().nan_to_num(posinf=0.0).max())
    return torch.allclose(first, second, rtol=0.0, atol=ROUNDING * largest, equal_nan=True)


class PerExample:
    """A loss (outputs, targets) -> [B] that computes each example's loss from this example alone.

    The wrapped loss is first called with placeholders that only torch's cross-entropy accepts. If
    it does anything else, it is called on batches of one example: through `torch.vmap` or, if vmap
    cannot map the loss, in a loop.

    Args:
        loss: (outputs, targets) -> one loss per example. Targets packed by `pack` are unpacked.
        proved: call the loss on whole batches. Only for a loss that provably keeps examples apart.
            Default: False.

    Formal guarantee (unless `proved`): an example's loss is computed from copies of its outputs and
        targets, and from the loss's own state, which no earlier example has changed.
    """

    def __init__(
        self,
        loss: Callable[..., Any],
        proved: bool = False,
    ) -> None:
        self.loss, self.proved = loss, proved
        self.weights: Tensor | None = None  # [B], inside `weighted`
        self.loops = False  # True once vmap has failed, or the loss has changed outside state
        self._is_cross_entropy = True  # False once placeholders have failed

    @contextmanager
    def weighted(self, weights: Tensor) -> Iterator[None]:
        """Multiply the losses by weights [B] inside the context. 0 excludes an example."""
        self.weights = weights
        try:
            yield
        finally:
            self.weights = None

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return one loss per example, [B], times its weight."""
        losses = self.each(outputs, targets)
        return losses if self.weights is None else losses * self.weights

    def each(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return one loss per example, [B]."""
        if self.proved or len(outputs) == 0:
            whole: Tensor = self.loss(outputs, unpack(targets))
            return whole
        # torch's own loss keeps nothing, and is copied for each call.
        roots = () if type(self.loss) is nn.CrossEntropyLoss else (self.loss,)
        if self._is_cross_entropy:
            try:
                with preserve_outside_state(*roots):
                    return self._compute_by_placeholders(outputs, targets)
            except Exception as error:
                _raise_unavoidable(error)
                self._is_cross_entropy = False
        with preserve_outside_state(*roots) as restore:
            return self._compute_separately(outputs, targets, restore)

    def _compute_separately(self, outputs: Tensor, targets: Tensor, restore: Restore) -> Tensor:
        """Return the losses [B] by vmap if it supports the loss, else in a loop."""
        if not self.loops:
            batches_of_one = outputs.unsqueeze(1), targets.unsqueeze(1)
            try:
                losses = map_rows(self.compute_one, *batches_of_one, randomness="different")
                self.loops = restore()
            except Exception as error:
                _raise_unavoidable(error)
                self.loops = True
            if not self.loops:
                return losses.squeeze(1)
        try:
            return self._compute_in_loop(outputs, targets, restore)
        except Exception as error:
            _raise_unavoidable(error)
            target_description = describe(targets[:1]).replace("inputs", "targets")
            raise DomainError(
                f"the loss cannot take outputs of shape {[1, *outputs.shape[1:]]} with "
                f"{target_description}: {first_line(error)}{advice_on_parts(targets)} It is "
                "computed for each example separately, so that no other can affect it."
            ) from None

    def _compute_by_placeholders(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the losses [B] of a cross-entropy.

        Raises:
            _NotCrossEntropy: the loss is another function.
        """
        arguments = _Rows.wrap(outputs), _Rows.wrap(targets)
        losses = self._fresh_loss()(*arguments)
        if type(losses) is not _Rows or losses is arguments[0] or losses is arguments[1]:
            raise _NotCrossEntropy
        return vars(losses)["tensor"]

    def _compute_in_loop(self, outputs: Tensor, targets: Tensor, restore: Restore) -> Tensor:
        """Return the losses [B], each from its own call and with the same outside state.

        A loss is differentiated before the outside state is restored, because its backward pass
        may need what the loss has stored there, such as the numbers of a NumPy buffer.
        """
        seeds = draw_seeds(len(outputs))
        first = outputs[:1].detach(), targets[:1], seeds[0]
        examples = zip(split_batch((outputs, targets)), seeds, strict=True)
        rows = []
        with preserve_random_state([outputs.device] if outputs.device.type == "cuda" else []):
            for (output, target), seed in examples:
                restore()
                if outputs.requires_grad and torch.is_grad_enabled():
                    rows.append(self._differentiate_seeded(output, target, seed))
                else:
                    rows.append(self.compute_seeded(output, target, seed))
            losses = torch.cat(rows)
            self.require_stateless(first, losses.detach())
            return losses

    def _differentiate_seeded(self, output: Tensor, target: Tensor, seed: int) -> Tensor:
        """Return the loss [1] of an output [1, ...], with its gradient already computed."""
        leaf = output.detach().requires_grad_()
        loss = self.compute_seeded(leaf, target, seed)
        if not loss.requires_grad:
            return loss
        (gradient,) = torch.autograd.grad(loss, leaf, allow_unused=True)
        if gradient is None:
            return loss.detach()
        return _Differentiated.apply(output, loss.detach(), gradient)

    def _fresh_loss(self) -> Callable[..., Any]:
        """Return the loss. A module is copied, so that its state does not outlive a call."""
        if not isinstance(self.loss, nn.Module):
            return self.loss
        return copy_apart(self.loss, tuple(self.loss.parameters()))

    def compute_seeded(
        self,
        outputs: Tensor,
        targets: Tensor,
        seed: int,
    ) -> Tensor:
        """Return the loss [1] of a batch of one example, after seeding random numbers.

        The loss may differentiate with respect to the outputs, also where no caller does.
        """
        set_seed(seed)
        if not outputs.requires_grad and (outputs.is_floating_point() or outputs.is_complex()):
            outputs = outputs.detach().requires_grad_()
        return self.compute_one(outputs, targets)

    @torch.no_grad()
    def require_stateless(
        self,
        first: tuple[Tensor, Tensor, int],
        losses: Tensor,
    ) -> None:
        """Reject a loss that has changed for the first example after all others.

        Args:
            first: output [1, ...], target [1, ...] and seed of the first example.
            losses: losses of all examples as first computed, [B].
        """
        if not are_alike(losses[:1], self.compute_seeded(*first), losses):
            raise self.make_state_error()

    def make_state_error(self) -> UserError:
        """Return the error for a loss whose value for an example changes between calls."""
        return UserError(
            "the loss of an example changes once others are computed, so it keeps state that "
            "depends on them, which clipping cannot bound: compute it from outputs and targets "
            "only, and draw random numbers with torch's functions, not with a generator of its own."
        )

    def compute_one(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss [1] of a batch of one example. It may differentiate in any context."""
        with torch.enable_grad():
            losses = self._fresh_loss()(outputs.clone(), unpack(targets.clone()))
        if not isinstance(losses, Tensor):
            description = type(losses).__name__
        elif not losses.is_floating_point():
            description = str(losses.dtype).removeprefix("torch.")
        elif losses.shape != (1,):
            description = f"shape {list(losses.shape)}"
        else:
            return losses if torch.is_grad_enabled() else losses.detach()
        raise UserError(
            f"the loss gives {description} for 1 example: it must return one real number per "
            'example, never a mean; torch\'s losses do with reduction="none".'
        )


def _raise_unavoidable(error: Exception) -> None:
    """Raise an error that would also occur if the losses were computed in another way."""
    if isinstance(error, UserError) or is_out_of_memory(error):
        raise error


def per_example(loss: Loss) -> PerExample:
    """Wrap a loss so that it computes each example separately, unless it already does."""
    return loss if isinstance(loss, PerExample) else PerExample(loss)


def require_outputs_alone(
    model: nn.Module, loss: PerExample, outputs: Tensor, targets: Tensor
) -> Tensor:
    """Return the losses [B], which may depend on parameters only through the outputs.

    Raises:
        UserError: they also depend on parameters directly, or on a tensor that requires a gradient
            and stays from call to call.
    """
    with torch.enable_grad():
        losses = loss(outputs.detach(), targets)
    if not losses.requires_grad:
        return losses
    parameters = trainable(model)
    values = list(parameters.values())
    gradients = torch.autograd.grad(losses.sum(), values, allow_unused=True)
    named = zip(parameters, gradients, strict=True)
    used = [name for name, gradient in named if gradient is not None]
    if not used:
        with torch.enable_grad():  # what a call creates, as an inner loop does, is no parameter
            own = _leaves_of(losses).keys() & _leaves_of(loss(outputs.detach(), targets)).keys()
        if not own:
            return losses
        raise UserError(
            "the loss has parameters of its own, which would not be trained: make them part of the "
            "model, and let the model return what the loss compares."
        )
    raise UserError(
        f"the loss depends on parameter '{used[0]}' beside the model's outputs, and that gradient "
        "would be lost, because no per-example gradient includes it. If the term does not depend "
        "on the training examples, such as a penalty on weights, pass it to make_private as "
        "regulariser=lambda model: ...; otherwise let the model return what the loss needs."
    )


def _leaves_of(losses: Tensor) -> dict[int, Tensor]:
    """Return the tensors that losses can be differentiated by, by their id.

    As long as the dictionary holds them, no other tensor gets one of these ids.
    """
    nodes = [node for node in graph_nodes(losses) if type(node).__name__ == "AccumulateGrad"]
    return {id(node.variable): node.variable for node in nodes}
