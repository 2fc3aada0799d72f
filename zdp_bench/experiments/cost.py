"""What a run would cost here, in seconds and bytes: measured on its own records, or predicted where none may be read."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zdp_bench.algorithms import Algorithm
from zdp_bench.config.schema import Run
from zdp_bench.data import DatasetInfo
from zdp_bench.gradients import trust
from zdp_bench.privacy.noise import SeededNoise, add_noise
from zdp_bench.training.batches import MICRO_BATCH
from zdp_bench.training.environment import peak_memory
from zdp_bench.training.plan import Plan
from zdp_bench.training.setup import Setup
from zdp_bench.training.step import descend, sum_contributions

SECONDS = 3.0  # no trial step is begun that would pass this
FORWARDS = 3  # forward passes that one record's step is worth before any step was timed: its own, and a backward pass of two
NOISE_SECONDS = 1e-9  # for one number of noise on a CPU core
MOMENTS = {"adam": 2, "adamw": 2, "nadam": 2, "rmsprop": 1, "adagrad": 1, "sgd": 0}


@dataclass(frozen=True)
class Cost:
    """What all steps of a run take; evaluation comes on top.

    Attributes:
        bytes: at their most.
        measured_on: on what the steps were timed, and which.
    """

    seconds: float
    bytes: int
    measured_on: str


def measure(config: Run, timed: int = 3) -> Cost:
    """From a few whole steps on the run's own records and device, which are thrown away: nothing is written.

    Raises:
        UserError: the data, the device or the model is not usable.
    """
    setup = Setup.of(config)
    mechanism, noise = setup.mechanism, SeededNoise(config.seed)
    clocks = [time.perf_counter()]
    for step in range(timed):
        batches, divisor = setup.draw(config.seed, step)
        total = sum_contributions(setup.algorithm, mechanism, batches, setup.device)
        release = setup.algorithm.postprocess(add_noise(total, mechanism, noise, step), divisor)
        descend(dict(setup.model.named_parameters()), setup.optimizer, release)
        clocks.append(time.perf_counter())
    a_step = min(b - a for a, b in itertools.pairwise(clocks))
    return Cost(a_step * setup.plan.steps, peak_memory(setup.device), str(setup.device))


def predict(
    config: Run,
    model: nn.Module,
    algorithm: Algorithm,
    plan: Plan,
    data: DatasetInfo,
    parameters: int,
) -> Cost:
    """Without a record, on the CPU: from a forward pass and steps on random records, one at first, then more, for seconds in all.

    The bytes are those of weights, gradients, moments, and the activations of one micro-batch; noise is counted, and not drawn.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    expected = max(1, round(plan.sampling.expected_batch_size))
    fixed = config.trainer.micro_batch
    at_once = min(fixed if isinstance(fixed, int) else MICRO_BATCH, expected)
    trust(
        model
    )  # its check is made once a run, and takes as long as several steps of a large model
    activations, spent = _forward(model, data)
    per_batch, per_record, trial = 0.0, FORWARDS * spent, ", from a forward pass alone"
    before: tuple[int, float] | None = None
    for size in _growing(at_once):
        if spent + per_batch + per_record * size > SECONDS:
            break
        began = time.perf_counter()
        sum_contributions(
            algorithm, algorithm.mechanism(), [_random_batch(data, size)], torch.device("cpu")
        )
        took = time.perf_counter() - began
        longer = (
            (took - before[1]) / (size - before[0]) if before and size > before[0] else per_record
        )
        per_record = min(max(0.0, longer), took / size)
        per_batch = (
            took - per_record * size
        )  # Spectral-DP's inverse transforms cost one record what they cost a hundred
        before, spent, trial = (size, took), spent + took, ""
    noise = NOISE_SECONDS * parameters if algorithm.mechanism().z else 0.0
    held = 4 * parameters * (3 + MOMENTS.get(config.optimizer.name, 2)) + 2 * activations * at_once
    threads = f"CPU, {torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}"
    a_step = per_batch * math.ceil(expected / at_once) + per_record * expected + noise
    return Cost(plan.steps * a_step, held, threads + trial)


def _growing(largest: int) -> Iterator[int]:
    """Batch sizes to try: one twice, for the first time builds what later ones reuse, then two, then four times as many each."""
    yield from (1, 1)
    size = 2
    while size < largest:
        yield size
        size *= 4
    yield largest


def _random_batch(data: DatasetInfo, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(size, *data.input_shape, dtype=data.dtype, generator=generator)
    if data.target_dtype.is_floating_point:
        return inputs, torch.rand(
            size, *data.target_shape, dtype=data.target_dtype, generator=generator
        )
    below = data.outputs if data.target_dtype == torch.int64 and data.outputs > 1 else 2
    return inputs, torch.randint(0, below, (size, *data.target_shape), generator=generator).to(
        data.target_dtype
    )


def _forward(model: nn.Module, data: DatasetInfo) -> tuple[int, float]:
    """(bytes that the layers' outputs take, seconds) of one record's forward pass."""
    total = 0

    def count(module: nn.Module, entering: object, left: object) -> None:
        nonlocal total
        if isinstance(left, Tensor) and not any(True for _ in module.children()):
            total += left.numel() * left.element_size()

    handles = [module.register_forward_hook(count) for module in model.modules()]
    inputs, _ = _random_batch(data, 1)
    began = time.perf_counter()
    try:
        with torch.no_grad():
            model(inputs)
    finally:
        for handle in handles:
            handle.remove()
    return total, time.perf_counter() - began
