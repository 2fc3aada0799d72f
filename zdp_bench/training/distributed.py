"""Several processes, one run: `torchrun --nproc-per-node=N -m zdp_bench run recipe=NAME`, on one machine or many.

All ranks hold the same model and draw the same batch over the whole data set; each bounds and sums its share of the records, and
the sums are added up (`Ranks.all_reduce`). What must be done once is done by rank 0, before its share leaves it: the ledger's
line, and the noise, which is added to rank 0's share. So the release is drawn in one place, whatever the source of its noise;
every rank receives the same bits of it; and the model, the optimiser and their decisions stay the same everywhere.

The ranks trust one another and what lies between them: sums without noise travel there.
"""

from __future__ import annotations

import atexit
import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
S = TypeVar("S", np.ndarray, Tensor)

PATIENCE = timedelta(days=1)  # how long a rank waits for another: rank 0 may evaluate for long


@dataclass(frozen=True)
class Ranks:
    """This process among those of its run; one process alone is rank 0 of 1."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes, draws noise and speaks."""
        return self.rank == 0

    def share(self, of: S) -> S:
        """This rank's rows of what has one row for each record of a step, an array or a tensor."""
        return of[self.rank :: self.size] if self.size > 1 else of

    def all_reduce(self, total: dict[str, Tensor]) -> dict[str, Tensor]:
        """Σ over ranks of each block, in place and the same bits on every rank: one message for each precision there is."""
        if self.size == 1:
            return total
        for name, value in total.items():
            total[name] = value.resolve_conj()
        flat = {
            name: torch.view_as_real(value) if value.is_complex() else value
            for name, value in total.items()
        }
        for dtype in sorted({value.dtype for value in flat.values()}, key=str):
            of = {name: value for name, value in flat.items() if value.dtype == dtype}
            message = torch.cat([value.reshape(-1) for value in of.values()])
            dist.all_reduce(message)
            for value, part in zip(
                of.values(), message.split([value.numel() for value in of.values()]), strict=True
            ):
                value.copy_(part.view_as(value))
        return total

    def broadcast(self, value: T) -> T:
        """Rank 0's `value`, on every rank."""
        if self.size == 1:
            return value
        held = [value]
        dist.broadcast_object_list(held, src=0)
        return held[0]

    def largest(self, number: int) -> int:
        """The largest of the ranks' numbers: they must agree on whether to stop."""
        if self.size == 1:
            return number
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        held = torch.tensor(number, device=device)
        dist.all_reduce(held, op=dist.ReduceOp.MAX)
        return int(held)


ALONE = Ranks()


def launched() -> bool:
    """Whether torchrun, or something that speaks like it, started this process beside others."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys() and int(
        os.environ["WORLD_SIZE"]
    ) > 1


def rank() -> int:
    """This process's rank, before or after `join`; 0 where there is one process."""
    return int(os.environ["RANK"]) if launched() else 0


@cache
def join(device_type: str) -> Ranks:
    """Meet the other ranks; NCCL between GPUs, gloo between CPUs. Without torchrun, one rank alone."""
    if not launched():
        return ALONE
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo", timeout=PATIENCE)
    atexit.register(dist.destroy_process_group)
    return Ranks(dist.get_rank(), dist.get_world_size())


def leave(code: int) -> None:
    """End this process, if it has met others, without taking the interpreter apart.

    Seen in one of twenty runs: a thread of gloo or torch that outlives the interpreter ends the rank with SIGABRT, and torchrun
    reports a run as failed whose record is written. Everything a run keeps is on disk when it ends.
    """
    if dist.is_initialized():
        atexit._run_exitfuncs()  # the ranks part, and whoever else wants to know
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
