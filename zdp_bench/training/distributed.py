"""Several processes for one run: `torchrun --nproc-per-node=N -m zdp_bench run recipe=NAME`.

All ranks hold the same model and draw the same batch from the whole data set. Each clips and sums
its share of the examples, and the sums are added up (`Ranks.all_reduce`). Rank 0 writes the
ledger's line and adds the noise to its own sum before that sum leaves it. So each release is drawn
in one place, every rank receives the same bits of it, and model and optimiser stay the same.

Before they train, the ranks compare what they are about to do (`Ranks.require_same`): a rank with
another bound, rate or data set would take rank 0's noise and ε for its own examples.

The ranks and the network between them are trusted: sums without noise travel there.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from zdp_bench.errors import UserError
from zdp_bench.privacy.noise import real_view

T = TypeVar("T")
S = TypeVar("S", np.ndarray, Tensor)

PATIENCE = timedelta(days=1)  # a rank waits so long for another: rank 0 may evaluate


@dataclass(frozen=True)
class Ranks:
    """This process among those of its run. A single process is rank 0 of 1."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """True for rank 0, which writes, draws noise and reports."""
        return self.rank == 0

    def take_share(self, of: S) -> S:
        """Return this rank's rows of an array or tensor with one row for each example of a step."""
        return of[self.rank :: self.size] if self.size > 1 else of

    def all_reduce(self, total: dict[str, Tensor]) -> dict[str, Tensor]:
        """Sum each block over the ranks, in place; every rank gets the same bits."""
        if self.size == 1:
            return total
        for name, value in total.items():
            total[name] = value.resolve_conj()
        flat = [real_view(value) for value in total.values()]
        for dtype in sorted({value.dtype for value in flat}, key=str):
            values = [value for value in flat if value.dtype == dtype]
            message = torch.cat([value.reshape(-1) for value in values])
            with _everyone():
                dist.all_reduce(message)
            parts = message.split([value.numel() for value in values])
            for value, part in zip(values, parts, strict=True):
                value.copy_(part.view_as(value))
        return total

    def broadcast(self, value: T) -> T:
        """Return rank 0's `value` on every rank."""
        if self.size == 1:
            return value
        held = [value]
        with _everyone():
            dist.broadcast_object_list(held, src=0)
        return held[0]

    def gather(self, value: T) -> list[T]:
        """Return every rank's `value`, in the order of the ranks."""
        if self.size == 1:
            return [value]
        told: list[Any] = [None] * self.size
        with _everyone():
            dist.all_gather_object(told, value)
        return told

    def require_same(self, facts: Mapping[str, object]) -> None:
        """Reject, on every rank alike, ranks that differ in what they are about to do."""
        told = self.gather({name: repr(value) for name, value in facts.items()})
        for name in facts:
            for other, of in enumerate(told):
                if of.get(name) != told[0].get(name):
                    raise UserError(
                        f"rank {other} has another {name} than rank 0: start all processes of a "
                        "training with the same command, code and data. No further step was taken."
                    )

    def copy_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite every tensor by rank 0's."""
        if self.size == 1:
            return
        for tensor in tensors:
            own = tensor.detach()
            flat = real_view(own)
            held = flat.contiguous()
            with _everyone():
                dist.broadcast(held, src=0)
            flat.copy_(held)

    def max(self, number: int) -> int:
        """Return the largest of the ranks' numbers."""
        if self.size == 1:
            return number
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        held = torch.tensor(number, device=device)
        with _everyone():
            dist.all_reduce(held, op=dist.ReduceOp.MAX)
        return int(held)


@contextmanager
def _everyone() -> Iterator[None]:
    """Report in one sentence that a process of the run ended while this one waited for it."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "peer" not in str(error):
            raise
        raise UserError(
            "another process of this run has stopped; see its message. Everything saved is intact."
        ) from None


ALONE = Ranks()


def is_distributed() -> bool:
    """True if torchrun, or a launcher like it, started this process beside others."""
    expected = {"RANK", "WORLD_SIZE", "MASTER_ADDR"}
    return expected <= os.environ.keys() and int(os.environ["WORLD_SIZE"]) > 1


def rank() -> int:
    """Return this process's rank, before or after `join`; 0 for a single process."""
    return int(os.environ["RANK"]) if is_distributed() else 0


@cache
def join(device_type: str) -> Ranks:
    """Connect to the other ranks, by NCCL between GPUs and gloo between CPUs."""
    if not dist.is_initialized():  # a script of one's own may have done so
        if not is_distributed():
            return ALONE
        dist.init_process_group("nccl" if device_type == "cuda" else "gloo", timeout=PATIENCE)
        atexit.register(dist.destroy_process_group)
    return Ranks(dist.get_rank(), dist.get_world_size())


def leave(code: int) -> None:
    """Exit at once, without shutting the interpreter down, if this process has joined others.

    In one of twenty runs, a thread of gloo or torch outlived the interpreter and ended the rank
    with SIGABRT, so that torchrun reported a finished run as failed.
    """
    if dist.is_initialized():
        atexit._run_exitfuncs()  # among them, the end of the process group
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
