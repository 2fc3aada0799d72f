"""Work cut among threads."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch


def run_parallel(
    work: Callable[[int, int], None], count: int, unit: int, min_parallel: int
) -> None:
    """Call `work(start, stop)` over 0..count, in as many parts as torch uses threads.

    `work` must let go of the interpreter's lock while it computes, as numpy does.

    Args:
        unit: parts begin at its multiples.
        min_parallel: up to this count, one part: handing over would take longer.
    """
    threads = torch.get_num_threads() if count > min_parallel else 1
    cuts = [*(count * i // threads // unit * unit for i in range(threads)), count]
    pool = _pool(os.getpid(), threads)
    others = [pool.submit(work, *cuts[i : i + 2]) for i in range(1, threads)]
    work(cuts[0], cuts[1])
    for other in others:
        other.result()


@cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """Threads of this process; a forked process has none of its parent's."""
    return ThreadPoolExecutor(threads, thread_name_prefix="side-by-side")
