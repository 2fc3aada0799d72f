"""Distribute a run over processes: `torchrun --nproc-per-node=N -m zdp_bench run recipe=NAME`.

All ranks have the same model and draw the same batch from the whole data set. Each rank clips and
sums its part of the examples, and the sums are added up (`Ranks.all_reduce`). Before that, rank 0
writes the step to the ledger and adds the noise to its own sum. So the noise is drawn once, every
rank receives the same release bit for bit, and models and optimizers stay equal.

Before training, the ranks compare what they are about to do (`Ranks.require_same`). A rank with
another bound, rate or data set would apply rank 0's noise and ε to its own examples.

The ranks and the network between them must be trusted, because they exchange sums without noise.
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

TIMEOUT = timedelta(days=1)  # for a rank that waits for another, which may be evaluating


@dataclass(frozen=True)
class Ranks:
    """The rank of this process, and the number of processes of its run.

    A single process is rank 0 of 1.
    """

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """True for rank 0, which writes files, draws noise and reports."""
        return self.rank == 0

    def take_share(self, rows: S) -> S:
        """Return this rank's rows of an array or tensor with one row per example of a step."""
        return rows[self.rank :: self.size] if self.size > 1 else rows

    def all_reduce(self, total: dict[str, Tensor]) -> dict[str, Tensor]:
        """Sum each block over the ranks, in place. Every rank gets the same bits."""
        if self.size == 1:
            return total
        for name, value in total.items():
            total[name] = value.resolve_conj()
        blocks = [real_view(value) for value in total.values()]
        for dtype in sorted({block.dtype for block in blocks}, key=str):
            values = [block for block in blocks if block.dtype == dtype]
            message = torch.cat([value.reshape(-1) for value in values])
            with _explain_lost_rank():
                dist.all_reduce(message)
            parts = message.split([value.numel() for value in values])
            for value, part in zip(values, parts, strict=True):
                value.copy_(part.view_as(value))
        return total

    def broadcast(self, value: T) -> T:
        """Return rank 0's `value` on every rank."""
        if self.size == 1:
            return value
        message = [value]
        with _explain_lost_rank():
            dist.broadcast_object_list(message, src=0)
        return message[0]

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, ordered by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with _explain_lost_rank():
            dist.all_gather_object(values, value)
        return values

    def require_same(self, facts: Mapping[str, object]) -> None:
        """Raise an error on every rank if the ranks differ in one of the facts.

        Args:
            facts: what the ranks are about to do, by a name for the error.
        """
        facts_by_rank = self.gather({name: repr(value) for name, value in facts.items()})
        for name in facts:
            for rank, facts_of_rank in enumerate(facts_by_rank):
                if facts_of_rank.get(name) != facts_by_rank[0].get(name):
                    raise UserError(
                        f"rank {rank} has another {name} than rank 0: start all processes of a "
                        "training with the same command, code and data. No further step was taken."
                    )

    def copy_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite every tensor with that of rank 0."""
        if self.size == 1:
            return
        for tensor in tensors:
            values = real_view(tensor.detach())
            message = values.contiguous()  # a copy if the tensor has gaps in its memory
            with _explain_lost_rank():
                dist.broadcast(message, src=0)
            values.copy_(message)

    def max(self, number: int) -> int:
        """Return the largest of the ranks' numbers."""
        if self.size == 1:
            return number
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        message = torch.tensor(number, device=device)
        with _explain_lost_rank():
            dist.all_reduce(message, op=dist.ReduceOp.MAX)
        return int(message)

    def any(self, condition: bool) -> bool:
        """Return True if the condition holds on any rank. Every rank must call it."""
        return bool(self.max(condition))


@contextmanager
def _explain_lost_rank() -> Iterator[None]:
    """Raise a clear error if another rank ends while this one waits for it."""
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
    """Return True if torchrun, or a similar launcher, started this process together with others."""
    expected = {"RANK", "WORLD_SIZE", "MASTER_ADDR"}
    return expected <= os.environ.keys() and int(os.environ["WORLD_SIZE"]) > 1


def rank() -> int:
    """Return this process's rank, before or after `join`; 0 for a single process."""
    return int(os.environ["RANK"]) if is_distributed() else 0


@cache
def join(device_type: str) -> Ranks:
    """Connect to the other ranks, with NCCL between GPUs and gloo between CPUs."""
    if not dist.is_initialized():  # a user's script may have done so
        if not is_distributed():
            return ALONE
        dist.init_process_group("nccl" if device_type == "cuda" else "gloo", timeout=TIMEOUT)
        atexit.register(dist.destroy_process_group)
    return Ranks(dist.get_rank(), dist.get_world_size())


def leave(code: int) -> None:
    """Exit without shutting down the interpreter, if this process has joined others.

    In a normal exit, a thread of gloo or torch sometimes outlives the interpreter (in one of twenty
    runs) and ends the process with SIGABRT, so torchrun reports a finished run as failed.
    """
    if dist.is_initialized():
        atexit._run_exitfuncs()  # among them, `destroy_process_group`
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
