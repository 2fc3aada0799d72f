"""What a run would cost here, in seconds and bytes: measured on its own data, or predicted."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zdp_bench.config.schema import Run
from zdp_bench.data import DatasetInfo
from zdp_bench.gradients import trust
from zdp_bench.gradients.clipping import trainable
from zdp_bench.privacy.noise import SeededNoise, add_noise
from zdp_bench.training.batches import MICRO_BATCH
from zdp_bench.training.build import count_real
from zdp_bench.training.environment import peak_memory
from zdp_bench.training.setup import Setup
from zdp_bench.training.step import descend, sum_contributions

SECONDS = 3.0  # no trial step is begun that would pass this
FORWARDS = 3  # a step of one example takes about as long as so many forward passes
NOISE_SECONDS = 1e-9  # for one number of noise on a CPU core
MOMENTS = {"adam": 2, "adamw": 2, "nadam": 2, "rmsprop": 1, "adagrad": 1, "sgd": 0}


@dataclass(frozen=True)
class Cost:
    """The cost of all steps of a run, without its evaluations.

    Attributes:
        bytes: the peak.
        measured_on: the device, and what was timed on it.
    """

    seconds: float
    bytes: int
    measured_on: str


def measure(config: Run, timed: int = 3) -> Cost:
    """Time a few whole steps on the run's own data and device; nothing is written.

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
    seconds = min(b - a for a, b in itertools.pairwise(clocks))
    return Cost(seconds * setup.plan.steps, peak_memory(setup.device), str(setup.device))


def predict(setup: Setup, data: DatasetInfo, steps: int) -> Cost:
    """Estimate the cost of so many steps on the CPU, in a few seconds, without any data.

    The seconds follow from a forward pass and from steps on growing batches of random examples;
    noise is counted, not drawn. The bytes are those of weights, gradients, moments and the
    activations of one micro-batch.
    """
    config, model, algorithm = setup.config, setup.model, setup.algorithm
    if config.threads:
        torch.set_num_threads(config.threads)
    parameters = count_real(trainable(model).values())
    expected = max(1, round(setup.plan.sampling.expected_batch_size))
    fixed = config.trainer.micro_batch
    at_once = min(fixed if isinstance(fixed, int) else MICRO_BATCH, expected)
    trust(model)  # its check, made once a run, takes as long as several steps of a large model
    activations, spent = _time_forward(model, data)
    per_batch, per_example, trial = 0.0, FORWARDS * spent, ", from a forward pass alone"
    before: tuple[int, float] | None = None
    for size in _growing(at_once):
        if spent + per_batch + per_example * size > SECONDS:
            break
        began = time.perf_counter()
        sum_contributions(
            algorithm, algorithm.mechanism(), [_random_batch(data, size)], torch.device("cpu")
        )
        took = time.perf_counter() - began
        longer = per_example
        if before and size > before[0]:
            longer = (took - before[1]) / (size - before[0])
        per_example = min(max(0.0, longer), took / size)
        # Spectral-DP's inverse transforms, for one, cost a batch the same whatever its size.
        per_batch = took - per_example * size
        before, spent, trial = (size, took), spent + took, ""
    noise = NOISE_SECONDS * parameters if algorithm.mechanism().z else 0.0
    held = 4 * parameters * (3 + MOMENTS.get(config.optimizer.name, 2)) + 2 * activations * at_once
    threads = f"CPU, {torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}"
    seconds = per_batch * math.ceil(expected / at_once) + per_example * expected + noise
    return Cost(steps * seconds, held, threads + trial)


def _growing(largest: int) -> Iterator[int]:
    """Yield batch sizes: 1 twice, for the first step builds what others reuse; then 2, 8, …"""
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


def _time_forward(model: nn.Module, data: DatasetInfo) -> tuple[int, float]:
    """Return one example's forward pass: (bytes of all layers' outputs, seconds)."""
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
