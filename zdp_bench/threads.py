"""Run work in parallel, on as many threads as torch uses."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch


def run_parallel(work: Callable[[int, int], None], count: int) -> None:
    """Call `work(start, stop)` on consecutive ranges of 0 … count − 1, one per thread of torch.

    Args:
        work: must release the global interpreter lock while it computes, as torch does.
        count: number of items.
    """
    parts = max(1, min(torch.get_num_threads(), count))
    cuts = [count * part // parts for part in range(parts + 1)]
    pool = _pool(os.getpid(), parts)
    others = [pool.submit(work, *cuts[part : part + 2]) for part in range(1, parts)]
    work(cuts[0], cuts[1])
    for other in others:
        other.result()


@cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """Return the pool of a process; the argument gives a forked process its own pool."""
    return ThreadPoolExecutor(threads, thread_name_prefix="side-by-side")
