"""Micro-batches: how many examples fit in memory at once. They change speed and memory only.

Sizes depend on the configuration, the machine and the shapes of the data, but not on how many
examples a step drew, which is private.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from zdp_bench.gradients import Batch, Loss, Shares
from zdp_bench.gradients.parts import map_leaves

log = logging.getLogger(__name__)

# A step plans with this share of the free memory; a backward pass takes as much as a forward pass.
SHARE, PASSES = 0.5, 2


@dataclass
class Size:
    """How many examples are processed at once. It only shrinks, for all later steps too."""

    examples: int

    def halve(self) -> bool:
        """Use half as many from now on; return False if it is one example already."""
        if self.examples == 1:
            return False
        self.examples = (self.examples + 1) // 2
        log.info("out of memory: going on with micro-batches of %d", self.examples)
        return True


@dataclass(frozen=True)
class MicroBatches:
    """The `count` examples of one step, in pieces of `size`; each iteration starts from the first.

    Attributes:
        placed: reads the pieces ahead and moves them to the device.
        shares: how many examples each share has, in order; pieces hold whole shares, so one of
            more than `size` examples is a piece by itself. None: an example is a share.
    """

    count: int
    piece: Callable[[slice], Batch]
    size: Size
    placed: Callable[[Iterator[Batch]], Iterator[Batch]] = iter
    shares: Shares | None = None

    def __iter__(self) -> Iterator[Batch]:
        return self.placed(self.piece(cut) for cut, _ in self.cuts())

    def cuts(self) -> list[tuple[slice, Shares]]:
        """Return where each piece stands, and how many examples each of its shares has."""
        most, shares = self.size.examples, self.shares
        if shares is None:
            starts = range(0, self.count, most)
            return [(slice(start, min(start + most, self.count)), ()) for start in starts]
        made: list[tuple[slice, Shares]] = []
        end = 0
        for many in shares:
            start, own = (made[-1][0].start, made[-1][1]) if made else (0, ())
            if made and end + many - start <= most:
                made[-1] = slice(start, end + many), (*own, many)
            else:
                made.append((slice(end, end + many), (many,)))
            end += many
        return made


def is_out_of_memory(error: BaseException) -> bool:
    """True if an error says that memory ran out, on the GPU or on the CPU."""
    words = (
        "out of memory",
        "can't allocate memory",
        "CUDNN_STATUS_ALLOC_FAILED",
        "CUBLAS_STATUS_ALLOC_FAILED",
    )
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(
        word in str(error) for word in words
    )


def free_memory() -> None:
    """Release what a pass that failed half way has left behind."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def initial_size(
    model: nn.Module, loss: Loss, like: Batch, expected_batch_size: float, device: torch.device
) -> Size:
    """Return the micro-batch size to begin with.

    On a GPU that is the whole batch, halved later until it fits. On a CPU it is estimated, because
    a process without memory is killed there, without an error.

    Args:
        like: a batch of the shapes to come; its values are not used.
        expected_batch_size: of a whole step; batches are rarely twice as large.
    """
    whole = 1
    while whole < 2 * expected_batch_size:
        whole *= 2
    if device.type != "cpu":
        return Size(whole)
    fit = int(SHARE * available_memory() / max(1, PASSES * bytes_per_example(model, loss, like)))
    while whole > max(1, fit):
        whole //= 2
    return Size(whole)


def bytes_per_example(model: nn.Module, loss: Loss, like: Batch) -> int:
    """Return how many bytes a forward pass keeps for each example: of two, less those of one."""

    def kept(examples: int) -> int:
        seen: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
            return tensor

        inputs, targets = (
            map_leaves(lambda leaf: leaf.new_zeros(examples, *leaf.shape[1:]), part)
            for part in like
        )
        with (
            torch.random.fork_rng(devices=[]),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        ):
            losses = loss(model(inputs), targets)
            return sum(seen.values()) + losses.nbytes + inputs.nbytes + targets.nbytes

    return max(1, kept(2) - kept(1))


def available_memory() -> int:
    """Return how many bytes the process may still take, within its control group's limit."""
    free = _number("/proc/meminfo", "MemAvailable:", 1024)
    limit, used = _number("/sys/fs/cgroup/memory.max"), _number("/sys/fs/cgroup/memory.current")
    bounds = [free] if free is not None else []
    if limit is not None and used is not None:
        bounds.append(max(0, limit - used))
    return min(bounds, default=2**32)  # 4 GiB if nothing is known


def _number(path: str, key: str | None = None, unit: int = 1) -> int | None:
    """Return the first number in a file, or the one after `key`; None if there is none."""
    try:
        words = Path(path).read_text().split()
        return unit * int(words[words.index(key) + 1] if key else words[0])
    except (OSError, ValueError, IndexError):
        return None
