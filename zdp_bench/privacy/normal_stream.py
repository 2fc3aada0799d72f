"""Streams of normal numbers, one for each key: ChaCha20 and the Box–Muller transform.

OpenSSL provides the cipher, torch the logarithm and the sine. A stream is drawn in pieces. Each
piece starts the cipher anew with its number as the nonce, so any thread may draw any piece.
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

PAIRS = 31 * 2**10  # pairs of numbers in a piece; so few that torch uses one thread
_ZEROS = memoryview(bytes(8 * PAIRS))


def hash_key(key: tuple[int | str, ...]) -> bytes:
    """Hash a key of any parts to the 256 bits of a ChaCha20 key, so that no streams coincide."""
    return hashlib.sha256(repr([str(part) for part in key]).encode()).digest()


class Request(NamedTuple):
    """A request to set `out` = (`out` + std·N(0, 1)) · factor, with the numbers of one stream.

    Attributes:
        key: ChaCha20 key of the stream.
        out: real numbers [n], float32 or float64, on any device; overwritten.
        std: standard deviation.
        factor: factor for the result.
    """

    key: bytes
    out: Tensor
    std: float
    factor: float


class Piece(NamedTuple):
    """A piece of a request's stream.

    Attributes:
        request: the request.
        number: index of the piece in the stream.
        out: the part [n] of the request's `out` to which it is added: pair i to numbers i and
            ⌈n/2⌉ + i.
        pairs: ⌈n/2⌉.
    """

    request: Request
    number: int
    out: Tensor
    pairs: int


def add_normals(
    requests: Iterable[Request],
    dtype: torch.dtype,
    terms: int = 1,
) -> None:
    """Add the noise of each request in place, on as many threads as torch uses.

    Args:
        requests: the tensors and their noise.
        dtype: dtype in which numbers are computed: float32, with |x| ≤ 6.7, or float64, with
            |x| ≤ 9.5.
        terms: number of independent normal numbers whose sum, divided by √`terms`, gives one.
    """
    groups: list[list[Piece]] = []  # pieces that are drawn together, of one tensor or many small
    room = 0  # number of pairs that the last group can still take
    for request in requests:
        for number, out in enumerate(request.out.split(2 * PAIRS)):
            pairs = (len(out) + 1) // 2  # 0 for an empty tensor
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
        own_halves = piece.out.split(piece.pairs)  # a single number has no second half
        halves += own_halves
        stds += [piece.request.std * terms**-0.5] * len(own_halves)
    in_place = terms == 1 and halves[0].is_cpu and halves[0].dtype == dtype
    if in_place:
        _add_normals(halves, stds, group, dtype, 0)
    else:
        sums = [torch.zeros(len(half), dtype=dtype) for half in halves]
        for term in range(terms):
            _add_normals(sums, [1.0] * len(sums), group, dtype, term)
        for half, sum_, std in zip(halves, sums, stds, strict=True):
            half.add_(sum_.mul_(std).to(half.device))
    factors = [piece.request.factor for piece in group]
    if any(factor != 1 for factor in factors):
        torch._foreach_mul_([piece.out for piece in group], factors)


def _add_normals(
    halves: list[Tensor],
    stds: list[float],
    group: Sequence[Piece],
    dtype: torch.dtype,
    term: int,
) -> None:
    """Add std·N(0, 1) to the halves of every piece: radius · cosine, and radius · sine."""
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
    """Return radii, cosines and sines. The products with the radii are independent N(0, 1)."""
    size = dtype.itemsize
    pairs = sum(piece.pairs for piece in group)
    words = np.empty((2, pairs), f"i{size}")
    radii, angles = (row.data.cast("B") for row in words)
    start = 0
    for piece in group:
        # The first eight bytes count the cipher's blocks. The others are the nonce.
        nonce = struct.pack("<QII", 0, piece.number, term)
        cipher = Cipher(ChaCha20(piece.request.key, nonce), mode=None).encryptor()
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
    """Return the radii, cosines and sines of the Box–Muller transform, [n] each.

    Args:
        radii: uniform signed integers of w bits, [n]. |integer|/2ʷ⁻¹ is uniform on [0, 1]. The
            square of half a step is added to its square, to avoid the logarithm of 0.
        angles: uniform signed integers of w bits, [n].
        dtype: dtype of the results, of w bits.
    """
    bits = 8 * dtype.itemsize
    uniform = radii.to(dtype)
    step = torch.tensor(2.0 ** -(2 * bits), dtype=dtype)
    squared = torch.addcmul(step, uniform, uniform, value=2.0 ** (2 - 2 * bits))
    angle = angles.to(dtype).mul_(math.pi * 2.0 ** (1 - bits))
    return squared.log_().neg_().sqrt_(), angle.cos(), angle.sin_()
