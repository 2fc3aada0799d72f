"""Draw a step's batch, read it in micro-batches, augment them and move them to the device.

A micro-batch holds as many examples as fit in memory at once. Its size affects only speed and
memory. It depends on the configuration, the machine and the shapes of the data, but not on the
number of examples that a step drew, which is private.
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
from zdp_bench.privacy.noise import step_key, stream
from zdp_bench.training.distributed import Ranks
from zdp_bench.training.plan import Patients, Plan
from zdp_bench.training.total import MAX_FLOAT32_EXAMPLES

log = logging.getLogger(__name__)

# Default and maximum size of a micro-batch, which an algorithm may sum in float32.
MICRO_BATCH = MAX_FLOAT32_EXAMPLES
MEMORY_FRACTION = 0.5  # part of the free memory that the first micro-batch may take
PASSES = 2  # a backward pass takes as much memory as a forward pass

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
    """Return a step's examples in micro-batches, on the device.

    Args:
        source: the training set.
        indices: indices of the step's examples, [n].
        config: the run's configuration. With `trainer.augmentations=k`, each example comes k times
            in a row, augmented differently each time, as one share.
        device: where the micro-batches are moved to.
        key: key of the run. Without `privacy.secure`, augmentations are a function of (key, step).
        step: number of the step.
        augment: augments a batch of inputs, given its uniform random numbers.
        augment_targets: the same for targets.
        size: size of the micro-batches. Default: `trainer.micro_batch`.
        shares: number of examples in each share; None if each example is a share.
    """
    views = config.trainer.augmentations or 1
    uniforms = torch.empty(0)
    if augment or augment_targets or source.is_stochastic:
        choice_key = step_key(key, "augment", step, config.privacy.secure)
        draws = sampling.uniforms_of(indices, views * N_UNIFORMS, choice_key)
        uniforms = torch.from_numpy(draws.reshape(-1, N_UNIFORMS))
    if views > 1:
        share_sizes = (1,) * len(indices) if shares is None else shares
        shares = tuple(views * share_size for share_size in share_sizes)
        indices = np.repeat(indices, views)

    def read(cut: slice) -> Batch:
        cut_uniforms = uniforms[cut]
        cut_indices = torch.from_numpy(indices[cut])
        inputs, targets = source.batch(cut_indices, cut_uniforms if source.is_stochastic else None)
        if augment:
            inputs = augment(inputs, cut_uniforms)
        if augment_targets:
            targets = augment_targets(targets, cut_uniforms)
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
    units: int = 0,
) -> tuple[np.ndarray, Shares | None, float]:
    """Draw a step's batch, the same on all ranks, and seed the random numbers inside layers.

    Args:
        plan: draws the batch.
        key: key of the run.
        step: number of the step.
        secure: whether randomness is the operating system's instead of a function of (key, step).
        ranks: processes that share the batch.
        owners: the examples of each owner, if whole owners are drawn.
        units: number of examples or owners to draw from, if the plan does not state it.

    Returns:
        The indices of this rank's examples, the number of examples in each share (None if each
        example is a share), and the divisor of the sum over all ranks.
    """
    indices, divisor = plan.draw(key, step, secure, units)
    if secure:  # ranks cannot draw the same numbers, so all use the batch of rank 0
        indices = ranks.broadcast(indices)
    seed_layers(key, step, ranks.rank, secure)
    indices = ranks.take_share(indices)
    if owners is None:
        return indices, None, divisor
    choice_key = step_key(key, "records", step, secure)
    return *owners.take(indices, choice_key), divisor


def read_in_pieces(
    read: Callable[[slice], Batch],
    count: int,
    size: Size,
    device: torch.device,
    prefetch: int | None = None,
    shares: Shares | None = None,
) -> MicroBatches:
    """Return the `count` examples of a step in micro-batches, on the device.

    Args:
        read: returns the examples in a slice of the step's examples.
        count: number of examples.
        size: size of the micro-batches.
        device: where the micro-batches are moved to.
        prefetch: number of micro-batches that are read ahead. Default: 1 for a GPU, 0 for a CPU.
        shares: number of examples in each share; None if each example is a share.
    """
    on_gpu = device.type == "cuda"

    def read_pinned(cut: slice) -> Batch:
        inputs, targets = read(cut)
        if on_gpu:  # from pinned memory, a GPU copies while it computes
            inputs = inputs.pin_memory() if inputs.is_cpu else inputs
            targets = targets.pin_memory() if targets.is_cpu else targets
        return inputs, targets

    def move(batches: Iterator[Batch]) -> Iterator[Batch]:
        num_ahead = int(on_gpu) if prefetch is None else prefetch
        if count <= size.examples:  # there is only one micro-batch
            num_ahead = 0
        for inputs, targets in read_ahead(batches, num_ahead):
            yield inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)

    return MicroBatches(count, read_pinned, size, move, shares)


def read_ahead(values: Iterator[T], count: int) -> Iterator[T]:
    """Yield the values in order, while another thread reads up to `count` values ahead."""
    if count < 1:
        yield from values
        return
    end: Any = object()
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(1, "input", initializer=torch.set_num_threads, initargs=(1,)) as reader:
        waiting = deque(reader.submit(next, values, end) for _ in range(count))
        torch.set_num_threads(threads)  # else, later threads would inherit the reader's count
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
    """Seed the random numbers inside layers (dropout) as a function of (key, step, rank).

    Args:
        key: key of the run.
        step: number of the step.
        rank: rank of this process.
        secure: whether the operating system seeds them instead. An example's numbers depend on its
            position in the batch, which depends on the other examples that were drawn. So they must
            not follow from a public seed. Default: False.
    """
    if secure:
        set_seed(int.from_bytes(os.urandom(8)))
        return
    (seed,) = stream(key, "layers", step, rank).generate_state(1, np.uint64)
    set_seed(int(seed))


@dataclass
class Size:
    """Size of the micro-batches, at most `MICRO_BATCH`. It only ever shrinks."""

    examples: int

    def __post_init__(self) -> None:
        self.examples = min(self.examples, MICRO_BATCH)

    def halve_below(self, num_examples: int) -> None:
        """Halve the size, rounded up, until it is less than `num_examples`, which is at least 2."""
        while self.examples >= num_examples:
            self.examples = (self.examples + 1) // 2
        log.info("out of memory: continuing with micro-batches of %d", self.examples)


@dataclass(frozen=True)
class MicroBatches:
    """The examples of one step in micro-batches. Each iteration starts from the first.

    Micro-batches hold whole shares, so a share of more than `size` examples is a micro-batch by
    itself.

    Attributes:
        num_examples: number of examples.
        read: reads the micro-batch in a slice.
        size: size of the micro-batches.
        move: reads micro-batches ahead and moves them to the device.
        share_sizes: number of examples in each share; None if each example is a share.
    """

    num_examples: int
    read: Callable[[slice], Batch]
    size: Size
    move: Callable[[Iterator[Batch]], Iterator[Batch]] = iter
    share_sizes: Shares | None = None

    def __iter__(self) -> Iterator[Batch]:
        return self.move(self.read(cut) for cut, _ in self.cuts())

    @property
    def largest_share_size(self) -> int:
        """The largest number of examples in a share."""
        return max(self.share_sizes or (), default=1)

    def shrink(self) -> bool:
        """Halve `size` until the largest micro-batch shrinks; return False if it is one share."""
        largest = max((cut.stop - cut.start for cut, _ in self.cuts()), default=0)
        if largest <= self.largest_share_size:
            return False
        self.size.halve_below(largest)
        return True

    def cuts(self) -> list[tuple[slice, Shares]]:
        """Return the slice of each micro-batch, and the numbers of examples in its shares.

        If each example is a share, the latter are left empty.
        """
        max_examples = self.size.examples
        if self.share_sizes is None:
            starts = range(0, self.num_examples, max_examples)
            ends = [min(start + max_examples, self.num_examples) for start in starts]
            return [(slice(start, end), ()) for start, end in zip(starts, ends, strict=True)]
        cuts: list[tuple[slice, Shares]] = []
        # The micro-batch that is being filled: its slice and its share sizes.
        start = end = 0
        sizes_in_cut: list[int] = []
        for share_size in self.share_sizes:
            if sizes_in_cut and end + share_size - start > max_examples:
                cuts.append((slice(start, end), tuple(sizes_in_cut)))
                start, sizes_in_cut = end, []
            sizes_in_cut.append(share_size)
            end += share_size
        if sizes_in_cut:
            cuts.append((slice(start, end), tuple(sizes_in_cut)))
        return cuts


def free_memory() -> None:
    """Free the memory that a failed pass left behind."""
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
    """Return the initial size of micro-batches, a power of two.

    On a GPU, it is at least twice the expected batch size (up to `MICRO_BATCH`), and is halved
    later until a micro-batch fits. On a CPU, it is also limited by an estimate of what fits,
    because a process that runs out of memory there is killed without an error.

    Args:
        model: the model that is trained.
        loss: its loss.
        like: a batch, even without examples, whose shapes and dtypes count.
        expected_batch_size: expected number of examples in a step.
        device: where the model is.
    """
    num_examples = 1
    while num_examples < 2 * expected_batch_size:
        num_examples *= 2
    if device.type != "cpu":
        return Size(num_examples)
    bytes_needed = max(1, PASSES * bytes_per_example(model, loss, like))
    max_fitting = int(MEMORY_FRACTION * available_memory() / bytes_needed)
    while num_examples > max(1, max_fitting):
        num_examples //= 2
    return Size(num_examples)


def bytes_per_example(
    model: nn.Module,
    loss: Loss,
    like: Batch,
) -> int:
    """Return the number of bytes that a forward pass keeps for each additional example.

    It is the difference between a batch of two examples and one of a single example.

    Args:
        model: the model.
        loss: its loss.
        like: a batch, even without examples, whose shapes and dtypes count.
    """

    def count_kept_bytes(examples: int) -> int:
        bytes_at: dict[int, int] = {}  # the address of a storage -> its size

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            bytes_at[storage.data_ptr()] = storage.nbytes()
            return tensor.detach()  # a graph that saves its own result would never be freed

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

    return max(1, count_kept_bytes(2) - count_kept_bytes(1))


def available_memory() -> int:
    """Return the number of free bytes, within the limit of the process's control group."""
    bounds = []
    free_kilobytes = _read_number("/proc/meminfo", "MemAvailable:")
    if free_kilobytes is not None:
        bounds.append(1024 * free_kilobytes)
    limit = _read_number("/sys/fs/cgroup/memory.max")
    in_use = _read_number("/sys/fs/cgroup/memory.current")
    if limit is not None and in_use is not None:
        bounds.append(max(0, limit - in_use))
    return min(bounds, default=2**32)  # 4 GiB if neither is known


def _read_number(path: str, key: str | None = None) -> int | None:
    """Return the first number in a file, or the one after `key`; None if there is none."""
    try:
        words = Path(path).read_text().split()
        index = words.index(key) + 1 if key else 0
        return int(words[index])
    except (OSError, ValueError, IndexError):
        return None
