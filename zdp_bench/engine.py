"""One step, for every algorithm: sample, bound, sum, noise once, write it down, descend."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from zdp_bench.algorithms import Algorithm
from zdp_bench.distributed import ALONE, Ranks
from zdp_bench.gradients import Batch
from zdp_bench.gradients.clipping import trainable
from zdp_bench.privacy.ledger import BudgetExceeded, Ledger
from zdp_bench.privacy.mechanism import Mechanism
from zdp_bench.privacy.noise import NoiseSource, add_noise


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


def private_step(training: Training, step: int, micro_batches: Iterator[Batch], expected_batch_size: float) -> None:
    """Take one step of Algorithm 1 (Ziller et al. 2021, section 4.2), whatever the algorithm.

    Args:
        step: its number, which names its noise.
        micro_batches: the sampled records in pieces that fit memory; may hold none (a Poisson batch on small data often does).
        expected_batch_size: the divisor, known without looking at the batch.

    Formal guarantees:
        - The parameters change only through `total + ξ`; ξ has `algorithm.mechanism()`'s covariance, drawn once, by rank 0.
        - The step stands in the ledger before any parameter changes, on whatever rank: none has the sum before rank 0 gives its
          share, and rank 0 writes first.

    Raises:
        BudgetExceeded: the step would pass `max_epsilon`; nothing was drawn, nothing changed.
    """
    spent = training.max_releases is not None and training.ledger.releases >= training.max_releases
    if spent and not training.ledger.holds(step):  # a step drawn before a kill, and now again, costs nothing new
        raise BudgetExceeded
    algorithm, mechanism, ranks = training.algorithm, training.algorithm.mechanism(), training.ranks
    device = next(training.model.parameters()).device
    training.ledger.append(step)  # before the release exists, and before any of its noise is drawn
    with drawn_aside(mechanism, training.noise, step, device) if ranks.first else nullcontext(_unchanged) as noise:
        total = zeros(mechanism, device)  # S, one tensor a block
        for batch in micro_batches:
            algorithm.accumulate(total, batch)  # += Σᵢ uᵢ, ‖uᵢ‖₂ ≤ bound
        release = ranks.all_reduce(noise(total))
    descend(training.model, training.optimizer, algorithm.postprocess(release, expected_batch_size))


def _unchanged(total: dict[str, Tensor]) -> dict[str, Tensor]:
    return total


@contextmanager
def drawn_aside(
    mechanism: Mechanism, source: NoiseSource, step: int, device: torch.device
) -> Iterator[Callable[[dict[str, Tensor]], dict[str, Tensor]]]:
    """The step's noise, drawn by another thread while this one computes: on a CPU drawing takes as long as a small step.

    Yields what turns S into the release S + ξ, the very bits `add_noise` gives: a step's noise is a function of (seed, step,
    block) alone, whoever draws it. On a GPU, where drawing is cheap and streams would have to meet, nothing is done aside.
    """
    if device.type != "cpu" or all(block.noise == "none" for block in mechanism.blocks):
        yield lambda total: add_noise(total, mechanism, source, step)
        return
    drawn = _drawer(os.getpid()).submit(add_noise, zeros(mechanism, device), mechanism, source, step)

    def release(total: dict[str, Tensor]) -> dict[str, Tensor]:
        for name, value in drawn.result().items():
            total[name].add_(value)
        return total

    try:
        yield release
    finally:
        drawn.cancel()


@cache
def _drawer(process: int) -> ThreadPoolExecutor:
    """The thread that draws, one a process: a fork takes no threads along.

    It must not bring OpenMP threads of its own: they would wait for the step's, and it for them.
    """
    threads = torch.get_num_threads()
    drawer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="noise", initializer=torch.set_num_threads, initargs=(1,))
    drawer.submit(torch.get_num_threads).result()
    torch.set_num_threads(threads)  # torch's number for threads yet to come, which the drawer has just changed
    return drawer


def zeros(mechanism: Mechanism, device: torch.device) -> dict[str, Tensor]:
    """S before the first record: one zero tensor a block."""
    return {block.name: torch.zeros(block.shape, dtype=getattr(torch, block.dtype), device=device) for block in mechanism.blocks}


def descend(model: torch.nn.Module, optimizer: torch.optim.Optimizer, gradients: dict[str, Tensor]) -> None:
    """One optimiser step along the released gradient."""
    for name, parameter in trainable(model).items():
        parameter.grad = gradients[name]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
