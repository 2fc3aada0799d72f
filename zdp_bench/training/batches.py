"""The batch of a step: read in pieces, augmented, moved to the device, split over ranks."""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch

from zdp_bench.config.schema import Run
from zdp_bench.data import N_UNIFORMS, Augment, Source
from zdp_bench.gradients import Batch, Shares
from zdp_bench.privacy import sampling
from zdp_bench.privacy.noise import stream
from zdp_bench.training.distributed import ALONE, Ranks
from zdp_bench.training.micro_batches import MicroBatches, Size
from zdp_bench.training.patients import Patients

MICRO_BATCH = 2048

T = TypeVar("T")


def micro_batches(
    source: Source,
    indices: np.ndarray,
    config: Run,
    device: torch.device,
    key: int | str,
    step: int = 0,
    augment: Augment | None = None,
    augment_targets: Augment | None = None,
    size: Size | None = None,
    ranks: Ranks = ALONE,
    patients: Patients | None = None,
) -> MicroBatches:
    """Return this rank's share of the drawn examples, in pieces, on the device.

    Args:
        key, step: seed what makes or augments examples, so that a resumed step sees the same.
        size: how large the pieces are; by default `trainer.micro_batch`.
        patients: if given, `indices` are patients; each brings its examples as one share.

    With `trainer.augmentations`, an example comes so many times in a row, each time changed in
    another way, as one share.
    """
    views = config.trainer.augmentations or 1
    indices, shares = ranks.take_share(indices), None
    if patients is not None:
        indices, shares = patients.take(indices, key, step)
    uniforms = torch.empty(0)
    if augment or augment_targets or source.is_stochastic:
        own = stream(key, "augment", step).generate_state(2, np.uint64).tobytes()
        drawn = sampling.uniforms_of(indices, views * N_UNIFORMS, own)
        uniforms = torch.from_numpy(drawn.reshape(-1, N_UNIFORMS))
    if views > 1:
        shares = tuple(views * many for many in ((1,) * len(indices) if shares is None else shares))
        indices = np.repeat(indices, views)

    def read(cut: slice) -> Batch:
        own = uniforms[cut]
        inputs, targets = source.batch(
            torch.from_numpy(indices[cut]), own if source.is_stochastic else None
        )
        inputs = augment(inputs, own) if augment else inputs
        targets = augment_targets(targets, own) if augment_targets else targets
        return inputs, targets

    fixed = config.trainer.micro_batch
    size = size or Size(fixed if isinstance(fixed, int) else MICRO_BATCH)
    return read_in_pieces(read, len(indices), size, device, config.execution.prefetch, shares)


def read_in_pieces(
    read: Callable[[slice], Batch],
    count: int,
    size: Size,
    device: torch.device,
    prefetch: int | None = None,
    shares: Shares | None = None,
) -> MicroBatches:
    """Return the `count` examples of a step in pieces, on the device.

    Args:
        read: returns the examples of a slice of them, in a CPU's memory.
        prefetch: pieces read ahead; by default 1 for a GPU, 0 for a CPU.
        shares: how many examples each share has, in order; None: an example is a share.
    """
    on_gpu = device.type == "cuda"

    def piece(cut: slice) -> Batch:
        inputs, targets = read(cut)
        # A GPU fetches pinned memory by itself, while it computes.
        return (inputs.pin_memory(), targets.pin_memory()) if on_gpu else (inputs, targets)

    def placed(pieces: Iterator[Batch]) -> Iterator[Batch]:
        for inputs, targets in read_ahead(pieces, on_gpu if prefetch is None else prefetch):
            yield inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)

    return MicroBatches(count, piece, size, placed, shares)


def read_ahead(values: Iterator[T], count: int) -> Iterator[T]:
    """Yield the values in order, while another thread reads up to `count` of them ahead."""
    if count < 1:
        yield from values
        return
    end: Any = object()
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(1, "input", initializer=torch.set_num_threads, initargs=(1,)) as reader:
        waiting = deque(reader.submit(next, values, end) for _ in range(count))
        torch.set_num_threads(threads)  # the reader's own count would hold for later threads
        while (value := waiting.popleft().result()) is not end:
            waiting.append(reader.submit(next, values, end))
            yield value


def seed_layers(key: int | str, step: int, rank: int, secure: bool = False) -> None:
    """Make random numbers drawn inside layers (dropout) a function of (key, step, rank).

    The generators of torch (on every device), numpy and Python start anew, so a checkpoint needs no
    generator's state. With `secure` they start from the operating system's randomness: what a layer
    draws for an example depends on the examples before it, so a public seed must not decide it.
    """
    own = stream(key, "layers", step, rank)
    number = int.from_bytes(os.urandom(8)) if secure else int(own.generate_state(1, np.uint64)[0])
    if torch.accelerator.is_available():
        torch.manual_seed(number)
    else:  # the same numbers; torch would note the whole stack for every device there may be
        torch.default_generator.manual_seed(number)
    np.random.seed(number % 2**32)
    random.seed(number)
