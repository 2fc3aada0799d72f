"""The loss as the engines call it: for one example at a time.

Clipping bounds what an example does through its own loss, and nothing if that loss also depends on
other examples: on their outputs, their targets, or how many there are. No loss is trusted with a
batch, so that nobody has to find out whether it mixes one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from zdp_bench.errors import UserError, first_line
from zdp_bench.gradients.clipping import Loss
from zdp_bench.gradients.held import held_by
from zdp_bench.gradients.parts import describe, unpack


class PerExample:
    """A loss (outputs, targets) -> [B] that computes each example's from this example alone.

    Args:
        loss: (outputs, targets) -> one loss per example. It gets batches of one: by torch.func's
            vmap or, where that cannot map it, one after another. Targets that `pack` packed are
            unpacked for it.
        proved: True gives it the whole batch. Only for a loss that provably keeps examples apart.

    Formal guarantees (unless `proved`): nothing of another example reaches an example's loss, not
    by way of the loss's own state either, as far as `held_by` sees it: from its second call on it
    may not change any.
    """

    def __init__(self, loss: Callable[..., Any], proved: bool = False) -> None:
        self.loss, self.proved = loss, proved
        self.loops = False  # True from when vmap fails on
        self._called = False

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return one loss per example, [B].

        Raises:
            UserError: the loss cannot take one example alone, answers with something other than one
                real number, or keeps something of what it saw.
        """
        if self.proved or len(outputs) == 0:
            whole: Tensor = self.loss(outputs, unpack(targets))
            return whole
        if not self.loops:
            try:
                rows = outputs.unsqueeze(1), targets.unsqueeze(1)  # batches of one
                return vmap(self.of_one, randomness="different")(*rows).squeeze(1)
            except Exception as error:
                if isinstance(error, UserError) or "memory" in str(error):
                    raise
                self.loops = True
        batches = zip(outputs.split(1), targets.split(1), strict=True)
        try:
            before = self._answer(outputs, targets)
            losses = torch.cat([self.of_one(*one) for one in batches])
            after = self._answer(outputs, targets)
        except Exception as error:
            if isinstance(error, UserError) or "memory" in str(error):
                raise
            asked = describe(targets[:1]).replace("inputs", "targets")
            raise UserError(
                f"the loss cannot take outputs of shape {[1, *outputs.shape[1:]]} with {asked}: "
                f"{first_line(error)} It is computed for each record alone, so that no other "
                "record can reach it."
            ) from None
        # Of a loss that vmap maps, Python sees no number; this one could keep what it sees where
        # `held_by` does not look: in a file, in a generator.
        if not torch.equal(before, after):
            raise UserError(
                "the loss answers the same outputs and target otherwise after a batch than before "
                "it, so it keeps what it saw of one record for the next, which nothing bounds: "
                "compute it from outputs and targets alone."
            )
        return losses

    def _answer(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the losses of two outputs that are no example's, at the first target."""
        answers = []
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for scale in (1.0, 30.0):
                torch.manual_seed(0)
                numbers = scale * torch.randn(outputs[:1].shape, dtype=outputs.dtype)
                answers.append(self.of_one(numbers.to(outputs.device), targets[:1]))
        return torch.cat(answers).nan_to_num()

    def of_one(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss [1] of a batch of one."""
        before = held_by(self.loss)
        losses = self.loss(outputs, unpack(targets))
        if not isinstance(losses, Tensor) or losses.shape != (1,) or losses.is_complex():
            is_tensor = isinstance(losses, Tensor)
            gives = f"shape {list(losses.shape)}" if is_tensor else type(losses).__name__
            raise UserError(
                f"the loss gives {gives} for 1 record: it must give one real number a record, "
                "never a mean."
            )
        after = held_by(self.loss)
        if self._called and (changed := before.differs_from(after)):
            raise UserError(
                f"the loss changes '{changed}' when it is called, so what it saw of one record "
                "would reach the next ones, which nothing bounds: compute it from outputs and "
                "targets alone."
            )
        self._called = True
        return losses


def per_example(loss: Loss) -> PerExample:
    """Return a loss that computes each example's alone; one that does already, as it is."""
    return loss if isinstance(loss, PerExample) else PerExample(loss)
