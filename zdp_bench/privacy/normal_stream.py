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


def add_normals(
    requests: Iterable[Request],
    dtype: torch.dtype,
    terms: int = 1,
) -> None:
    """Add each request's numbers in place, on as many threads as torch uses.

    Args:
        dtype: what numbers are made in: float32, with |x| ≤ 6.7, or float64, with |x| ≤ 9.5.
        terms: how many independent numbers are added up to one, over the root of their count.
    """
    groups: list[list[Piece]] = []  # pieces that are made together: many small tensors, or one
    room = 0  # pairs that the last group can still take
    for request in requests:
        for number, out in enumerate(request.out.split(2 * PAIRS)):
            pairs = (len(out) + 1) // 2  # none of an empty tensor
            if pairs == 0:
                continue
            if pairs > room:
                groups.append([])
                room = PAIRS
            groups[-1].append(Piece(request, number, out, pairs))
            room -= pairs

    def add(start: int, stop: int) -> None:
        for group in groups[start:stop]:
            _add_group(group, dtype, terms)

    run_parallel(add, len(groups))


def _add_group(
    group: Sequence[Piece],
    dtype: torch.dtype,
    terms: int,
) -> None:
    halves: list[Tensor] = []
    stds: list[float] = []
    for piece in group:
        own_halves = piece.out.split(piece.pairs)  # of one number only the first
        halves += own_halves
        stds += [piece.of.std * terms**-0.5] * len(own_halves)
    in_place = terms == 1 and halves[0].is_cpu and halves[0].dtype == dtype
    if in_place:
        _add_normals(halves, stds, group, dtype, 0)
    else:
        sums = [torch.zeros(len(half), dtype=dtype) for half in halves]
        for term in range(terms):
            _add_normals(sums, [1.0] * len(sums), group, dtype, term)
        for half, sum_, std in zip(halves, sums, stds, strict=True):
            half.add_(sum_.mul_(std).to(half.device))
    times = [piece.of.times for piece in group]
    if any(factor != 1 for factor in times):
        torch._foreach_mul_([piece.out for piece in group], times)


def _add_normals(
    halves: list[Tensor],
    stds: list[float],
    group: Sequence[Piece],
    dtype: torch.dtype,
    term: int,
) -> None:
    """Add std·N(0, 1) to both halves of every piece: radius · cosine, and radius · sine."""
    radii, cosines, sines = _draw(group, dtype, term)
    own_radii: list[Tensor] = []
    own_waves: list[Tensor] = []
    start = 0
    for piece in group:
        own_radii.append(radii[start : start + piece.pairs])
        own_waves.append(cosines[start : start + piece.pairs])
        rest = len(piece.out) - piece.pairs
        if rest:
            own_radii.append(radii[start : start + rest])
            own_waves.append(sines[start : start + rest])
        start += piece.pairs
    torch._foreach_addcmul_(halves, own_radii, own_waves, stds)


def _draw(
    group: Sequence[Piece],
    dtype: torch.dtype,
    term: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return radii, cosines and sines, whose products with a radius are independent N(0, 1)."""
    size = dtype.itemsize
    pairs = sum(piece.pairs for piece in group)
    words = np.empty((2, pairs), f"i{size}")
    radii, angles = (row.data.cast("B") for row in words)
    start = 0
    for piece in group:
        # Eight bytes count the cipher's blocks, the others are the nonce.
        nonce = struct.pack("<QII", 0, piece.number, term)
        cipher = Cipher(ChaCha20(piece.of.key, nonce), mode=None).encryptor()
        stop = start + size * piece.pairs
        cipher.update_into(_ZEROS[: stop - start], radii[start:stop])
        cipher.update_into(_ZEROS[: stop - start], angles[start:stop])
        start = stop
    return _box_muller(torch.from_numpy(words[0]), torch.from_numpy(words[1]), dtype)


def _box_muller(
    radii: Tensor,
    angles: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
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
