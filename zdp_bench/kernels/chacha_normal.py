"""A stream of standard normal numbers for every key, compiled: ChaCha8's bits, made normal by Box and Muller in float32.

ChaCha8 in counter mode is the generator behind Go's and Rust's random numbers: any place of a stream is as near as its start, so
threads may cut it where they like. Logarithm, sine and cosine are polynomials of IEEE operations alone (sums, products, fused
products, roots), each of which every processor rounds alike: a key has the same bits on every machine.
"""

from __future__ import annotations

import hashlib
import math
import struct
from array import array
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import carray, float32, int32, njit, uint32, uint64

from zdp_bench.kernels.jit import (
    Loop,
    begin,
    compiled,
    float32_at,
    fused,
    inlined,
    next_share,
    plus,
    rotated,
    task_of,
    wide_vectors,
    word_of,
)

CHUNK = (
    512  # pairs that are made at once, from 64 blocks of ChaCha: a stream is cut at multiples of it
)
SHARE = 8 * CHUNK  # pairs that a thread takes at a time: some 5 microseconds' work
_LANES = 64  # blocks side by side, each 16 words
_PAIRS_A_BLOCK = CHUNK // _LANES
_LN2_HIGH, _LN2_LOW = (
    0.693359375,
    -2.12194440e-4,
)  # ln 2 in two parts: the first times an exponent is exact
_SQRT_HALF = 0x3F3504F3  # the bits of √½ as a float32
_SIGN = 0x80000000  # the bit of a float32's sign


def hashed(key: tuple[int | str, ...]) -> bytes:
    """ChaCha's 256 bits for a key of any parts: a hash, so two streams never meet."""
    return hashlib.sha256(repr([str(part) for part in key]).encode()).digest()


@inlined
def _quarter(a: Any, b: Any, c: Any, d: Any) -> Any:
    """ChaCha's quarter round (Bernstein 2008, "ChaCha, a variant of Salsa20", section 2)."""
    a = plus(a, b)
    d = rotated(uint32(d ^ a), uint32(16))
    c = plus(c, d)
    b = rotated(uint32(b ^ c), uint32(12))
    a = plus(a, b)
    d = rotated(uint32(d ^ a), uint32(8))
    c = plus(c, d)
    b = rotated(uint32(b ^ c), uint32(7))
    return a, b, c, d


# fmt: off
@inlined
def _double_round(a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any,
                  i: Any, j: Any, k: Any, l: Any, m: Any, n: Any, o: Any, p: Any) -> Any:  # noqa: E741
    """The columns, then the diagonals."""
    a, e, i, m = _quarter(a, e, i, m)
    b, f, j, n = _quarter(b, f, j, n)
    c, g, k, o = _quarter(c, g, k, o)
    d, h, l, p = _quarter(d, h, l, p)  # noqa: E741
    a, f, k, p = _quarter(a, f, k, p)
    b, g, l, m = _quarter(b, g, l, m)  # noqa: E741
    c, h, i, n = _quarter(c, h, i, n)
    d, e, j, o = _quarter(d, e, j, o)
    return a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p


@inlined
def fill_words(key: Any, first: Any, words: Any) -> None:
    """ChaCha8's blocks `first` to `first` + 64: word w of block b goes to `words[64·w + b]`, uint32 [1024].

    The nonce is zero and the counter has 64 bits, as in Bernstein's own version.
    """
    k0, k1, k2, k3, k4, k5, k6, k7 = key[0], key[1], key[2], key[3], key[4], key[5], key[6], key[7]
    s0, s1, s2, s3 = uint32(0x61707865), uint32(0x3320646E), uint32(0x79622D32), uint32(0x6B206574)  # "expand 32-byte k"
    low, high, zero = uint32(first), uint32(first >> uint64(32)), uint32(0)  # `first` is a multiple of 64: no carry below
    for lane in range(_LANES):
        at = plus(low, uint32(lane))
        a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p = _double_round(  # noqa: E741
            s0, s1, s2, s3, k0, k1, k2, k3, k4, k5, k6, k7, at, high, zero, zero)
        a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p = _double_round(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p)  # noqa: E741
        a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p = _double_round(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p)  # noqa: E741
        a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p = _double_round(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p)  # noqa: E741
        words[0 * _LANES + lane], words[1 * _LANES + lane] = plus(a, s0), plus(b, s1)
        words[2 * _LANES + lane], words[3 * _LANES + lane] = plus(c, s2), plus(d, s3)
        words[4 * _LANES + lane], words[5 * _LANES + lane] = plus(e, k0), plus(f, k1)
        words[6 * _LANES + lane], words[7 * _LANES + lane] = plus(g, k2), plus(h, k3)
        words[8 * _LANES + lane], words[9 * _LANES + lane] = plus(i, k4), plus(j, k5)
        words[10 * _LANES + lane], words[11 * _LANES + lane] = plus(k, k6), plus(l, k7)
        words[12 * _LANES + lane], words[13 * _LANES + lane] = plus(m, at), plus(n, high)
        words[14 * _LANES + lane], words[15 * _LANES + lane] = o, p
# fmt: on


