"""The compiled loops of `winograd.py`.

They transform maps tile by tile in a core's cache. Maps are real
[B, H, W, 2C], complex channels interleaved. A tile of 2×2 outputs meets 4×4 inputs; those beyond a
map's edges are zero. Transformed, it is 16 vectors of channels, one for each entry f of a 4×4
square:

    convolve     the outputs of every tile: transform, 16 products [tiles, C]·[C, O], transform back
    correlate    the weight's gradient: m[f, c, o] = Σ_tiles z̄·g of transformed inputs and output
                 gradients in each part of the tiles; then the parts' sum, transformed back
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types

from zdp_bench.kernels.jit import (
    ARGUMENTS,
    FLOATS,
    LANES,
    WORDS,
    ZEROS,
    add_atomically,
    advance,
    as_function,
    broadcast,
    first_chunk,
    float32_at,
    float64_at,
    fused,
    int64_at,
    load,
    next_chunk,
    offset,
    prefetch,
    repeat,
    store,
    strided,
    times_i,
    use_wide_vectors,
)
from zdp_bench.kernels.winograd import PANEL, POSITIONS

VECTORS = PANEL // LANES
CHANNELS = 4  # of a weight's gradient that a product takes at once: 16 sums are held in registers
TOGETHER = 8  # channels whose gradients are folded together: a stretch of memory for every output


# ---------------------------------------------------------------------------------- in registers

Transform = Callable[[Any, list[Any]], list[Any]]  # of one row or column


def _of_input(b: Any, d: list[Any]) -> list[Any]:
    """Bᵀd."""
    return [b.fsub(d[0], d[2]), b.fadd(d[1], d[2]), b.fsub(d[2], d[1]), b.fsub(d[1], d[3])]


def _to_outputs(b: Any, m: list[Any]) -> list[Any]:
    """Aᵀm."""
    return [b.fadd(b.fadd(m[0], m[1]), m[2]), b.fsub(b.fsub(m[1], m[2]), m[3])]


def _of_gradient(b: Any, g: list[Any]) -> list[Any]:
    """A g."""
    return [g[0], b.fadd(g[0], g[1]), b.fsub(g[0], g[1]), b.fneg(g[1])]


def _to_filter(b: Any, m: list[Any]) -> list[Any]:
    """Gᵀm."""
    half = ir.Constant(m[0].type, [0.5] * LANES)
    sum_, difference = b.fmul(b.fadd(m[1], m[2]), half), b.fmul(b.fsub(m[1], m[2]), half)
    return [b.fadd(m[0], sum_), difference, b.fadd(m[3], sum_)]


def _transform_square(b: Any, transform: Transform, numbers: list[Any]) -> list[Any]:
    """Transform the columns of a square, which is given row by row, and then its rows."""
    side = math.isqrt(len(numbers))
    columns = [transform(b, numbers[j::side]) for j in range(side)]
    return [number for row in zip(*columns, strict=True) for number in transform(b, list(row))]


def _pointers(b: Any, places: Any, count: int) -> list[Any]:
    pointer = ir.FloatType().as_pointer()
    return [b.inttoptr(b.load(offset(b, places, i)), pointer) for i in range(count)]


def _transforming(transform: Transform, count: int) -> Callable[..., None]:
    """to[f·step] of 16 transformed numbers f of every channel, from a tile of `count` positions."""

    def code(b: Any, places: Any, vectors: Any, to: Any, step: Any) -> None:
        sources, targets = _pointers(b, places, count), strided(b, to, step, 16)

        def transform_vector(i: Any, nothing: list[Any]) -> list[Any]:
            channel = b.mul(i, i.type(LANES))
            numbers = [load(b, offset(b, source, channel)) for source in sources]
            for target, vector in zip(
                targets, _transform_square(b, transform, numbers), strict=True
            ):
                store(b, vector, offset(b, target, channel))
            return nothing

        repeat(b, vectors, [], transform_vector)

    return as_function([WORDS, types.int64, FLOATS, types.int64], code)


def _finishing(b: Any, m: Any, step: Any, bias: Any, places: Any, first: Any) -> None:
    """A tile of 2×2 outputs, for a panel of channels from `first`, of 16 sums m[f·step]."""
    sources = strided(b, m, step, 16)
    targets = [offset(b, pointer, first) for pointer in _pointers(b, places, 4)]

    def finish(i: Any, nothing: list[Any]) -> list[Any]:
        channel = b.mul(i, i.type(LANES))
        start = load(b, offset(b, bias, channel))
        sums = [load(b, offset(b, source, channel)) for source in sources]
        for target, vector in zip(targets, _transform_square(b, _to_outputs, sums), strict=True):
            store(b, b.fadd(vector, start), offset(b, target, channel))
        return nothing

    repeat(b, first.type(VECTORS), [], finish)


def _add_products(b: Any, numbers: list[Any], row: list[Any], sums: list[Any]) -> list[Any]:
    """sums[n, v] + numbers[n]·row[v], the number in every lane."""
    every = [broadcast(b, number) for number in numbers]
    pairs = [(number, vector) for number in every for vector in row]
    return [fused(b, *pair, sum_) for pair, sum_ in zip(pairs, sums, strict=True)]


def _multiplying(b: Any, z: Any, channels: Any, w: Any, step: Any, y: Any, ahead: Any) -> None:
    """y[p, :] = Σ_c z[p·step + c]·w[c, :], complex, of a panel of outputs and `POSITIONS` p.

    Products of the real parts of z and of the imaginary ones are summed apart: y is the first plus
    i times the second. Meanwhile one cache line for each channel is prefetched, from `ahead` on.
    """
    sources = strided(b, z, step, POSITIONS)

    def add_channel(c: Any, sums: list[Any]) -> list[Any]:
        row = [load(b, offset(b, w, b.mul(c, c.type(PANEL)), LANES * v)) for v in range(VECTORS)]
        index = b.mul(c, c.type(2))
        numbers = [b.load(offset(b, source, index, part)) for source in sources for part in (0, 1)]
        prefetch(b, offset(b, ahead, b.mul(c, c.type(LANES))))
        return _add_products(b, numbers, row, sums)

    sums = repeat(b, channels, [ZEROS] * (2 * VECTORS * POSITIONS), add_channel)
    for p, target in enumerate(strided(b, y, PANEL, POSITIONS)):
        real, imaginary = sums[2 * p * VECTORS :][:VECTORS], sums[(2 * p + 1) * VECTORS :][:VECTORS]
        for v in range(VECTORS):
            store(b, b.fadd(real[v], times_i(b, imaginary[v])), offset(b, target, LANES * v))


def _correlating(first: bool) -> Callable[..., None]:
    """m[c, :] += Σ_n z̄[n·step + c]·g[n·apart], complex, over `count` tiles n.

    For `CHANNELS` channels c and a panel of outputs. `first`: m is overwritten.
    """

    def code(b: Any, z: Any, step: Any, g: Any, apart: Any, count: Any, m: Any, lanes: Any) -> None:
        def add_tile(n: Any, sums: list[Any]) -> list[Any]:
            row = [load(b, offset(b, g, b.mul(n, apart), LANES * v)) for v in range(VECTORS)]
            source = offset(b, z, b.mul(n, step))
            numbers = [b.load(offset(b, source, part)) for part in range(2 * CHANNELS)]
            return _add_products(b, numbers, row, sums)

        sums = repeat(b, count, [ZEROS] * (2 * VECTORS * CHANNELS), add_tile)
        for c, target in enumerate(strided(b, m, lanes, CHANNELS)):
            real = sums[2 * c * VECTORS :][:VECTORS]
            imaginary = sums[(2 * c + 1) * VECTORS :][:VECTORS]
            for v in range(VECTORS):
                place = offset(b, target, LANES * v)
                product = b.fsub(real[v], times_i(b, imaginary[v]))
                store(b, product if first else b.fadd(load(b, place), product), place)

    return as_function(
        [FLOATS, types.int64, FLOATS, types.int64, types.int64, FLOATS, types.int64], code
    )


def _folding(b: Any, m: Any, step: Any, parts: Any, apart: Any, to: Any) -> None:
    """to[t, :] of a filter's 9 entries t, from m[f·step] summed over parts that are `apart`.

    Of one channel and 8 outputs.
    """
    sources = strided(b, m, step, 16)

    def add_part(i: Any, sums: list[Any]) -> list[Any]:
        numbers = [load(b, offset(b, source, b.mul(i, apart))) for source in sources]
        return [b.fadd(sum_, number) for sum_, number in zip(sums, numbers, strict=True)]

    sums = repeat(b, parts, [ZEROS] * 16, add_part)
    for t, vector in enumerate(_transform_square(b, _to_filter, sums)):
        store(b, vector, offset(b, to, LANES * t))


_correlate_first, _correlate_next = _correlating(True), _correlating(False)
_fold = as_function([FLOATS, types.int64, types.int64, types.int64, FLOATS], _folding)
_multiply = as_function([FLOATS, types.int64, FLOATS, types.int64, FLOATS, FLOATS], _multiplying)
_transform_input, _transform_gradient = _transforming(_of_input, 16), _transforming(_of_gradient, 4)
_finish = as_function([FLOATS, types.int64, FLOATS, WORDS, types.int64], _finishing)


# ------------------------------------------------------------------------------------- over maps


@njit
def _corner(n: Any, height: Any, width: Any) -> Any:
    """(example, row, column) of the first output of the n-th tile, for outputs of this size."""
    columns = (width + 1) // 2
    tiles = (height + 1) // 2 * columns
    return n // tiles, 2 * (n % tiles // columns), 2 * (n % tiles % columns)


@njit
def _find(
    places: Any, side: Any, map_: Any, corner: Any, size: Any, reals: Any, outside: Any
) -> None:
    """Write the addresses of a tile's positions in a map; `outside` for those beyond its edges."""
    (top, left), (height, width) = corner, size
    for i in range(side):
        for j in range(side):
            row, column = top + i, left + j
            inside = 0 <= row < height and 0 <= column < width
            place = map_ + 4 * (row * width + column) * reals
            places[side * i + j] = place if inside else outside


