"""A stream of normal numbers for every key: ChaCha20's bits, made normal by Box and Muller.

The cipher is OpenSSL's, logarithm and sine are torch's. A stream is drawn in pieces, each of which
starts the cipher anew with the piece's number, so any threads may take any pieces.
"""

from __future__ import annotations

import hashlib
import math
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from torch import Tensor

PAIRS = 2**14  # of numbers in a piece: so few that torch makes them on one thread, in its cache
_ZEROS = memoryview(bytes(8 * PAIRS))


def hash_key(key: tuple[int | str, ...]) -> bytes:
    """Hash a key of any parts to ChaCha's 256 bits, so that no two streams meet."""
    return hashlib.sha256(repr([str(part) for part in key]).encode()).digest()


class Request(NamedTuple):
    """`out` = (`out` + std·N(0, 1)) · times, with the numbers of one stream.

    Attributes:
        out: real numbers [n], float32 or float64, on any device.
    """

    key: bytes
    out: Tensor
    std: float
    times: float


class Piece(NamedTuple):
    """A stream's piece, of so many pairs, and the part of `out` that it is for.

    Pair i is added to numbers i and ⌈n/2⌉ + i.
    """

    of: Request
    number: int
    out: Tensor
    pairs: int


def add_normals(requests: Iterable[Request], dtype: torch.dtype, terms: int = 1) -> None:
    """Add each request's numbers in place, on as many threads as torch uses.

    Args:
        dtype: what numbers are made in: float32, with 31 bits for a tail (|x| ≤ 6.7), or float64,
            with 52 (|x| ≤ 8.6).
        terms: how many independent numbers are added up to one, over the root of their count.
    """
    groups: list[list[Piece]] = []  # pieces that are made together: many small tensors, or one
    room = 0
    for request in requests:
        whole = request.out.numel()
        for number, start in enumerate(range(0, whole, 2 * PAIRS)):
            count = min(whole - start, 2 * PAIRS)
            out = request.out if count == whole else request.out[start : start + count]
            pairs = (count + 1) // 2
            if pairs > room:
                groups.append([])
                room = PAIRS
            groups[-1].append(Piece(request, number, out, pairs))
            room -= pairs

    def add(start: int, stop: int) -> None:
        for group in groups[start:stop]:
            _add_group(group, dtype, terms)

    run_parallel(add, len(groups))


def _add_group(group: Sequence[Piece], dtype: torch.dtype, terms: int) -> None:
    first, second = _draw(group, dtype, 0)
    for term in range(1, terms):
        for number, other in zip((first, second), _draw(group, dtype, term), strict=True):
            number += other
    outs, numbers, scales = [], [], []
    start = 0
    for of, _, out, pairs in group:
        rest = out.numel() - pairs
        outs += [out[:pairs], out[pairs:]]
        numbers += [first[start : start + pairs], second[start : start + rest]]
        scales += 2 * [of.std * terms**-0.5]
        start += pairs
    torch._foreach_mul_(numbers, scales)
    if outs[0].is_cpu and outs[0].dtype == dtype:
        torch._foreach_add_(outs, numbers)
    else:
        for out, number in zip(outs, numbers, strict=True):
            out.add_(number.to(out.device))
    if any(of.times != 1 for of, *_ in group):
        torch._foreach_mul_([out for _, _, out, _ in group], [of.times for of, *_ in group])


def _draw(group: Sequence[Piece], dtype: torch.dtype, term: int) -> tuple[Tensor, Tensor]:
    """Return pairs of independent N(0, 1) numbers for the pieces, one behind the other."""
    size = dtype.itemsize
    words = np.empty((2, sum(piece.pairs for piece in group)), f"i{size}")
    radii, angles = (row.data.cast("B") for row in words)
    start = 0
    for of, number, _, pairs in group:
        # Eight bytes count the cipher's blocks, the others are the nonce.
        nonce = struct.pack("<QII", 0, number, term)
        cipher = Cipher(ChaCha20(of.key, nonce), mode=None).encryptor()
        stop = start + size * pairs
        cipher.update_into(_ZEROS[: stop - start], radii[start:stop])
        cipher.update_into(_ZEROS[: stop - start], angles[start:stop])
        start = stop
    return _box_muller(torch.from_numpy(words[0]), torch.from_numpy(words[1]), dtype)


def _box_muller(radii: Tensor, angles: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Turn pairs of uniform integers [n] into pairs of independent N(0, 1) numbers."""
    width, bits = (31, 32) if dtype == torch.float32 else (52, 64)
    # An odd multiple of 2⁻¹⁻ʷ, so never 0.
    uniform = radii.bitwise_and_(2**width - 1).to(dtype).add_(0.5).mul_(2.0**-width)
    radius = uniform.log_().mul_(-2).sqrt_()
    angle = angles.to(dtype).mul_(math.pi * 2.0 ** (1 - bits))
    return angle.cos().mul_(radius), angle.sin_().mul_(radius)


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