@inlined
def _radius(word: Any) -> Any:
    """√(-2 ln u) of the uniform u = (word + ½)·2⁻³² on (0, 1]: finest near 0, where the tails come from.

    u = 2ᵉ·m with √½ ≤ m < √2, and ln m by Cephes' `logf`, within 2 units in the last place.
    """
    u = fused(float32(uint32(word)), float32(2.0**-32), float32(2.0**-33))
    bits = np.float32(u).view(np.int32)
    exponent = int32(int32(bits - int32(_SQRT_HALF)) >> int32(23))
    x = np.int32(int32(bits - int32(exponent << int32(23)))).view(np.float32) - float32(1)  # m - 1
    p = fused(float32(7.0376836292e-2), x, float32(-1.1514610310e-1))
    p = fused(p, x, float32(1.1676998740e-1))
    p = fused(p, x, float32(-1.2420140846e-1))
    p = fused(p, x, float32(1.4249322787e-1))
    p = fused(p, x, float32(-1.6668057665e-1))
    p = fused(p, x, float32(2.0000714765e-1))
    p = fused(p, x, float32(-2.4999993993e-1))
    p = fused(p, x, float32(3.3333331174e-1))
    square = x * x
    rest = fused(float32(p * x), square, float32(-0.5) * square)  # ln m = x - x²/2 + x³·p
    log_u = fused(
        float32(exponent), float32(_LN2_HIGH), x + fused(float32(exponent), float32(_LN2_LOW), rest)
    )
    return np.sqrt(float32(-2) * log_u)


@inlined
def _turned(number: Any, sign: Any) -> Any:
    """The float32 number, negated where the highest bit of `sign`, which has no other, is set."""
    return np.uint32(uint32(np.float32(number).view(np.uint32) ^ sign)).view(np.float32)


@inlined
def _cosine_and_sine(word: Any) -> Any:
    """Of the angle π·word/2³¹, `word` taken as a signed number: within 1.5e-7 of the unit circle's point.

    The angle is a quarter turn times `quarters`, whose two bits stay where they are, the highest, plus what lies within an eighth
    of a turn, which Cephes' `sinf` and `cosf` serve.
    """
    quarters = uint32(plus(uint32(word), uint32(0x20000000)) & uint32(0xC0000000))
    angle = float32(int32(uint32(word) - quarters)) * float32(math.pi * 2.0**-31)
    square = angle * angle
    sine = fused(float32(-1.9515295891e-4), square, float32(8.3321608736e-3))
    sine = fused(fused(sine, square, float32(-1.6666654611e-1)), float32(square * angle), angle)
    cosine = fused(float32(2.443315711809948e-5), square, float32(-1.388731625493765e-3))
    cosine = fused(cosine, square, float32(4.166664568298827e-2))
    cosine = fused(cosine, float32(square * square), fused(float32(-0.5), square, float32(1)))
    odd = uint32(quarters & uint32(0x40000000)) != uint32(0)
    along, across = sine if odd else cosine, cosine if odd else sine
    of_along = uint32(
        (quarters ^ plus(quarters, quarters)) & uint32(_SIGN)
    )  # of an odd quarter or back, not of both
    return _turned(along, of_along), _turned(across, uint32(quarters & uint32(_SIGN)))


@njit(error_model="numpy")
def _add_normals(key: Any, out: Any, std: Any, times: Any, start: Any, stop: Any) -> None:
    """Pairs `start` to `stop`."""
    wide_vectors()
    words = np.empty(2 * CHUNK, np.uint32)
    half = (len(out) + 1) // 2
    for first in range(start, stop, CHUNK):
        last = min(first + CHUNK, stop)
        fill_words(key, uint64(first // _PAIRS_A_BLOCK), words)
        radii, turns = words[:CHUNK], words[CHUNK:]
        here, there = (
            out[first:last],
            out[half + first : half + last],
        )  # the last pair of an odd n is one number only
        for i in range(len(there)):
            radius = _radius(radii[i]) * std
            cosine, sine = _cosine_and_sine(turns[i])
            here[i] = fused(cosine, radius, here[i]) * times
            there[i] = fused(sine, radius, there[i]) * times
        for i in range(len(there), len(here)):
            here[i] = fused(_cosine_and_sine(turns[i])[0], _radius(radii[i]) * std, here[i]) * times


class Stream(NamedTuple):
    """Numbers to which a stream is added.

    Attributes:
        key: see `hashed`.
        out: float32 or complex64, contiguous: n real numbers. Pair i of the stream is numbers i and ⌈n/2⌉ + i.
        times: what the sum of number and noise is multiplied with.
    """

    key: bytes
    out: torch.Tensor
    std: float
    times: float = 1.0


def _add_streams(task: Any) -> None:
    """See `add_normals`; an item's words: key (4), place and length of `out`, std, times."""
    wide_vectors()
    key, notes = np.empty(8, np.uint32), begin(task)
    while True:
        at, share = next_share(task, notes)
        if at < 0:
            break
        for i in range(4):
            key[2 * i], key[2 * i + 1] = uint32(task[at + i]), uint32(task[at + i] >> 32)
        out = carray(float32_at(task[at + 4]), (task[at + 5],))
        std, times = (
            np.uint32(task[at + 6]).view(np.float32),
            np.uint32(task[at + 7]).view(np.float32),
        )
        start, pairs = share * SHARE, (len(out) + 1) // 2
        _add_normals(key, out, std, times, start, min(start + SHARE, pairs))


@cache
def _adder() -> Loop:
    return compiled(_add_streams)


def add_normals(*streams: Stream) -> None:
    """`out` = (`out` + std·N(0, 1)) · times for every stream, cut among torch's threads."""
    _adder().run(_task(streams))


def _task(streams: tuple[Stream, ...]) -> array[int]:
    items = []
    for key, out, std, times in streams:
        dtype, numbers = out.dtype, out.numel()
        if dtype is torch.complex64:
            numbers *= 2
        if (
            dtype not in (torch.complex64, torch.float32)
            or not out.is_contiguous()
            or out.is_conj()
        ):
            raise ValueError("noise is laid over numbers of 32 bits that lie side by side")
        words = [
            *struct.unpack("<4q", key),
            out.data_ptr(),
            numbers,
            word_of(std, "<f"),
            word_of(times, "<f"),
        ]
        items.append((-(-numbers // (2 * SHARE)), words))
    return task_of(items)
