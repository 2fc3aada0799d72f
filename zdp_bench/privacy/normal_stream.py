"""A stream of standard normal numbers for every key: ChaCha8's bits, made normal by Box and Muller.

ChaCha8 in counter mode is the generator behind Go's and Rust's random numbers. Any place of a
stream is as near as its start, so threads may cut it anywhere.

numpy draws the streams here. `kernels.chacha_normal` draws the same ones, equal up to the rounding
of logarithm and sine, in a tenth of the time.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial

import numpy as np
import torch

from zdp_bench import kernels

GROUP = 512  # consecutive pairs of a stream, made of 64 blocks of ChaCha
TOGETHER = 64  # groups that are made at once, in a core's cache


def hash_key(key: tuple[int | str, ...]) -> bytes:
    """Hash a key of any parts to ChaCha's 256 bits, so that no two streams meet."""
    return hashlib.sha256(repr([str(part) for part in key]).encode()).digest()


def add_normals(key: bytes, out: torch.Tensor, std: float, times: float = 1.0) -> None:
    """out = (out + std·N(0, 1)) · times, in place.

    Args:
        key: see `hash_key`.
        out: contiguous float32 or complex64 in a CPU's memory: n real numbers. Pair i of the stream
            is added to numbers i and ⌈n/2⌉ + i.

    Raises:
        ValueError: `out` is something else.
    """
    narrow = out.dtype in (torch.complex64, torch.float32)
    if not narrow or not out.is_contiguous() or out.is_conj():
        raise ValueError("noise is laid over numbers of 32 bits that lie side by side")
    if kernels.enabled():
        from zdp_bench.kernels import chacha_normal

        chacha_normal.add_normals(key, out, std, times)
    else:
        _add_by_numpy(key, out, std, times)


def _add_by_numpy(key: bytes, out: torch.Tensor, std: float, times: float = 1.0) -> None:
    numbers = (torch.view_as_real(out) if out.is_complex() else out).view(-1).numpy()
    pairs, part = -(-len(numbers) // 2), GROUP * TOGETHER
    run_parallel(partial(_add_pairs, key, numbers, std, times), pairs, part, min_parallel=part)


def _add_pairs(
    key: bytes, numbers: np.ndarray, std: float, times: float, start: int, stop: int
) -> None:
    """Add pairs `start` to `stop`; `start` is a multiple of `GROUP`."""
    half = -(-len(numbers) // 2)
    for first in range(start, stop, GROUP * TOGETHER):
        last = min(first + GROUP * TOGETHER, stop)
        words = _words(key, first // GROUP, -(-(last - first) // GROUP))
        radii, angles = words[:, :8].reshape(-1), words[:, 8:].reshape(-1)
        # A word is a uniform number (word + ½)·2⁻³² in (0, 1], or an angle of word·π/2³¹.
        uniform = radii.astype(np.float32) * np.float32(2**-32) + np.float32(2**-33)
        radius = np.sqrt(np.float32(-2) * np.log(uniform)) * np.float32(std)
        angle = angles.view(np.int32).astype(np.float32) * np.float32(np.pi * 2**-31)
        here, there = numbers[first:last], numbers[half + first : half + last]
        here += (np.cos(angle) * radius)[: len(here)]
        there += (np.sin(angle) * radius)[: len(there)]
        here *= np.float32(times)
        there *= np.float32(times)


def _words(key: bytes, group: int, groups: int) -> np.ndarray:
    """ChaCha8's words for some groups, uint32 [groups, 16, 64]: word w of the group's 64 blocks.

    The nonce is 0 and the counter has 64 bits, as in Bernstein's own version (2008, "ChaCha, a
    variant of Salsa20", section 2).
    """
    blocks = np.arange(64 * group, 64 * (group + groups), dtype=np.uint64)
    start = np.zeros((4, 4, len(blocks)), np.uint32)
    start[0] = np.frombuffer(b"expand 32-byte k", "<u4")[:, None]
    start[1:3] = np.frombuffer(key, "<u4").reshape(2, 4, 1)
    start[3, 0], start[3, 1] = blocks.astype(np.uint32), (blocks >> np.uint64(32)).astype(np.uint32)
    a, b, c, d = rows = start.copy()
    other = np.empty_like(a)
    for _ in range(4):
        for turn in (-1, 1):  # columns, and then diagonals
            for one, two, moved, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
                one += two
                moved ^= one
                np.right_shift(moved, np.uint32(32 - bits), out=other)
                moved <<= np.uint32(bits)
                moved |= other
            for row, by in ((b, turn), (c, 2), (d, -turn)):
                row[:] = np.roll(row, by, axis=0)
    rows += start
    return rows.reshape(16, groups, 64).swapaxes(0, 1)


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
