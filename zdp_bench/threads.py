"""Run pieces of work side by side, on as many threads as torch uses."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch


def run_parallel(work: Callable[[int, int], None], count: int) -> None:
    """Call `work(start, stop)` over 0..count, in as many parts as torch uses threads.

    `work` must let go of the interpreter's lock while it computes, as torch does.
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
    """Threads of this process; a forked process has none of its parent's."""
    return ThreadPoolExecutor(threads, thread_name_prefix="side-by-side")
