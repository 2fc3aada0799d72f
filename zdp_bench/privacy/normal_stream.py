"""A stream of normal numbers for every key: ChaCha20's bits, made normal by Box and Muller.

The cipher is OpenSSL's, logarithm and sine are torch's. A stream is drawn in pieces, each of which
starts the cipher anew with the piece's number, so any threads may take any pieces.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from torch import Tensor

from zdp_bench.threads import run_parallel

PAIRS = 31 * 2**10  # of numbers in a piece: so few that torch makes them on one thread
_ZEROS = memoryview(bytes(8 * PAIRS))


def hash_key(key: tuple[int | str, ...]) -> bytes:
    """Hash a key of any parts to ChaCha's 256 bits, so that no two streams meet."""
    return hashlib.sha256(repr([str(part) for part in key]).encode()).digest()


class Request(NamedTuple):
    """`out` = (`out` + std·N(0, 1)) · times, with the numbers of one stream."""

    key: bytes
    out: Tensor  # real numbers [n], float32 or float64, on any device
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
        dtype: what numbers are made in: float32, with |x| ≤ 6.7, or float64, with |x| ≤ 9.5.
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
    outs, stds = [], []
    for of, _, out, pairs in group:
        halves = out.split(pairs)  # of one number only the first
        outs += halves
        stds += [of.std * terms**-0.5] * len(halves)
    in_place = terms == 1 and outs[0].is_cpu and outs[0].dtype == dtype
    sums = outs if in_place else [torch.zeros(len(out), dtype=dtype) for out in outs]
    for term in range(terms):
        radii, cosines, sines = _draw(group, dtype, term)
        ones, others, start = [], [], 0
        for *_, out, pairs in group:
            for wave, count in ((cosines, pairs), (sines, len(out) - pairs))[: min(len(out), 2)]:
                ones.append(radii[start : start + count])
                others.append(wave[start : start + count])
            start += pairs
        torch._foreach_addcmul_(sums, ones, others, stds if in_place else [1.0] * len(sums))
    if not in_place:
        for out, number, std in zip(outs, sums, stds, strict=True):
            out.add_(number.mul_(std).to(out.device))
    if any(of.times != 1 for of, *_ in group):
        torch._foreach_mul_([out for *_, out, _ in group], [of.times for of, *_ in group])


def _draw(group: Sequence[Piece], dtype: torch.dtype, term: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return radii, cosines and sines, whose products with a radius are independent N(0, 1)."""
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


def _box_muller(radii: Tensor, angles: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Turn pairs of uniform signed integers [n] into Box and Muller's radii, cosines and sines.

    With w bits, |integer|/2ʷ⁻¹ is uniform on [0, 1]. The square of half a step is added, so that
    there is no logarithm of 0.
    """
    bits = 8 * dtype.itemsize
    uniform = radii.to(dtype)
    step = torch.tensor(2.0 ** -(2 * bits), dtype=dtype)
    squared = torch.addcmul(step, uniform, uniform, value=2.0 ** (2 - 2 * bits))
    angle = angles.to(dtype).mul_(math.pi * 2.0 ** (1 - bits))
    return squared.log_().neg_().sqrt_(), angle.cos(), angle.sin_()
