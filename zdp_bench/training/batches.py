"""The batch of a step: read in pieces, augmented, moved to the device, split over ranks.

Micro-batches, as many examples as fit in memory at once, change speed and memory only. Their size
depends on the configuration, the machine and the shapes of the data, but not on how many examples
a step drew, which is private.
"""

from __future__ import annotations

import gc
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from zdp_bench.config.schema import Run
from zdp_bench.data import N_UNIFORMS, Augment, Source
from zdp_bench.gradients import Batch, Loss, Shares
from zdp_bench.gradients.losses import set_seed
from zdp_bench.gradients.parts import map_leaves
from zdp_bench.privacy import sampling
from zdp_bench.privacy.noise import stream, stream_bytes
from zdp_bench.training.distributed import Ranks
from zdp_bench.training.plan import Patients, Plan

log = logging.getLogger(__name__)

# By default and at most: the float32 sum of more examples would round one over its bound.
MICRO_BATCH = 1024
# A step plans with this share of the free memory; a backward pass takes as much as a forward pass.
SHARE, PASSES = 0.5, 2

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
    shares: Shares | None = None,
) -> MicroBatches:
    """Return a step's examples in pieces, on the device, made or augmented by (key, step).

    With `trainer.augmentations`, an example comes so many times in a row, each time changed in
    another way, as one share.
    """
    views = config.trainer.augmentations or 1
    uniforms = torch.empty(0)
    if augment or augment_targets or source.is_stochastic:
        own_key = stream_bytes(key, "augment", step)
        drawn = sampling.uniforms_of(indices, views * N_UNIFORMS, own_key)
        uniforms = torch.from_numpy(drawn.reshape(-1, N_UNIFORMS))
    if views > 1:
        examples = (1,) * len(indices) if shares is None else shares
        shares = tuple(views * count for count in examples)
        indices = np.repeat(indices, views)

    def read(cut: slice) -> Batch:
        own = uniforms[cut]
        numbers = torch.from_numpy(indices[cut])
        inputs, targets = source.batch(numbers, own if source.is_stochastic else None)
        if augment:
            inputs = augment(inputs, own)
        if augment_targets:
            targets = augment_targets(targets, own)
        return inputs, targets

    fixed = config.trainer.micro_batch
    size = size or Size(fixed if isinstance(fixed, int) else MICRO_BATCH)
    return read_in_pieces(read, len(indices), size, device, config.execution.prefetch, shares)


def draw_batch(
    plan: Plan,
    key: int | str,
    step: int,
    secure: bool,
    ranks: Ranks,
    owners: Patients | None,
    units: int = 0,  # how many there are to draw from, where the plan does not say
) -> tuple[np.ndarray, Shares | None, float]:
    """Draw a step's batch, the same on all ranks, and seed what its layers draw.

    Returns:
        This rank's examples, how many each share has, and the divisor of the sum over all ranks.
    """
    indices, divisor = plan.draw(key, step, secure, units)
    if secure:  # no rank can draw the same: rank 0's batch is the batch
        indices = ranks.broadcast(indices)
    seed_layers(key, step, ranks.rank, secure)
    indices = ranks.take_share(indices)
    if owners is None:
        return indices, None, divisor
    return *owners.take(indices, key, step), divisor


def read_in_pieces(
    read: Callable[[slice], Batch],
    count: int,
    size: Size,
    device: torch.device,
    prefetch: int | None = None,
    shares: Shares | None = None,
) -> MicroBatches:
    """Return the `count` examples of a step in pieces, each by `read` of a slice, on the device.

    So many pieces are read ahead (`prefetch`): by default 1 for a GPU, 0 for a CPU.
    """
    on_gpu = device.type == "cuda"

    def piece(cut: slice) -> Batch:
        inputs, targets = read(cut)
        if on_gpu:  # which fetches pinned memory by itself, while it computes
            inputs = inputs.pin_memory() if inputs.is_cpu else inputs
            targets = targets.pin_memory() if targets.is_cpu else targets
        return inputs, targets

    def placed(pieces: Iterator[Batch]) -> Iterator[Batch]:
        ahead = int(on_gpu) if prefetch is None else prefetch
        is_one_piece = count <= size.examples
        for inputs, targets in read_ahead(pieces, 0 if is_one_piece else ahead):
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
        value = waiting.popleft().result()
        while value is not end:
            waiting.append(reader.submit(next, values, end))
            yield value
            value = waiting.popleft().result()


def seed_layers(
    key: int | str,
    step: int,
    rank: int,
    secure: bool = False,
) -> None:
    """Make random numbers drawn inside layers (dropout) a function of (key, step, rank).

    With `secure` they follow from the operating system's randomness: what a layer draws for an
    example depends on the examples before it, so a public seed must not decide it.
    """
    if secure:
        set_seed(int.from_bytes(os.urandom(8)))
        return
    (seed,) = stream(key, "layers", step, rank).generate_state(1, np.uint64)
    set_seed(int(seed))