@njit
def _aligned(numbers: Any) -> Any:
    """The address in an array, which has 16 numbers too many, where a cache line begins."""
    return numbers.ctypes.data + -numbers.ctypes.data % (4 * LANES)


def convolve(work: Any) -> None:
    """The outputs of every tile; a chunk is some tiles and a slice of the outputs."""
    use_wide_vectors()
    x, w, bias, y = work[ARGUMENTS], work[ARGUMENTS + 1], work[ARGUMENTS + 2], work[ARGUMENTS + 3]
    reals, lanes = work[ARGUMENTS + 4], work[ARGUMENTS + 5]
    size = work[ARGUMENTS + 6], work[ARGUMENTS + 7]
    top, left = work[ARGUMENTS + 8], work[ARGUMENTS + 9]
    height, width = work[ARGUMENTS + 10], work[ARGUMENTS + 11]
    tiles, chunks = work[ARGUMENTS + 12], work[ARGUMENTS + 13]
    held, slices = work[ARGUMENTS + 14], work[ARGUMENTS + 15]
    own = lanes // slices  # numbers of a slice
    # The 16 matrices are not a power of two apart, or they would share cache sets.
    step, apart = held * reals + LANES, held * own + LANES
    transformed = np.empty(16 * step + LANES, np.float32)
    summed = np.empty(16 * apart + LANES, np.float32)
    places, zeros, beyond = (
        np.zeros(16, np.int64),
        np.zeros(reals, np.float32),
        np.zeros(own, np.float32),
    )
    products = (tiles + POSITIONS - 1) // POSITIONS
    chunk = first_chunk(work)
    while chunk >= 0:
        # In here, so that numba keeps the arrays.
        met, sums, where = _aligned(transformed), _aligned(summed), int64_at(places.ctypes.data)
        output, part = chunk % slices * own, chunk // slices
        first = part * products // chunks * POSITIONS
        last = min((part + 1) * products // chunks * POSITIONS, tiles)
        for n in range(first, last):
            example, row, column = _corner(n, height, width)
            map_, corner = x + 4 * example * size[0] * size[1] * reals, (row - top, column - left)
            _find(places, 4, map_, corner, size, reals, zeros.ctypes.data)
            _transform_input(where, reals // LANES, float32_at(met + 4 * (n - first) * reals), step)
        count = max(last - first, POSITIONS)
        for f in range(16):
            for v in range(0, own, PANEL):
                panel = w + 2 * reals * (f * lanes + output + v)
                following = panel + 2 * reals * (PANEL if v + PANEL < own else lanes - own + PANEL)
                for start in range(0, count, POSITIONS):
                    n = min(start, count - POSITIONS)
                    source = met + 4 * (f * step + n * reals)
                    target = float32_at(sums + 4 * (f * apart + v * held + n * PANEL))
                    # The first two products prefetch half of the next panel each.
                    half = following + reals * PANEL * (start // POSITIONS)
                    ahead = float32_at(half if start <= POSITIONS else source)
                    _multiply(
                        float32_at(source), reals // 2, float32_at(panel), reals, target, ahead
                    )
        for n in range(first, last):
            example, row, column = _corner(n, height, width)
            map_ = y + 4 * (example * height * width * lanes + output)
            _find(places, 2, map_, (row, column), (height, width), lanes, beyond.ctypes.data)
            for v in range(0, own, PANEL):
                tile = float32_at(sums + 4 * (v * held + (n - first) * PANEL))
                _finish(tile, apart, advance(float32_at(bias), output + v), where, v)
        chunk = next_chunk(work)


def correlate(work: Any) -> None:
    """A group's gradient of the weight, complex [group, O, C, 3, 3].

    A chunk is a part of the group's tiles and a slice of channels and of outputs. Whoever finishes
    the last part of a slice folds it: in the cache if there is only one.
    """
    use_wide_vectors()
    x, g, m, done = work[ARGUMENTS], work[ARGUMENTS + 1], work[ARGUMENTS + 2], work[ARGUMENTS + 3]
    to, reals, lanes = work[ARGUMENTS + 4], work[ARGUMENTS + 5], work[ARGUMENTS + 6]
    size = work[ARGUMENTS + 7], work[ARGUMENTS + 8]
    top, left = work[ARGUMENTS + 9], work[ARGUMENTS + 10]
    height, width = work[ARGUMENTS + 11], work[ARGUMENTS + 12]
    tiles, parts = work[ARGUMENTS + 13], work[ARGUMENTS + 14]
    slices, others = work[ARGUMENTS + 15], work[ARGUMENTS + 16]
    held, squares = work[ARGUMENTS + 17], float64_at(work[ARGUMENTS + 18])
    own, its_outputs = reals // slices, lanes // others  # numbers of a slice
    step, apart = held * own + LANES, held * its_outputs + LANES
    plane = own // 2 * its_outputs + LANES
    transformed = np.empty(16 * step + LANES, np.float32)
    of_gradients = np.empty(16 * apart + LANES, np.float32)
    summed = np.empty(16 * plane + LANES if parts == 1 else 0, np.float32)
    zeros = np.zeros(max(own, its_outputs), np.float32)
    places, folded = np.zeros(16, np.int64), np.zeros(9 * LANES, np.float32)
    chunk = first_chunk(work)
    while chunk >= 0:
        # In here, so that numba keeps the arrays.
        met, gradients = _aligned(transformed), _aligned(of_gradients)
        where = int64_at(places.ctypes.data)
        part, slice_ = chunk % parts, chunk // parts
        group, channel = slice_ // (slices * others), slice_ // others % slices * own
        output = slice_ % others * its_outputs
        of_slice = _aligned(summed) if parts == 1 else m + 4 * slice_ * parts * 16 * plane
        sums, start = of_slice + 4 * part * 16 * plane, group * tiles
        first_of, end = start + tiles * part // parts, start + tiles * (part + 1) // parts
        for first in range(first_of, end, held):
            last = min(first + held, end)
            for n in range(first, last):
                example, row, column = _corner(n, height, width)
                map_ = x + 4 * (example * size[0] * size[1] * reals + channel)
                corner = row - top, column - left
                _find(places, 4, map_, corner, size, reals, zeros.ctypes.data)
                _transform_input(where, own // LANES, float32_at(met + 4 * (n - first) * own), step)
                map_ = g + 4 * (example * height * width * lanes + output)
                _find(places, 2, map_, (row, column), (height, width), lanes, zeros.ctypes.data)
                target = float32_at(gradients + 4 * (n - first) * its_outputs)
                _transform_gradient(where, its_outputs // LANES, target, apart)
            count = last - first
            for f in range(16):
                for v in range(0, its_outputs, PANEL):
                    panel = float32_at(gradients + 4 * (f * apart + v))
                    for c in range(0, own, 2 * CHANNELS):
                        target = float32_at(sums + 4 * (f * plane + c // 2 * its_outputs + v))
                        source = float32_at(met + 4 * (f * step + c))
                        if first == first_of:
                            _correlate_first(
                                source, own, panel, its_outputs, count, target, its_outputs
                            )
                        else:
                            _correlate_next(
                                source, own, panel, its_outputs, count, target, its_outputs
                            )
        if parts == 1 or add_atomically(int64_at(done), slice_, 1) == parts - 1:
            an_output = 9 * reals // 2  # complex numbers
            target = to + 8 * ((group * lanes // 2 + output // 2) * an_output + channel // 2 * 9)
            sizes = own // 2, its_outputs // 2, an_output
            squares[slice_] = _fold_slice(of_slice, plane, parts, sizes, folded, target)
        chunk = next_chunk(work)


@njit
def _fold_slice(m: Any, plane: Any, parts: Any, sizes: Any, folded: Any, to: Any) -> Any:
    """Fold Σ_parts complex [part, 16, channels, outputs] to [outputs, channels, 3, 3].

    An output has `an_output` complex numbers in all. Returns what this adds to the squared norm.
    """
    use_wide_vectors()
    channels, outputs, an_output = sizes
    squares = 0.0
    numbers = int64_at(folded.ctypes.data)  # complex ones are moved whole
    for first in range(0, channels, TOGETHER):
        for o in range(0, outputs, LANES // 2):
            for c in range(first, first + TOGETHER):
                source = float32_at(m + 8 * (c * outputs + o))
                _fold(source, plane, parts, 16 * plane, float32_at(folded.ctypes.data))
                squares += _sum_of_squares(folded)
                for output in range(LANES // 2):
                    target = int64_at(to + 8 * ((o + output) * an_output + c * 9))
                    for t in range(9):
                        target[t] = numbers[t * (LANES // 2) + output]
    return squares


@njit(fastmath={"reassoc", "contract"}, error_model="numpy")
def _sum_of_squares(numbers: Any) -> Any:
    """Σ x² of float32 numbers, in float64 and in whatever order is fastest."""
    use_wide_vectors()
    total = 0.0
    for i in range(len(numbers)):
        x = types.float64(numbers[i])
        total += x * x
    return total
