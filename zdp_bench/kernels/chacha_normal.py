"""The compiled twin of `privacy.normal_stream`, with the same bits on every processor.

Logarithm, sine and cosine are polynomials of IEEE operations alone (sums, products, fused products,
roots), each of which every processor rounds alike.
"""

from __future__ import annotations

import math
import struct
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, float32, int32, njit, types, uint32, uint64

from zdp_bench.kernels.jit import (
    ARGUMENTS,
    CompiledLoop,
    as_intrinsic,
    compile_loop,
    first_chunk,
    float32_at,
    inlined,
    next_chunk,
    use_wide_vectors,
)

GROUP = 512  # pairs that are made at once, from 64 blocks of ChaCha
CHUNK = 8 * GROUP  # pairs that a thread takes at a time: about 5 microseconds' work
_LANES = 64  # blocks of a group, each 16 words
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4  # ln 2: the first times an exponent is exact
_SQRT_HALF = 0x3F3504F3  # the bits of √½ as a float32
_SIGN = 0x80000000  # the bit of a float32's sign


@as_intrinsic
def _fused(context: Any, a: Any, b: Any, c: Any) -> Any:
    """a·b + c of float32 numbers, rounded once."""
    f32 = types.float32
    return f32(f32, f32, f32), lambda context, builder, signature, numbers: builder.fma(*numbers)


@as_intrinsic
def _plus(context: Any, a: Any, b: Any) -> Any:
    """a + b mod 2³²; numba's own sum of two words has 64 bits."""
    word = types.uint32
    return word(word, word), lambda context, builder, signature, words: builder.add(*words)


@as_intrinsic
def _rotate(context: Any, word: Any, bits: Any) -> Any:
    """The word rotated left."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word, bits = arguments
        low = builder.lshr(word, builder.sub(bits.type(32), bits))
        return builder.or_(builder.shl(word, bits), low)

    return types.uint32(types.uint32, types.uint32), code


@inlined
def _quarter(a: Any, b: Any, c: Any, d: Any) -> Any:
    """ChaCha's quarter round (Bernstein 2008, "ChaCha, a variant of Salsa20", section 2)."""
    a = _plus(a, b)
    d = _rotate(uint32(d ^ a), uint32(16))
    c = _plus(c, d)
    b = _rotate(uint32(b ^ c), uint32(12))
    a = _plus(a, b)
    d = _rotate(uint32(d ^ a), uint32(8))
    c = _plus(c, d)
    b = _rotate(uint32(b ^ c), uint32(7))
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
def _fill_words(key: Any, first: Any, words: Any) -> None:
    """Write ChaCha8's blocks `first` to `first` + 64: word w of block b to words[64·w + b].

    `first` is a multiple of 64. The nonce is 0 and the counter has 64 bits, as in Bernstein's own.
    """
    k0, k1, k2, k3, k4, k5, k6, k7 = key[0], key[1], key[2], key[3], key[4], key[5], key[6], key[7]
    s0, s1 = uint32(0x61707865), uint32(0x3320646E)  # "expand 32-byte k"
    s2, s3 = uint32(0x79622D32), uint32(0x6B206574)
    low, high, zero = uint32(first), uint32(first >> uint64(32)), uint32(0)
    for lane in range(_LANES):
        at = _plus(low, uint32(lane))
        a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p = _double_round(  # noqa: E741
            s0, s1, s2, s3, k0, k1, k2, k3, k4, k5, k6, k7, at, high, zero, zero)
        a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p = _double_round(  # noqa: E741
            a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p)
        a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p = _double_round(  # noqa: E741
            a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p)
        a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p = _double_round(  # noqa: E741
            a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p)
        words[0 * _LANES + lane], words[1 * _LANES + lane] = _plus(a, s0), _plus(b, s1)
        words[2 * _LANES + lane], words[3 * _LANES + lane] = _plus(c, s2), _plus(d, s3)
        words[4 * _LANES + lane], words[5 * _LANES + lane] = _plus(e, k0), _plus(f, k1)
        words[6 * _LANES + lane], words[7 * _LANES + lane] = _plus(g, k2), _plus(h, k3)
        words[8 * _LANES + lane], words[9 * _LANES + lane] = _plus(i, k4), _plus(j, k5)
        words[10 * _LANES + lane], words[11 * _LANES + lane] = _plus(k, k6), _plus(l, k7)
        words[12 * _LANES + lane], words[13 * _LANES + lane] = _plus(m, at), _plus(n, high)
        words[14 * _LANES + lane], words[15 * _LANES + lane] = o, p
# fmt: on


