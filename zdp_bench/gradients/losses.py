"""The loss as the engines call it: for one example at a time.

Clipping bounds what an example does through its own loss, and nothing if that loss also depends on
other examples: on their outputs, their targets, or how many there are. No loss is trusted with a
batch, so that nobody has to find out whether it mixes one. What a loss does to its targets stays in
a copy: every pass of an example finds them as they were.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from zdp_bench.errors import UserError, first_line
from zdp_bench.gradients.clipping import Loss, split_batch, trainable
from zdp_bench.gradients.mapping import map_rows
from zdp_bench.gradients.parts import describe, unpack
from zdp_bench.gradients.program import copy_apart


class DomainError(UserError):
    """The loss or the model fails on its inputs."""


ROUNDED = 1e-4  # of the largest number, by which two ways to one number differ


class _NotRows(Exception):  # noqa: N818 - of `==`, Python would take a TypeError for False
    """A loss does more with its arguments than a cross-entropy."""


class _Rows(Tensor):
    """A placeholder for the outputs or targets of one example, which holds no number of them.

    It serves a cross-entropy without reduction alone, which keeps rows apart: torch computes that
    of all rows at once, in a twentieth of vmap's time.
    """

    held: Tensor

    @staticmethod
    def of(held: Tensor) -> _Rows:
        rows = torch.empty(0, device="meta").as_subclass(_Rows)
        vars(rows)["held"] = held
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
            raise _NotRows
        outputs, targets = [vars(rows)["held"] for rows in args]
        losses = func(outputs, targets, **kwargs)
        if losses.shape != (len(outputs),):  # a mean, or several for each row
            raise _NotRows
        return _Rows.of(losses)


def draw_seeds(examples: int) -> list[int]:
    """Return a seed for each of so many examples, whose own random numbers follow from it."""
    seeds: list[int] = torch.randint(2**62, (examples,)).tolist()
    return seeds


def seed_torch(seed: int) -> None:
    """Seed torch's random numbers of every device."""
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:  # the same numbers; torch would note the whole stack for every device there may be
        torch.default_generator.manual_seed(seed)


