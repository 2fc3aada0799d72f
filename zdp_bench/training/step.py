"""One private step of any algorithm: ledger, clipped sum, noise, gradient, optimizer step.

A SHARE is what one example adds to the sum of a step after clipping. With `privacy.unit=patient`,
it is what one owner adds: a patient, or whoever else the data set's examples belong to.

A step sums the shares block by block. A BLOCK is one tensor to which the mechanism adds noise. An
algorithm that averages gradients has one block for each parameter, named as the parameter.

A process that resumes a run takes the steps since the last checkpoint again. A step that is taken
again with the same bits and the same noise is a REPEAT: it is the same release, and counts once.

Privacy noise is added to the updates of a model in this module only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from zdp_bench.algorithms import Algorithm
from zdp_bench.errors import UserError, is_out_of_memory, setting
from zdp_bench.gradients import Batch
from zdp_bench.gradients.clipping import trainable
from zdp_bench.privacy.mechanism import Mechanism
from zdp_bench.privacy.noise import NoiseSource, add_noise, correlate, make_release, to_float64
from zdp_bench.privacy.tally import BudgetExceeded, Tally
from zdp_bench.training.batches import MicroBatches, free_memory
from zdp_bench.training.captured import CapturedSums
from zdp_bench.training.distributed import ALONE, Ranks
from zdp_bench.training.memory_layout import lay_out_as, lay_out_states
from zdp_bench.training.model_checks.state import record_versions, require_unchanged
from zdp_bench.training.total import MAX_FLOAT32_EXAMPLES, Total


@dataclass(frozen=True)
class Training:
    """What all steps of a training run use.

    Attributes:
        algorithm: clips and sums the gradients, and computes the update from the noisy sum.
        model: the model, whose parameters the steps change.
        optimizer: applies the updates, unless the algorithm sets the weights itself.
        noise: source of the noise. It is wrapped in `CorrelatedNoise` if the algorithm's mechanism
            correlates the noise of its steps.
        ledger: counts the releases. On rank 0, it is a `Ledger`, which also writes them to disk.
        max_releases: largest number of releases that the budget allows; None without a budget. A
            step makes one release, unless it is a repeat.
        ranks: processes that take each step together.
        captured_sums: CUDA graphs that sum shares, captured in the first steps.
        mechanisms: what `mechanism` returned before, by the `requires_grad` of all `parameters`.
    """

    algorithm: Algorithm
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    noise: NoiseSource
    ledger: Tally
    max_releases: int | None = None
    ranks: Ranks = ALONE
    captured_sums: CapturedSums = field(default_factory=CapturedSums)
    mechanisms: dict[tuple[bool, ...], Mechanism] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "noise", correlate(self.noise, self.mechanism()))

    @cached_property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """All parameters by name, whether they require gradients or not."""
        return dict(self.model.named_parameters())

    def mechanism(self) -> Mechanism:
        """Return the mechanism of a step with the parameters that require gradients now.

        The mechanism changes if a parameter is frozen or unfrozen between steps. But `ledger` and
        `max_releases` are for a single mechanism, so a caller that freezes parameters must account
        for the other mechanisms itself. Nothing in this package freezes parameters between steps,
        and `make_private` rejects it.
        """
        requires_grad = tuple(parameter.requires_grad for parameter in self.parameters.values())
        if requires_grad not in self.mechanisms:
            self.mechanisms[requires_grad] = self.algorithm.mechanism()
        return self.mechanisms[requires_grad]


def private_step(
    training: Training,
    step: int,
    micro_batches: Iterable[Batch],
    expected_batch_size: float,
    weights_digest: str = "",
) -> None:
    """Take one step of DP-SGD (Ziller et al. 2021, Algorithm 1), generalised to any `Algorithm`.

    Args:
        training: what all steps use.
        step: number of the step, from 0. Seeded noise is a function of it.
        micro_batches: the sampled examples. There may be none, because Poisson sampling can draw an
            empty batch. If memory runs out, the examples of a `MicroBatches` are summed again in
            micro-batches of half the size. With any other iterable, the error is raised.
        expected_batch_size: divisor of the noisy sum. It must not depend on the sampled batch.
        weights_digest: in a federation, the digest of the weights from which the round of this
            step starts; otherwise, "". See `Tally.append`.

    Formal guarantees:
        - The parameters change only through S + ξ, where S is the sum of the shares on all ranks.
          ξ has the covariance that `training.mechanism()` states, and is drawn once, by rank 0.
        - The step is in the ledger before any parameter changes on any rank: rank 0 writes the
          step's line before it draws ξ, and the other ranks get S + ξ from the all-reduce.

    Raises:
        BudgetExceeded: the step would exceed `training.max_releases`. Nothing was drawn or changed.
        UserError: there is not enough memory for one share, or memory ran out in a repeat.
        WeightsChangedError: the model or the loss changed a weight. The ledger counts the step,
            although nothing was released.
    """
    ledger, ranks = training.ledger, training.ranks
    is_repeat = ledger.has_released(step, weights_digest)
    max_releases = training.max_releases
    if max_releases is not None and ledger.releases >= max_releases and not is_repeat:
        raise BudgetExceeded
    algorithm, mechanism = training.algorithm, training.mechanism()
    ledger.append(step, weights_digest)  # before the sum and its noise exist
    size_before = _micro_batch_size(micro_batches)
    local_sum = _sum_local_shares(training, mechanism, micro_batches)
    size_after = _micro_batch_size(micro_batches)  # smaller if memory ran out
    if size_after is not None and ranks.any(size_after != size_before):
        # Smaller micro-batches round differently, so no later process may repeat this step.
        ledger.revoke_starts(step)
        if is_repeat:
            # The same noise was released with another sum before. The difference of the two
            # releases would have no noise.
            smallest_size = -ranks.max(-size_after)
            raise _out_of_memory_in_repeat(step, smallest_size)
    is_secure = not training.noise.repeatable  # secure noise cannot be drawn again
    if is_secure:  # secure noise is added in float64; see `SecureNoise`
        local_sum = to_float64(local_sum)
    # `add_noise` can return the mean at once, which saves a pass over the sum.
    is_divided_by_add_noise = (
        algorithm.averages  # `postprocess` would only divide
        and ranks.size == 1  # with several ranks, the sum is complete only after the all-reduce
        and not is_secure  # `make_release` rounds the noisy sum before it is divided
    )
    factor = 1 / expected_batch_size if is_divided_by_add_noise else 1.0
    if ranks.is_first:  # ξ is added once; the all-reduce adds the sums of the other ranks
        summand = add_noise(local_sum, mechanism, training.noise, step, factor)
    else:
        summand = local_sum
    if ranks.size > 1:
        ledger.sync()  # before the noisy sum leaves rank 0, the only rank with a ledger file
    noisy_sum = ranks.all_reduce(summand)
    # `make_release` draws no noise. It rounds a sum with secure noise, then restores the dtypes.
    release = make_release(noisy_sum, mechanism, training.noise)
    # `postprocess` may change `sets_weights`: an algorithm may set the weights in its first release
    # and return gradients afterwards.
    sets_weights = algorithm.sets_weights
    if is_divided_by_add_noise:
        update = release  # already the mean, which `postprocess` would divide again
    else:
        update = algorithm.postprocess(release, expected_batch_size)
    if sets_weights:  # the update is the new weights
        with torch.no_grad():
            for name, weights in update.items():
                training.parameters[name].copy_(weights)
    else:
        descend(training.parameters, training.optimizer, update)


def _micro_batch_size(micro_batches: Iterable[Batch]) -> int | None:
    """Return the size of the micro-batches; None for an iterable that is no `MicroBatches`."""
    return micro_batches.size.examples if isinstance(micro_batches, MicroBatches) else None


def _sum_local_shares(
    training: Training, mechanism: Mechanism, micro_batches: Iterable[Batch]
) -> dict[str, Tensor]:
    """Return the sum of the shares on this rank, from a CUDA graph if the step can use one.

    The sum is in float64 on every rank if the sum over all ranks needs float64, because the ranks
    can add only sums of the same dtype.

    Raises:
        WeightsChangedError: the model or the loss changed a weight.
    """
    needs_float64 = _needs_float64(micro_batches, training.ranks)
    versions = record_versions(trainable(training.model))
    try:
        local_sum = training.captured_sums.sum(
            training.algorithm,
            mechanism,
            training.model,
            micro_batches,
            is_float64=needs_float64,
            ranks=training.ranks.size,
        )
        if local_sum is None:  # the step cannot use a CUDA graph
            device = next(iter(training.parameters.values())).device
            local_sum = sum_shares(training.algorithm, mechanism, micro_batches, device)
    except Exception:
        # If a weight was changed, raise a `WeightsChangedError` instead, because it matters more. A
        # KeyboardInterrupt is no `Exception`, so nothing replaces it.
        require_unchanged(trainable(training.model), versions)
        raise
    require_unchanged(trainable(training.model), versions)
    # `sum_shares` goes by the examples of this rank alone, so its sum may still be in float32.
    return to_float64(local_sum) if needs_float64 else local_sum


def _needs_float64(micro_batches: Iterable[Batch], ranks: Ranks) -> bool:
    """Return True if all ranks together may have too many examples for float32; see `Total`.

    With several ranks, each rank must call this function with micro-batches that can be counted.
    The ranks exchange their numbers of examples, and all get the same answer.

    An iterator cannot be counted without using it up, so it is allowed only with a single rank.
    """
    if isinstance(micro_batches, Iterator):
        return False  # `sum_shares` counts the examples while it sums them
    if isinstance(micro_batches, MicroBatches):
        num_examples = micro_batches.num_examples
    else:
        num_examples = sum(len(batch[0]) for batch in micro_batches)
    max_total_examples = ranks.max(num_examples) * ranks.size
    return max_total_examples > MAX_FLOAT32_EXAMPLES


def _out_of_memory_in_repeat(step: int, micro_batch: int) -> UserError:
    """Return the error of a repeated step that fits in memory only with smaller micro-batches."""
    return UserError(
        f"out of memory in step {step:,}, which was taken before and would not be identical with "
        "smaller micro-batches: run the same command with "
        f"{setting('trainer.micro_batch', micro_batch)}. The run then continues with new noise, "
        "and the step counts again."
    )


def sum_shares(
    algorithm: Algorithm,
    mechanism: Mechanism,
    micro_batches: Iterable[Batch],
    device: torch.device,
) -> dict[str, Tensor]:
    """Return S, the sum of all shares over all micro-batches, by block.

    S is in float64 (see `Total`) if there are more than `MAX_FLOAT32_EXAMPLES` examples. If memory
    runs out, the sum starts again from zero with smaller micro-batches, so no example counts twice.
    The later steps of the run keep the smaller size.
    """
    while True:
        total = Total(mechanism, device)
        num_examples = 0
        try:
            for batch, *other_arguments in arguments_of_accumulate(micro_batches):
                num_examples += len(batch[0])
                if num_examples > MAX_FLOAT32_EXAMPLES and not total.is_float64:
                    total.to_float64()
                # S += Σᵢ uᵢ, with ‖uᵢ‖₂ ≤ bound
                algorithm.accumulate(total, batch, *other_arguments)
            return total.all_blocks()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or not isinstance(micro_batches, MicroBatches):
                raise
            if not micro_batches.shrink():
                raise _out_of_memory(micro_batches) from None
        del total
        free_memory()  # not in `except`, where the error still holds the tensors of the failed pass


def arguments_of_accumulate(micro_batches: Iterable[Batch]) -> Iterator[tuple[Any, ...]]:
    """Yield the arguments that follow `total` in `Algorithm.accumulate`, for each micro-batch.

    They are `(batch,)` if each row of the batch has a share of its own. Otherwise, they are
    `(batch, share_sizes)`: a share then has several rows, which are the examples of one owner or
    the augmented views of one example. `share_sizes` holds the number of rows of each share.
    """
    if isinstance(micro_batches, MicroBatches) and micro_batches.share_sizes is not None:
        cuts = micro_batches.cuts()
        for batch, (_slice, share_sizes) in zip(micro_batches, cuts, strict=True):
            yield batch, share_sizes
    else:
        for batch in micro_batches:
            yield (batch,)


def _out_of_memory(micro_batches: MicroBatches) -> UserError:
    """Return the error that states what did not fit: the examples of a share, or one example."""
    largest_share_size = micro_batches.largest_share_size
    if largest_share_size > 1:
        return UserError(
            f"out of memory with the {largest_share_size} examples of one share at a time, which "
            "belong to one owner or are views of one example: reduce privacy.max_examples or "
            "trainer.augmentations, or use a smaller model or smaller inputs."
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
    """Take one step of the optimizer with the released gradients.

    Args:
        parameters: all parameters by name. Those that do not require gradients stay unchanged.
        optimizer: takes the step. Afterwards, the gradients of all parameters are None.
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
