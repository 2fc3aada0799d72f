"""One step of any algorithm: ledger, clipped sum, noise, gradient, descent.

Nothing else adds noise to what is trained on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from zdp_bench.algorithms import Algorithm
from zdp_bench.errors import UserError, setting
from zdp_bench.gradients import Batch
from zdp_bench.privacy.ledger import BudgetExceeded, Tally
from zdp_bench.privacy.mechanism import Mechanism
from zdp_bench.privacy.noise import NoiseSource, add_noise, correlate, round_to_grid, widen
from zdp_bench.training.batches import MICRO_BATCH, MicroBatches, free_memory, is_out_of_memory
from zdp_bench.training.captured import Programs
from zdp_bench.training.distributed import ALONE, Ranks
from zdp_bench.training.memory_layout import lay_out_as, lay_out_states
from zdp_bench.training.model_checks.state import mark_weights, require_unwritten
from zdp_bench.training.total import Total


@dataclass(frozen=True)
class Training:
    """What stays the same from step to step."""

    algorithm: Algorithm
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    noise: NoiseSource
    ledger: Tally
    max_releases: int | None = None  # the budget in steps
    ranks: Ranks = ALONE  # the processes that take the step together
    programs: Programs = field(default_factory=Programs, repr=False)
    _mechanisms: dict[tuple[bool, ...], Mechanism] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "noise", correlate(self.noise, self.mechanism()))

    @cached_property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """All parameters by name. Which of them train may change between steps."""
        return dict(self.model.named_parameters())

    def mechanism(self) -> Mechanism:
        """Return what a step releases, for the set of parameters that train now."""
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
    """Take one step of Algorithm 1 (Ziller et al. 2021, section 4.2), with any algorithm.

    Args:
        step: its number, which seeds its noise.
        micro_batches: the sampled examples in pieces; a Poisson batch may be empty. Pieces of
            `MicroBatches` are halved when memory runs out.
        expected_batch_size: the divisor, known without looking at the batch.
        of: the digest of the weights the step starts from, if they may differ when it is drawn
            again; see `Tally.append`.

    Formal guarantees:
        - The parameters change only through `total + ξ`; ξ has the covariance that
          `algorithm.mechanism()` states, and is drawn once, by rank 0.
        - The step is in the ledger before any parameter changes on any rank: none has the sum
          before rank 0 gives its share, and rank 0 writes first.

    Raises:
        BudgetExceeded: the step would exceed `max_epsilon`; nothing was drawn or changed.
        UserError: memory does not hold one example at a time, or ran out in a step taken before.
        WrittenError: model or loss changed a weight; nothing was released.
    """
    ledger, ranks = training.ledger, training.ranks
    spent = training.max_releases is not None and ledger.releases >= training.max_releases
    if spent and not ledger.holds(step, of):  # a step drawn again after a kill costs nothing
        raise BudgetExceeded
    algorithm, mechanism = training.algorithm, training.mechanism()
    device = next(iter(training.parameters.values())).device
    counted = ledger.releases
    ledger.append(step, of)  # before any of the release or its noise exists
    taken_again = ledger.releases == counted
    pieces = micro_batches.size.examples if isinstance(micro_batches, MicroBatches) else 0
    marks = mark_weights(training.parameters)
    try:
        own = training.programs.sum(algorithm, mechanism, training.model, micro_batches, ranks.size)
        if own is None:
            own = sum_contributions(algorithm, mechanism, micro_batches, device)
    except Exception:  # not ctrl-C, which may come while torch holds other weights in their place
        require_unwritten(training.parameters, marks)
        raise
    require_unwritten(training.parameters, marks)
    total, many = own, 0  # this rank's share of S, and the most examples of all
    if isinstance(micro_batches, MicroBatches) and ranks.size > 1:
        many = ranks.max(micro_batches.count) * ranks.size
    if many > MICRO_BATCH or not training.noise.repeatable:
        total = widen(own)
    if isinstance(micro_batches, MicroBatches) and ranks.max(micro_batches.size.examples != pieces):
        ledger.doubt(step)  # drawn again, the sum would be rounded in other pieces
        if taken_again:  # its noise belongs to a sum of other pieces
            raise UserError(
                f"out of memory in step {step:,}, which was taken before and would not be "
                "identical in smaller pieces: run the same command with "
                f"{setting('trainer.micro_batch', micro_batches.size.examples)}. It continues with "
                "new noise and counts the step again."
            )
    # Noise and division in one pass, if nothing is sent or rounded between them: the same numbers.
    at_once = algorithm.averages and ranks.size == 1 and training.noise.repeatable
    if ranks.is_first:
        total = add_noise(
            total,
            mechanism,
            training.noise,
            step,
            times=1 / expected_batch_size if at_once else 1.0,
        )
    if ranks.size > 1:
        ledger.sync()  # before the noisy sum leaves this process
    release = round_to_grid(ranks.all_reduce(total), mechanism, training.noise)
    sets_weights = algorithm.sets_weights  # of this step, which `postprocess` ends
    found = release if at_once else algorithm.postprocess(release, expected_batch_size)
    if sets_weights:
        with torch.no_grad():
            for name, weights in found.items():
                training.parameters[name].copy_(weights)
    else:
        descend(training.parameters, training.optimizer, found)


def sum_contributions(
    algorithm: Algorithm,
    mechanism: Mechanism,
    micro_batches: Iterable[Batch],
    device: torch.device,
) -> dict[str, Tensor]:
    """Return S, the sum of every example's share, over all micro-batches.

    When memory runs out the sum starts again from zero, in smaller pieces: no example counts twice.
    """
    while True:
        total, count = Total(mechanism, device), 0  # S, one tensor a block
        try:
            for piece in arguments_of(micro_batches):
                count += len(piece[0][0])
                if count > MICRO_BATCH and not total.is_wide:
                    total.widen()
                algorithm.accumulate(total, *piece)  # += Σᵢ uᵢ, ‖uᵢ‖₂ ≤ bound
            return total.whole()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or not isinstance(micro_batches, MicroBatches):
                raise
            if not micro_batches.size.halve():
                raise _no_memory(micro_batches) from None
        del total
        free_memory()  # after `except`: the error holds on to the tensors of the pass that failed


def arguments_of(micro_batches: Iterable[Batch]) -> Iterator[tuple[Any, ...]]:
    """Yield each piece as `accumulate` takes it: the batch and, if there are any, its shares."""
    if isinstance(micro_batches, MicroBatches) and micro_batches.shares is not None:
        shares = [own for _, own in micro_batches.cuts()]
        yield from zip(micro_batches, shares, strict=True)
    else:
        yield from ((batch,) for batch in micro_batches)


def _no_memory(micro_batches: MicroBatches) -> UserError:
    many = max(micro_batches.shares or (1,))
    if many > 1:
        return UserError(
            f"out of memory with the {many} examples of one owner at a time: reduce "
            "privacy.max_examples or trainer.augmentations, or use a smaller model or smaller "
            "inputs."
        )
    return UserError(
        "out of memory with one example at a time: use a smaller model, smaller inputs or another "
        "device."
    )


def descend(
    parameters: dict[str, torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    gradients: dict[str, Tensor],
) -> None:
    """Take one optimiser step along the released gradient of the parameters that train."""
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            parameter.grad = lay_out_as(parameter, gradients[name])
        else:  # a gradient left from before it was frozen would move it: no noise is on that
            parameter.grad = None
    lay_out_states(optimizer)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