def set_seed(seed: int) -> None:
    """Seed torch's, Python's and numpy's random numbers."""
    seed_torch(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def kept_draws(devices: list[torch.device] | None = None) -> Iterator[None]:
    """Leave random states as they were: Python's, numpy's, torch's (None: of every device)."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def are_alike(first: Tensor, second: Tensor, of_all: Tensor) -> bool:
    """True if two tensors have one shape and differ by rounding only.

    Args:
        of_all: numbers whose largest sets the scale, such as those of the whole batch.
    """
    if first.shape != second.shape:
        return False
    largest = float(of_all.detach().abs().nan_to_num(posinf=0.0).max()) if of_all.numel() else 0.0
    return torch.allclose(first, second, rtol=0.0, atol=ROUNDED * largest, equal_nan=True)


class PerExample:
    """A loss (outputs, targets) -> [B] that computes each example's from this example alone.

    Args:
        loss: (outputs, targets) -> one loss per example. It gets stand-ins that only torch's
            cross-entropy takes or, if it does anything else, batches of one: by torch.func's vmap
            or, where that cannot map it, one after another. Targets that `pack` packed are
            unpacked for it.
        proved: True gives it the whole batch. Only for a loss that provably keeps examples apart.

    Formal guarantee (unless `proved`): an example's loss is computed from its outputs and targets,
        which are copies, and from what the loss itself holds.
    """

    def __init__(
        self,
        loss: Callable[..., Any],
        proved: bool = False,
    ) -> None:
        self.loss, self.proved = loss, proved
        self.weights: Tensor | None = None  # [B], while `weighed`
        self.loops = False  # True from when vmap fails on
        self._only_rows = True  # False from when stand-ins fail on

    @contextmanager
    def weighed(self, weights: Tensor) -> Iterator[None]:
        """Multiply the losses by weights [B] inside: 0 leaves an example out of every gradient."""
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
        if self._only_rows:
            try:
                return self._from_rows(outputs, targets)
            except Exception as error:
                _raise_unavoidable(error)
                self._only_rows = False
        if not self.loops:
            batches_of_one = outputs.unsqueeze(1), targets.unsqueeze(1)
            try:
                losses = map_rows(self.of_one, *batches_of_one, randomness="different")
                return losses.squeeze(1)
            except Exception as error:
                _raise_unavoidable(error)
                self.loops = True
        try:
            return self._one_by_one(outputs, targets)
        except Exception as error:
            _raise_unavoidable(error)
            own_targets = describe(targets[:1]).replace("inputs", "targets")
            raise DomainError(
                f"the loss cannot take outputs of shape {[1, *outputs.shape[1:]]} with "
                f"{own_targets}: {first_line(error)} It is computed for each example separately, "
                "so that no other can affect it."
            ) from None

    def _from_rows(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the losses of a cross-entropy, [B], by stand-ins."""
        arguments = _Rows.of(outputs), _Rows.of(targets)
        losses = self._fresh()(*arguments)
        if type(losses) is not _Rows or losses is arguments[0] or losses is arguments[1]:
            raise _NotRows
        return vars(losses)["held"]

    def _one_by_one(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the losses [B], each from a call of its own."""
        seeds = draw_seeds(len(outputs))
        first = outputs[:1].detach().clone(), targets[:1], seeds[0]
        examples = zip(split_batch((outputs, targets)), seeds, strict=True)
        with kept_draws([outputs.device] if outputs.device.type == "cuda" else []):
            rows = [self.of_seeded(*example, seed) for example, seed in examples]
            losses = torch.cat(rows)
            self.require_nothing_kept(first, losses.detach())
            return losses

    def _fresh(self) -> Callable[..., Any]:
        """Return the loss; of a module, a copy, so that nothing it keeps outlives a call."""
        if not isinstance(self.loss, nn.Module):
            return self.loss
        return copy_apart(self.loss, tuple(self.loss.parameters()))

    def of_seeded(
        self,
        outputs: Tensor,
        targets: Tensor,
        seed: int,
    ) -> Tensor:
        """Return the loss [1] of a batch of one, whose random numbers follow from a seed."""
        set_seed(seed)
        return self.of_one(outputs, targets)

    @torch.no_grad()
    def require_nothing_kept(
        self,
        first: tuple[Tensor, Tensor, int],
        losses: Tensor,
    ) -> None:
        """Reject a loss that is another for the first example, after those of all [B]."""
        if not are_alike(losses[:1], self.of_seeded(*first), losses):
            raise self.keeps_something()

    def keeps_something(self) -> UserError:
        """Return the error of a loss that is another at a later call."""
        return UserError(
            "the loss of an example changes once others are computed, so it keeps something of "
            "them, which clipping cannot bound: compute it from outputs and targets only, and "
            "draw random numbers by torch's functions, without a generator of its own."
        )

    def of_one(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss [1] of a batch of one."""
        losses = self._fresh()(outputs, unpack(targets.clone()))
        if not isinstance(losses, Tensor):
            gives = type(losses).__name__
        elif not losses.is_floating_point():
            gives = str(losses.dtype).removeprefix("torch.")
        elif losses.shape != (1,):
            gives = f"shape {list(losses.shape)}"
        else:
            return losses
        raise UserError(
            f"the loss gives {gives} for 1 example: it must return one real number per example, "
            "never a mean."
        )


def _raise_unavoidable(error: Exception) -> None:
    """Raise an error that no other way to the losses avoids."""
    if isinstance(error, UserError) or "memory" in str(error):
        raise error


def per_example(loss: Loss) -> PerExample:
    """Return a loss that computes each example's alone; one that does already, as it is."""
    return loss if isinstance(loss, PerExample) else PerExample(loss)


def require_outputs_alone(
    model: nn.Module, loss: PerExample, outputs: Tensor, targets: Tensor
) -> Tensor:
    """Return the losses; reject those that depend on parameters other than by the outputs."""
    with torch.enable_grad():
        losses = loss(outputs.detach(), targets)
    if not losses.requires_grad:
        return losses
    parameters = trainable(model)
    values = list(parameters.values())
    gradients = torch.autograd.grad(losses.sum(), values, allow_unused=True)
    reached = [name for name, g in zip(parameters, gradients, strict=True) if g is not None]
    if not reached:
        raise UserError(
            "the loss has parameters of its own, which would not be trained: make them part of the "
            "model, which then returns what the loss compares."
        )
    raise UserError(
        f"the loss depends on parameter '{reached[0]}' beside the model's outputs, and that "
        "gradient would be dropped: no example's clipping sees it. What no training example "
        "reaches, such as a penalty on weights, give to make_private as "
        "regulariser=lambda model: ...; let the model return whatever else the loss needs."
    )
