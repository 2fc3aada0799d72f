"""One private step of any algorithm: ledger, clipped sum, noise, gradient, optimizer step.

This is the only place where privacy noise is added to what changes the model.
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
from zdp_bench.privacy.mechanism import Mechanism
from zdp_bench.privacy.noise import NoiseSource, add_noise, correlate, round_to_grid, widen
from zdp_bench.privacy.tally import BudgetExceeded, Tally
from zdp_bench.training.batches import MICRO_BATCH, MicroBatches, free_memory, is_out_of_memory
from zdp_bench.training.captured import CapturedSums
from zdp_bench.training.distributed import ALONE, Ranks
from zdp_bench.training.memory_layout import lay_out_as, lay_out_states
from zdp_bench.training.model_checks.state import mark_weights, require_unwritten
from zdp_bench.training.total import Total


@dataclass(frozen=True)
class Training:
    """What stays the same from step to step.

    Attributes:
        noise: source of the noise. It is wrapped in `CorrelatedNoise` if the algorithm's mechanism
            correlates the noise of its steps.
        max_releases: number of releases that the budget allows; None without a budget.
        ranks: processes that take each step together.
        captured_sums: CUDA graphs that sum shares, recorded in earlier steps.
    """

    algorithm: Algorithm
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    noise: NoiseSource
    ledger: Tally
    max_releases: int | None = None
    ranks: Ranks = ALONE
    captured_sums: CapturedSums = field(default_factory=CapturedSums, repr=False)
    _mechanisms: dict[tuple[bool, ...], Mechanism] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "noise", correlate(self.noise, self.mechanism()))

    @cached_property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """All parameters by name. The set of those that require gradients may change."""
        return dict(self.model.named_parameters())

    def mechanism(self) -> Mechanism:
        """Return the mechanism of a step with the parameters that require gradients now.

        It is cached, because captured sums belong to one mechanism object.
        """
        trained = tuple(parameter.requires_grad for parameter in self.parameters.values())
        if trained not in self._mechanisms:
            self._mechanisms[trained] = self.algorithm.mechanism()
        return self._mechanisms[trained]


def private_step(
    training: Training,
    step: int,
    micro_batches: Iterable[Batch],
    expected_batch_size: float,
    weights_digest: str = "",
) -> None:
    """Take one step of Algorithm 1 (Ziller et al. 2021, section 4.2) with any algorithm.

    Args:
        training: what stays the same from step to step.
        step: number of the step, from 0. Seeded noise is a function of it.
        micro_batches: the sampled examples. There may be none, because Poisson sampling can draw an
            empty batch. If memory runs out, the micro-batches of a `MicroBatches` are halved.
        expected_batch_size: divisor of the noisy sum. It must not depend on the sampled batch.
        weights_digest: digest of the starting weights. Pass it only if a repeat of this step may
            start from other weights; see `Tally.append`.

    Formal guarantees:
        - The parameters change only through `total + ξ`. ξ has the covariance that
          `algorithm.mechanism()` states, and is drawn once, by rank 0.
        - The step is in the ledger before any parameter changes on any rank: rank 0 writes the line
          before it joins the all-reduce, and no rank has the sum before that.

    Raises:
        BudgetExceeded: the step would exceed `max_epsilon`. Nothing was drawn or changed.
        UserError: there is not enough memory for one example, or memory ran out in a step that
            repeats an earlier one.
        WrittenError: the model or the loss changed a weight. Nothing was released.
    """
    ledger, ranks = training.ledger, training.ranks
    spent = training.max_releases is not None and ledger.releases >= training.max_releases
    if spent and not ledger.holds(step, weights_digest):  # repeating a release costs nothing
        raise BudgetExceeded
    algorithm, mechanism = training.algorithm, training.mechanism()
    device = next(iter(training.parameters.values())).device
    releases_before = ledger.releases
    ledger.append(step, weights_digest)  # before the sum and its noise exist
    is_repeat = ledger.releases == releases_before  # the ledger had this release already
    size_before = micro_batches.size.examples if isinstance(micro_batches, MicroBatches) else 0
    marks = mark_weights(training.parameters)
    try:
        local_sum = training.captured_sums.sum(
            algorithm,
            mechanism,
            training.model,
            micro_batches,
            ranks.size,
        )
        if local_sum is None:  # this step cannot use a CUDA graph: sum eagerly
            local_sum = sum_shares(algorithm, mechanism, micro_batches, device)
    except Exception:
        # This excludes KeyboardInterrupt, at which torch may still have other tensors in place of
        # the weights: `require_unwritten` would then fail although no weight was written.
        require_unwritten(training.parameters, marks)
        raise
    require_unwritten(training.parameters, marks)
    total = local_sum
    # Upper bound on the examples of all ranks; 0 for one rank, whose sum has widened itself.
    max_examples = 0
    if isinstance(micro_batches, MicroBatches) and ranks.size > 1:
        max_examples = ranks.max(micro_batches.count) * ranks.size
    is_secure = not training.noise.repeatable  # secure noise alone is never drawn twice
    # float32 would round a sum over many examples too coarsely, and secure noise must be added
    # before the sum is rounded to its grid.
    if max_examples > MICRO_BATCH or is_secure:
        total = widen(local_sum)
    if isinstance(micro_batches, MicroBatches):
        was_halved = ranks.max(micro_batches.size.examples != size_before)
        if was_halved:
            # A repeat would begin with the smaller micro-batches, whose sum rounds differently.
            ledger.forbid_repeats(step)
        if was_halved and is_repeat:  # the same noise must not hide two different sums
            raise UserError(
                f"out of memory in step {step:,}, which was taken before and would not be "
                "identical with smaller micro-batches: run the same command with "
                f"{setting('trainer.micro_batch', micro_batches.size.examples)}. It continues with "
                "new noise and counts the step again."
            )
    # Fuse the division into the noise pass if the algorithm only averages, nothing is sent (one
    # rank) and nothing is rounded to a grid (seeded noise). The result is bit-identical.
    fuse_division = algorithm.averages and ranks.size == 1 and not is_secure
    if ranks.is_first:
        total = add_noise(
            total,
            mechanism,
            training.noise,
            step,
            times=1 / expected_batch_size if fuse_division else 1.0,
        )
    if ranks.size > 1:
        ledger.sync()  # before the noisy sum leaves this process
    release = round_to_grid(ranks.all_reduce(total), mechanism, training.noise)
    # Read before `postprocess`, which advances the algorithm to its next step.
    sets_weights = algorithm.sets_weights
    if fuse_division:
        update = release
    else:
        update = algorithm.postprocess(release, expected_batch_size)
    if sets_weights:
        with torch.no_grad():
            for name, weights in update.items():
                training.parameters[name].copy_(weights)
    else:
        descend(training.parameters, training.optimizer, update)


def sum_shares(
    algorithm: Algorithm,
    mechanism: Mechanism,
    micro_batches: Iterable[Batch],
    device: torch.device,
) -> dict[str, Tensor]:
    """Return S, the sum of all examples' shares over all micro-batches.

    If memory runs out, the sum starts again from zero with smaller micro-batches, so no example
    counts twice.
    """
    while True:
        total = Total(mechanism, device)  # S, one tensor per block
        num_examples = 0
        try:
            for arguments in arguments_of(micro_batches):
                batch = arguments[0]
                num_examples += len(batch[0])
                if num_examples > MICRO_BATCH and not total.is_wide:
                    total.widen()
                algorithm.accumulate(total, *arguments)  # += Σᵢ uᵢ, ‖uᵢ‖₂ ≤ bound
            return total.whole()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or not isinstance(micro_batches, MicroBatches):
                raise
            if not micro_batches.size.halve():
                raise _out_of_memory(micro_batches) from None
        del total
        free_memory()  # after `except`, because the error keeps the tensors of the failed pass


def arguments_of(micro_batches: Iterable[Batch]) -> Iterator[tuple[Any, ...]]:
    """Yield `accumulate`'s arguments for each micro-batch: `(batch,)` or `(batch, share_sizes)`.

    `share_sizes` has the number of examples of each share, an owner's.
    """
    if isinstance(micro_batches, MicroBatches) and micro_batches.shares is not None:
        share_sizes = [sizes for _, sizes in micro_batches.cuts()]
        yield from zip(micro_batches, share_sizes, strict=True)
    else:
        yield from ((batch,) for batch in micro_batches)


def _out_of_memory(micro_batches: MicroBatches) -> UserError:
    """Return the error that states what did not fit: one owner's examples, or a single example."""
    largest_share = max(micro_batches.shares or (1,))
    if largest_share > 1:
        return UserError(
            f"out of memory with the {largest_share} examples of one owner at a time: reduce "
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
    """Take one optimizer step with the released gradients.

    Args:
        parameters: all parameters by name. Those that do not require gradients stay unchanged.
        optimizer: takes the step. Its gradients are None afterwards.
        gradients: noisy gradients of the parameters that require them, by name.
    """
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            # Fused optimizers ignore strides, so gradient and state must have the weight's layout.
            parameter.grad = lay_out_as(parameter, gradients[name])
        else:  # a stale gradient from before freezing would still be applied, without noise
            parameter.grad = None
    lay_out_states(optimizer)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