@dataclass
class Size:
    """How many examples are processed at once, up to `MICRO_BATCH`. It only ever shrinks."""

    examples: int

    def __post_init__(self) -> None:
        self.examples = min(self.examples, MICRO_BATCH)

    def halve(self) -> bool:
        """Use half as many from now on; return False if it is one example already."""
        if self.examples == 1:
            return False
        self.examples = (self.examples + 1) // 2
        log.info("out of memory: continuing with micro-batches of %d", self.examples)
        return True


@dataclass(frozen=True)
class MicroBatches:
    """The `count` examples of one step, in pieces of `size`; each iteration starts from the first.

    Pieces hold whole shares, so a share of more than `size` examples is a piece by itself.
    """

    count: int
    piece: Callable[[slice], Batch]
    size: Size
    placed: Callable[[Iterator[Batch]], Iterator[Batch]] = iter  # reads ahead, onto the device
    shares: Shares | None = None  # None: an example is a share

    def __iter__(self) -> Iterator[Batch]:
        return self.placed(self.piece(cut) for cut, _ in self.cuts())

    def cuts(self) -> list[tuple[slice, Shares]]:
        """Return where each piece lies, and how many examples each of its shares has."""
        most = self.size.examples
        if self.shares is None:
            starts = range(0, self.count, most)
            return [(slice(start, min(start + most, self.count)), ()) for start in starts]
        cuts: list[tuple[slice, Shares]] = []
        start = end = 0  # of the piece that is being filled
        own: list[int] = []
        for examples in self.shares:
            if own and end + examples - start > most:
                cuts.append((slice(start, end), tuple(own)))
                start, own = end, []
            own.append(examples)
            end += examples
        if own:
            cuts.append((slice(start, end), tuple(own)))
        return cuts


def is_out_of_memory(error: BaseException) -> bool:
    """True if an error means that memory ran out, on the GPU or on the CPU."""
    words = (
        "out of memory",
        "can't allocate memory",
        "CUDNN_STATUS_ALLOC_FAILED",
        "CUBLAS_STATUS_ALLOC_FAILED",
    )
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return any(word in str(error) for word in words)


def free_memory() -> None:
    """Release what a pass that failed half way has left behind."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def initial_size(
    model: nn.Module,
    loss: Loss,
    like: Batch,
    expected_batch_size: float,
    device: torch.device,
) -> Size:
    """Return the micro-batch size to begin with.

    On a GPU that is the whole batch, halved later until it fits. On a CPU it is estimated, because
    a process without memory is killed there, without an error.
    """
    whole = 1
    while whole < 2 * expected_batch_size:
        whole *= 2
    if device.type != "cpu":
        return Size(whole)
    needed = max(1, PASSES * bytes_per_example(model, loss, like))
    fitting = int(SHARE * available_memory() / needed)
    while whole > max(1, fitting):
        whole //= 2
    return Size(whole)


def bytes_per_example(
    model: nn.Module,
    loss: Loss,
    like: Batch,
) -> int:
    """Return how many bytes a forward pass keeps for each example: of two, less those of one."""

    def kept(examples: int) -> int:
        bytes_at: dict[int, int] = {}  # the address of a storage -> its size

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            bytes_at[storage.data_ptr()] = storage.nbytes()
            return tensor.detach()  # a result that its own graph saves would never be freed

        def repeat(leaf: Tensor) -> Tensor:
            if len(leaf):
                return leaf[:1].repeat_interleave(examples, 0)
            return leaf.new_zeros(examples, *leaf.shape[1:])

        inputs, targets = [map_leaves(repeat, part) for part in like]
        with (
            torch.random.fork_rng(devices=[]),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        ):
            losses = loss(model(inputs), targets)
            return sum(bytes_at.values()) + losses.nbytes + inputs.nbytes + targets.nbytes

    return max(1, kept(2) - kept(1))


def available_memory() -> int:
    """Return how many bytes the process may still take, within its control group's limit."""
    bounds = []
    free = _number("/proc/meminfo", "MemAvailable:")
    if free is not None:
        bounds.append(1024 * free)
    limit = _number("/sys/fs/cgroup/memory.max")
    used = _number("/sys/fs/cgroup/memory.current")
    if limit is not None and used is not None:
        bounds.append(max(0, limit - used))
    return min(bounds, default=2**32)  # 4 GiB if nothing is known


def _number(path: str, key: str | None = None) -> int | None:
    """Return the first number in a file, or the one after `key`; None if there is none."""
    try:
        words = Path(path).read_text().split()
        place = words.index(key) + 1 if key else 0
        return int(words[place])
    except (OSError, ValueError, IndexError):
        return None
