"""How many records fit in memory at once: micro-batches that shrink when memory runs out. Speed and memory only, never a result.

Sizes depend on the configuration, the machine and the shapes of the data; not on how many records a step drew, which is private.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from zdp_bench.gradients import Batch, Loss

log = logging.getLogger(__name__)

# Of what is free, a step may plan with this share; a record takes what its forward pass keeps, and as much again going back.
SHARE, PASSES = 0.5, 2


@dataclass
class Size:
    """How many records are processed at once. It only ever shrinks, and what one step learnt the next one knows."""

    records: int

    def halve(self) -> bool:
        """Half as many from now on; False where it is one record already."""
        if self.records == 1:
            return False
        self.records = (self.records + 1) // 2
        log.info("out of memory: going on with micro-batches of %d", self.records)
        return True


@dataclass(frozen=True)
class MicroBatches:
    """The `count` records of one step, in pieces of `size`. Every walk through them starts anew, in pieces of today's size.

    Attributes:
        placed: what becomes of the pieces on their way: to the device, fetched ahead.
    """

    count: int
    piece: Callable[[slice], Batch]
    size: Size
    placed: Callable[[Iterator[Batch]], Iterator[Batch]] = iter

    def __iter__(self) -> Iterator[Batch]:
        records = self.size.records
        return self.placed(
            self.piece(slice(start, start + records)) for start in range(0, self.count, records)
        )


def ran_out(error: BaseException) -> bool:
    """Whether an error says that memory is at its end, on the GPU or on the CPU."""
    said = str(error)
    words = (
        "out of memory",
        "can't allocate memory",
        "CUDNN_STATUS_ALLOC_FAILED",
        "CUBLAS_STATUS_ALLOC_FAILED",
    )
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(
        word in said for word in words
    )


def let_go() -> None:
    """Give back what a pass that failed half way has left behind."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def largest(
    model: nn.Module, loss: Loss, like: Batch, expected_batch_size: float, device: torch.device
) -> Size:
    """The micro-batch to begin with: on a GPU the whole batch, to be halved until it fits; on a CPU what should fit.

    A CPU's memory does not run out in an error but in a killed process, so there it is estimated: `bytes_a_record`.

    Args:
        like: a batch of the shapes to come; its values are not used.
        expected_batch_size: of a whole step; batches are rarely twice as large.
    """
    whole = 1
    while whole < 2 * expected_batch_size:
        whole *= 2
    if device.type != "cpu":
        return Size(whole)
    fit = int(SHARE * available_memory() / max(1, PASSES * bytes_a_record(model, loss, like)))
    while whole > max(1, fit):
        whole //= 2
    return Size(whole)


def bytes_a_record(model: nn.Module, loss: Loss, like: Batch) -> int:
    """What a forward pass keeps for the backward pass, for each record: what two records keep over what one does."""

    def kept(records: int) -> int:
        seen: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
            return tensor

        inputs, targets = (part.new_zeros(records, *part.shape[1:]) for part in like)
        with (
            torch.random.fork_rng(devices=[]),
            torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        ):
            losses = loss(model(inputs), targets)
            return sum(seen.values()) + losses.nbytes + inputs.nbytes + targets.nbytes

    return max(1, kept(2) - kept(1))


def available_memory() -> int:
    """Bytes a process may still take: what the system has free, and no more than its control group's limit leaves."""
    free = _number("/proc/meminfo", "MemAvailable:", 1024)
    limit, used = _number("/sys/fs/cgroup/memory.max"), _number("/sys/fs/cgroup/memory.current")
    room = [free] if free is not None else []
    if limit is not None and used is not None:
        room.append(max(0, limit - used))
    return min(room, default=2**32)  # where nothing says, 4 GiB


def _number(path: str, key: str | None = None, unit: int = 1) -> int | None:
    """The number a file holds, or that stands behind `key` in it; None where there is none ("max" is none)."""
    try:
        words = Path(path).read_text().split()
        return unit * int(words[words.index(key) + 1] if key else words[0])
    except (OSError, ValueError, IndexError):
        return None