@inlined
def _radius(word: Any) -> Any:
    """√(-2 ln u) of the uniform u = (word + ½)·2⁻³² in (0, 1].

    u = 2ᵉ·m with √½ ≤ m < √2, and ln m by Cephes' `logf`, within 2 units in the last place.
    """
    u = _fused(float32(uint32(word)), float32(2.0**-32), float32(2.0**-33))
    bits = np.float32(u).view(np.int32)
    exponent = int32(int32(bits - int32(_SQRT_HALF)) >> int32(23))
    x = np.int32(int32(bits - int32(exponent << int32(23)))).view(np.float32) - float32(1)  # m - 1
    p = _fused(float32(7.0376836292e-2), x, float32(-1.1514610310e-1))
    p = _fused(p, x, float32(1.1676998740e-1))
    p = _fused(p, x, float32(-1.2420140846e-1))
    p = _fused(p, x, float32(1.4249322787e-1))
    p = _fused(p, x, float32(-1.6668057665e-1))
    p = _fused(p, x, float32(2.0000714765e-1))
    p = _fused(p, x, float32(-2.4999993993e-1))
    p = _fused(p, x, float32(3.3333331174e-1))
    square = x * x
    rest = _fused(float32(p * x), square, float32(-0.5) * square)  # ln m = x - x²/2 + x³·p
    log_u = _fused(
        float32(exponent),
        float32(_LN2_HIGH),
        x + _fused(float32(exponent), float32(_LN2_LOW), rest),
    )
    return np.sqrt(float32(-2) * log_u)


@inlined
def _flip_sign(number: Any, sign: Any) -> Any:
    """The float32 number, negated if `sign` is 2³¹ and not 0."""
    return np.uint32(uint32(np.float32(number).view(np.uint32) ^ sign)).view(np.float32)


@inlined
def _cosine_and_sine(word: Any) -> Any:
    """Cosine and sine of π·word/2³¹, `word` taken as a signed number, within 1.5e-7.

    The angle is a number of quarter turns, in the two highest bits of `quarters`, plus at most an
    eighth of a turn, for which Cephes' `sinf` and `cosf` are made.
    """
    quarters = uint32(_plus(uint32(word), uint32(0x20000000)) & uint32(0xC0000000))
    angle = float32(int32(uint32(word) - quarters)) * float32(math.pi * 2.0**-31)
    square = angle * angle
    sine = _fused(float32(-1.9515295891e-4), square, float32(8.3321608736e-3))
    sine = _fused(_fused(sine, square, float32(-1.6666654611e-1)), float32(square * angle), angle)
    cosine = _fused(float32(2.443315711809948e-5), square, float32(-1.388731625493765e-3))
    cosine = _fused(cosine, square, float32(4.166664568298827e-2))
    cosine = _fused(cosine, float32(square * square), _fused(float32(-0.5), square, float32(1)))
    odd = uint32(quarters & uint32(0x40000000)) != uint32(0)
    along, across = sine if odd else cosine, cosine if odd else sine
    of_along = uint32(
        (quarters ^ _plus(quarters, quarters)) & uint32(_SIGN)
    )  # of an odd quarter or back, not of both
    return _flip_sign(along, of_along), _flip_sign(across, uint32(quarters & uint32(_SIGN)))


@njit(error_model="numpy")
def _add_pairs(key: Any, out: Any, std: Any, times: Any, start: Any, stop: Any) -> None:
    """Add pairs `start` to `stop`; `start` is a multiple of `GROUP`."""
    use_wide_vectors()
    words, half = np.empty(2 * GROUP, np.uint32), (len(out) + 1) // 2
    for first in range(start, stop, GROUP):
        last = min(first + GROUP, stop)
        _fill_words(key, uint64(first // GROUP * _LANES), words)
        radii, angles = words[:GROUP], words[GROUP:]
        # The last pair of an odd n is one number only.
        here, there = out[first:last], out[half + first : half + last]
        for i in range(len(there)):
            radius = _radius(radii[i]) * std
            cosine, sine = _cosine_and_sine(angles[i])
            here[i] = _fused(cosine, radius, here[i]) * times
            there[i] = _fused(sine, radius, there[i]) * times
        for i in range(len(there), len(here)):
            radius = _radius(radii[i]) * std
            here[i] = _fused(_cosine_and_sine(angles[i])[0], radius, here[i]) * times


def _add_stream(work: Any) -> None:
    """Add a stream. Arguments: key (4), address and length of `out`, std, times."""
    use_wide_vectors()
    key = np.empty(8, np.uint32)
    for i in range(4):
        word = work[ARGUMENTS + i]
        key[2 * i], key[2 * i + 1] = uint32(word), uint32(word >> 32)
    out = carray(float32_at(work[ARGUMENTS + 4]), (work[ARGUMENTS + 5],))
    std = np.uint32(work[ARGUMENTS + 6]).view(np.float32)
    times = np.uint32(work[ARGUMENTS + 7]).view(np.float32)
    pairs = (len(out) + 1) // 2
    chunk = first_chunk(work)
    while chunk >= 0:
        start = chunk * CHUNK
        _add_pairs(key, out, std, times, start, min(start + CHUNK, pairs))
        chunk = next_chunk(work)


@cache
def _loop() -> CompiledLoop:
    return compile_loop(_add_stream)


def add_normals(key: bytes, out: torch.Tensor, std: float, times: float = 1.0) -> None:
    """See `privacy.normal_stream.add_normals`."""
    numbers = out.numel() * (2 if out.is_complex() else 1)
    bits = (int.from_bytes(struct.pack("<f", number), "little") for number in (std, times))
    words = [*struct.unpack("<4q", key), out.data_ptr(), numbers, *bits]
    _loop().run(-(-numbers // (2 * CHUNK)), words)
