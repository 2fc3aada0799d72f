"""One step, for every algorithm: sample, bound, sum, noise once, write it down, descend."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import torch
from torch import Tensor

from zdp_bench.algorithms import Algorithm, mean
from zdp_bench.errors import UserError
from zdp_bench.gradients import Batch
from zdp_bench.nn.convolution import weights_kept
from zdp_bench.privacy.ledger import BudgetExceeded, Ledger
from zdp_bench.privacy.mechanism import Mechanism
from zdp_bench.privacy.noise import NoiseSource, add_noise, round_to_grid, widen
from zdp_bench.training.distributed import ALONE, Ranks
from zdp_bench.training.micro_batches import MicroBatches, let_go, ran_out


@dataclass(frozen=True)
class Training:
    """What stays the same from step to step.

    Attributes:
        max_releases: the budget, in steps; None where no `max_epsilon` was set.
        ranks: this process among those that take the step together; each brings its share of the records.
    """

    algorithm: Algorithm
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    noise: NoiseSource
    ledger: Ledger
    max_releases: int | None = None
    ranks: Ranks = ALONE

    @cached_property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """All of the model's, by name: the objects that the optimizer holds. Which of them train may change between steps."""
        return dict(self.model.named_parameters())

    @cached_property
    def _mechanisms(self) -> dict[tuple[bool, ...], Mechanism]:
        return {}

    def mechanism(self) -> Mechanism:
        """What the algorithm releases; asked of it again when other parameters train than ever before."""
        which = tuple(parameter.requires_grad for parameter in self.parameters.values())
        if which not in self._mechanisms:
            self._mechanisms[which] = self.algorithm.mechanism()
        return self._mechanisms[which]


def private_step(
    training: Training,
    step: int,
    micro_batches: Iterable[Batch],
    expected_batch_size: float,
    of: str = "",
) -> None:
    """Take one step of Algorithm 1 (Ziller et al. 2021, section 4.2), whatever the algorithm.

    Args:
        step: its number, which names its noise.
        micro_batches: the sampled records in pieces; may hold none (a Poisson batch on small data often does). Where they are
            `memory.MicroBatches` and memory runs out, the pieces are halved.
        expected_batch_size: the divisor, known without looking at the batch.
        of: the digest of what the step starts from, where that may differ when it is drawn again; see `Ledger.append`.

    Formal guarantees:
        - The parameters change only through `total + ξ`; ξ has `algorithm.mechanism()`'s covariance, drawn once, by rank 0.
        - The step stands in the ledger before any parameter changes, on whatever rank: none has the sum before rank 0 gives its
          share, and rank 0 writes first.

    Raises:
        BudgetExceeded: the step would pass `max_epsilon`; nothing was drawn, nothing changed.
        UserError: memory does not even hold one record at a time; or it ran out in a step that was taken before.
    """
    spent = training.max_releases is not None and training.ledger.releases >= training.max_releases
    if spent and not training.ledger.holds(
        step, of
    ):  # a step drawn before a kill, and now again, costs nothing new
        raise BudgetExceeded
    algorithm, mechanism, ranks = training.algorithm, training.mechanism(), training.ranks
    device = next(iter(training.parameters.values())).device
    counted = training.ledger.releases
    training.ledger.append(
        step, of
    )  # before the release exists, and before any of its noise is drawn
    taken_again = training.ledger.releases == counted
    pieces = micro_batches.size.records if isinstance(micro_batches, MicroBatches) else 0
    total = widen(
        summed(algorithm, mechanism, micro_batches, device, training.model), training.noise
    )  # this rank's share of S
    if isinstance(micro_batches, MicroBatches) and ranks.largest(
        micro_batches.size.records != pieces
    ):
        training.ledger.doubt(
            step
        )  # the sum was cut into other pieces than it will be when it is drawn again
        if taken_again:  # before the release: its noise belongs to a sum of other pieces
            raise UserError(
                f"out of memory in step {step:,}, which was taken before and would not come out the same in smaller pieces: run "
                f"the same command with trainer.micro_batch={micro_batches.size.records}. It goes on with new noise, and counts "
                "the step again."
            )
    # The same numbers in one pass, where the noisy sum is only divided, and not sent or rounded before.
    at_once = algorithm.postprocess is mean and ranks.size == 1 and training.noise.repeatable
    if ranks.first:
        total = add_noise(
            total,
            mechanism,
            training.noise,
            step,
            times=1 / expected_batch_size if at_once else 1.0,
        )
    release = round_to_grid(ranks.all_reduce(total), mechanism, training.noise)
    gradients = release if at_once else algorithm.postprocess(release, expected_batch_size)
    descend(training.parameters, training.optimizer, gradients)


def summed(
    algorithm: Algorithm,
    mechanism: Mechanism,
    micro_batches: Iterable[Batch],
    device: torch.device,
    model: torch.nn.Module | None = None,
) -> dict[str, Tensor]:
    """S: every record's share, added up over micro-batches; the `model`'s weights, where it is told, are prepared for them once.

    Where memory runs out the sum starts again from zero, over smaller pieces: a record already in it must not count twice.

    Raises:
        UserError: memory does not even hold one record at a time.
    """
    while True:
        total = Total(mechanism, device)  # S, one tensor a block
        try:
            pieces = iter(micro_batches)
            ahead = list(islice(pieces, 2))
            with weights_kept(model) if model is not None and len(ahead) > 1 else nullcontext():
                while ahead:
                    algorithm.accumulate(total, ahead.pop(0))  # += Σᵢ uᵢ, ‖uᵢ‖₂ ≤ bound
                    ahead += islice(pieces, 1)
            return total.whole()
        except (RuntimeError, MemoryError) as error:
            if not ran_out(error) or not isinstance(micro_batches, MicroBatches):
                raise
            if not micro_batches.size.halve():
                raise UserError(
                    "out of memory with one record at a time: take a smaller model or smaller inputs, or another device."
                ) from None
        del total
        let_go()  # after `except`: the error holds on to the tensors of the pass that failed


class Total(dict[str, Tensor]):
    """S before and while records are added: a block is zero until something is. What is added first may become the block itself
    (`gradients.add_up`), which spares a large model two passes over its memory."""

    def __init__(self, mechanism: Mechanism, device: torch.device) -> None:
        super().__init__()
        self.blocks = {block.name: block for block in mechanism.blocks}
        self.device = device

    def __missing__(self, name: str) -> Tensor:
        block = self.blocks[name]
        self[name] = torch.zeros(block.shape, dtype=getattr(torch, block.dtype), device=self.device)
        return self[name]

    def whole(self) -> dict[str, Tensor]:
        """Every block, in the mechanism's order; those nothing was added to are zero."""
        return {name: self[name] for name in self.blocks}


def descend(
    parameters: dict[str, torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    gradients: dict[str, Tensor],
) -> None:
    """One optimiser step along the released gradient, of those `parameters` that train."""
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            parameter.grad = gradients[name]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
