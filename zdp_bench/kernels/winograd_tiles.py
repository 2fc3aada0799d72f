"""Compiled loops of `winograd.py`: maps are taken apart into tiles, and put together again, in a thread's cache.

Maps are real [B, H, W, 2C], complex channels interleaved. A tile of outputs is 2×2 positions, and meets 4×4 of the input; those
beyond a map's edges are zero. Transformed, each is 16 vectors of channels, one for every entry f of a 4×4 square:

    convolve     y of every tile: inputs transformed, 16 products of matrices [tiles, C]·[C, O], and transformed back
    correlate    the weight's gradient: m[f, c, o] = Σ_tiles z̄·g of the transformed inputs and output gradients, of every part of
                 a group of tiles, and then the parts' sum, transformed back
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, njit, types

from zdp_bench.kernels.jit import (
    begin,
    counted,
    float32_at,
    float64_at,
    int64_at,
    next_share,
    sum_of_squares,
    wide_vectors,
)
from zdp_bench.kernels.simd import (
    FLOATS,
    LANES,
    WORDS,
    ZEROS,
    at,
    everywhere,
    foreseen,
    further,
    fused,
    load,
    repeated,
    steps,
    store,
    tile,
    turned,
)

PANEL = 2 * LANES  # real numbers of an output position that are computed together
VECTORS = PANEL // LANES
HELD = 60  # tiles that a thread transforms before it multiplies them: in its cache, and whole ones of a product
POSITIONS = 6  # of those, that a product takes at once: 24 sums are held in registers
CHANNELS = 4  # of a weight's gradient, likewise: 16 sums
TOGETHER = 8  # channels whose gradients are folded together: a stretch of memory for every output


# ------------------------------------------------------------------------------------------------------------- in registers

Piece = Callable[[Any, list[Any]], list[Any]]  # one of the transforms, of one row or column


def of_input(b: Any, d: list[Any]) -> list[Any]:
    """Bᵀd."""
    return [b.fsub(d[0], d[2]), b.fadd(d[1], d[2]), b.fsub(d[2], d[1]), b.fsub(d[1], d[3])]


def to_outputs(b: Any, m: list[Any]) -> list[Any]:
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


def both_ways(b: Any, piece: Piece, numbers: list[Any]) -> list[Any]:
    """The columns of a square, which is given row by row, transformed; and then the rows."""
    side = math.isqrt(len(numbers))
    columns = [piece(b, numbers[j::side]) for j in range(side)]
    return [number for row in zip(*columns, strict=True) for number in piece(b, list(row))]


def _places(b: Any, places: Any, count: int) -> list[Any]:
    return [b.inttoptr(b.load(at(b, places, i)), ir.FloatType().as_pointer()) for i in range(count)]


def _transforming(piece: Piece, count: int) -> Callable[..., None]:
    """to[f·step] of 16 transformed numbers f, of every channel, from a tile of `count` positions."""

    def code(b: Any, places: Any, vectors: Any, to: Any, step: Any) -> None:
        sources = _places(b, places, count)
        targets = steps(b, to, step, 16)

        def transform(i: Any, nothing: list[Any]) -> list[Any]:
            channel = b.mul(i, i.type(LANES))
            met = [load(b, at(b, source, channel)) for source in sources]
            for target, vector in zip(targets, both_ways(b, piece, met), strict=True):
                store(b, vector, at(b, target, channel))
            return nothing

        repeated(b, vectors, [], transform)

    return tile([WORDS, types.int64, FLOATS, types.int64], code)


def _finishing(b: Any, m: Any, step: Any, bias: Any, places: Any, first: Any) -> None:
    """A tile of 2×2 outputs, of a panel of channels from the `first`, of 16 sums m[f·step]."""
    sources = steps(b, m, step, 16)
    targets = [at(b, place, first) for place in _places(b, places, 4)]

    def finish(i: Any, nothing: list[Any]) -> list[Any]:
        channel = b.mul(i, i.type(LANES))
        start = load(b, at(b, bias, channel))
        outputs = both_ways(b, to_outputs, [load(b, at(b, source, channel)) for source in sources])
        for target, vector in zip(targets, outputs, strict=True):
            store(b, b.fadd(vector, start), at(b, target, channel))
        return nothing

    repeated(b, first.type(VECTORS), [], finish)


def _multiplying(b: Any, z: Any, channels: Any, w: Any, step: Any, y: Any, ahead: Any) -> None:
    """y[p, :] = Σ_c z[p·step + c]·w[c, :], complex, for a panel of outputs and `POSITIONS` positions p.

    What the real parts of z make of w, and the imaginary ones, are summed apart: y is the one and i times the other. Meanwhile
    as many lines of memory as there are channels come to the cache, from `ahead` on.
    """
    sources = steps(b, z, step, POSITIONS)

    def add_channel(c: Any, sums: list[Any]) -> list[Any]:
        row = [load(b, at(b, w, b.mul(c, c.type(PANEL)), LANES * v)) for v in range(VECTORS)]
        parts = [
            at(b, source, b.mul(c, c.type(2)), part) for source in sources for part in range(2)
        ]
        met = [everywhere(b, b.load(part)) for part in parts]
        foreseen(b, at(b, ahead, b.mul(c, c.type(LANES))))
        return [
            fused(b, number, row[v], sums[n * VECTORS + v])
            for n, number in enumerate(met)
            for v in range(VECTORS)
        ]

    sums = repeated(b, channels, [ZEROS] * (2 * VECTORS * POSITIONS), add_channel)
    for p, target in enumerate(steps(b, y, PANEL, POSITIONS)):
        real, imaginary = sums[2 * p * VECTORS :][:VECTORS], sums[(2 * p + 1) * VECTORS :][:VECTORS]
        for v in range(VECTORS):
            store(b, b.fadd(real[v], turned(b, imaginary[v])), at(b, target, LANES * v))


def _correlating(first: bool) -> Callable[..., None]:
    """m[c, :] += Σ_n z̄[n·step + c]·g[n·apart], complex, over `count` tiles n, for `CHANNELS` channels c and a panel of outputs;
    m = Σ of the `first` tiles."""

    def code(b: Any, z: Any, step: Any, g: Any, apart: Any, count: Any, m: Any, lanes: Any) -> None:
        def add_tile(n: Any, sums: list[Any]) -> list[Any]:
            row = [load(b, at(b, g, b.mul(n, apart), LANES * v)) for v in range(VECTORS)]
            met = [
                everywhere(b, b.load(at(b, z, b.mul(n, step), part)))
                for part in range(2 * CHANNELS)
            ]
            return [
                fused(b, number, row[v], sums[k * VECTORS + v])
                for k, number in enumerate(met)
                for v in range(VECTORS)
            ]

        sums = repeated(b, count, [ZEROS] * (2 * VECTORS * CHANNELS), add_tile)
        for c, target in enumerate(steps(b, m, lanes, CHANNELS)):
            real, imaginary = (
                sums[2 * c * VECTORS :][:VECTORS],
                sums[(2 * c + 1) * VECTORS :][:VECTORS],
            )
            for v in range(VECTORS):
                place, product = at(b, target, LANES * v), b.fsub(real[v], turned(b, imaginary[v]))
                store(b, product if first else b.fadd(load(b, place), product), place)

    return tile([FLOATS, types.int64, FLOATS, types.int64, types.int64, FLOATS, types.int64], code)


def _folding(b: Any, m: Any, step: Any, parts: Any, apart: Any, to: Any) -> None:
    """to[t, :] of the 9 entries t of a filter: of the sums m[f·step] over parts, which are `apart`. One channel, 8 outputs."""
    sources = steps(b, m, step, 16)

    def add_part(i: Any, sums: list[Any]) -> list[Any]:
        return [
            b.fadd(sum_, load(b, at(b, source, b.mul(i, apart))))
            for sum_, source in zip(sums, sources, strict=True)
        ]

    sums = repeated(b, parts, [ZEROS] * 16, add_part)
    for t, vector in enumerate(both_ways(b, _to_filter, sums)):
        store(b, vector, at(b, to, LANES * t))


_correlate_first, _correlate_further = _correlating(True), _correlating(False)
_fold = tile([FLOATS, types.int64, types.int64, types.int64, FLOATS], _folding)
_multiply = tile([FLOATS, types.int64, FLOATS, types.int64, FLOATS, FLOATS], _multiplying)
_transform_input, _transform_gradient = _transforming(of_input, 16), _transforming(_of_gradient, 4)
_finish = tile([FLOATS, types.int64, FLOATS, WORDS, types.int64], _finishing)


# ---------------------------------------------------------------------------------------------------------------- over maps


@njit
def _corner(n: Any, height: Any, width: Any) -> Any:
    """The record of the n-th tile, and the row and column of its first output, of outputs of this size."""
    columns = (width + 1) // 2
    tiles = (height + 1) // 2 * columns
    return n // tiles, 2 * (n % tiles // columns), 2 * (n % tiles % columns)


@njit
def _find(
    places: Any,
    side: Any,
    map_: Any,
    top: Any,
    left: Any,
    height: Any,
    width: Any,
    reals: Any,
    outside: Any,
) -> None:
    """Where the positions of a tile lie, of a map whose first number is at `map_`; of those beyond its edges, `outside`."""
    for i in range(side):
        for j in range(side):
            row, column = top + i, left + j
            within = 0 <= row < height and 0 <= column < width
            places[side * i + j] = map_ + 4 * (row * width + column) * reals if within else outside


@njit
def _whole_lines(numbers: Any) -> Any:
    """The place in an array, of 16 numbers too many, where a line of the cache begins."""
    return numbers.ctypes.data + -numbers.ctypes.data % (4 * LANES)


def convolve(task: Any) -> None:
    """y of every tile; a share is some tiles, and a slice of outputs."""
    wide_vectors()
    notes = begin(task)
    places = np.zeros(16, np.int64)
    where = int64_at(places.ctypes.data)
    held = summed = nothing = beyond = np.zeros(0, np.float32)
    while True:
        at, share = next_share(task, notes)
        if at < 0:
            break
        x, w, bias, y, reals, lanes = (
            task[at],
            task[at + 1],
            task[at + 2],
            task[at + 3],
            task[at + 4],
            task[at + 5],
        )
        down, across, top, left, height = (
            task[at + 6],
            task[at + 7],
            task[at + 8],
            task[at + 9],
            task[at + 10],
        )
        width, every, shares, room, slices = (
            task[at + 11],
            task[at + 12],
            task[at + 13],
            task[at + 14],
            task[at + 15],
        )
        own = lanes // slices  # numbers of a slice
        output, share = share % slices * own, share // slices
        step, apart = (
            room * reals + LANES,
            room * own + LANES,
        )  # the 16 do not lie a power of two apart
        if len(held) == 0:
            held, summed = (
                np.empty(16 * step + LANES, np.float32),
                np.empty(16 * apart + LANES, np.float32),
            )
            nothing, beyond = np.zeros(reals, np.float32), np.zeros(own, np.float32)
        met, sums = _whole_lines(held), _whole_lines(summed)
        products = (every + POSITIONS - 1) // POSITIONS
        first = share * products // shares * POSITIONS
        last = min((share + 1) * products // shares * POSITIONS, every)
        for n in range(first, last):
            record, row, column = _corner(n, height, width)
            map_ = x + 4 * record * down * across * reals
            _find(
                places, 4, map_, row - top, column - left, down, across, reals, nothing.ctypes.data
            )
            _transform_input(where, reals // LANES, float32_at(met + 4 * (n - first) * reals), step)
        count = max(last - first, POSITIONS)
        for f in range(16):
            for v in range(0, own, PANEL):
                of_panel = w + 2 * reals * (f * lanes + output + v)
                following = of_panel + 2 * reals * (
                    PANEL if v + PANEL < own else lanes - own + PANEL
                )
                for first_of in range(0, count, POSITIONS):
                    n = min(first_of, count - POSITIONS)
                    source = met + 4 * (f * step + n * reals)
                    target = float32_at(sums + 4 * (f * apart + v * room + n * PANEL))
                    # The panel to come is fetched while this one meets its first tiles, half with either product.
                    ahead = (
                        following + reals * PANEL * (first_of // POSITIONS)
                        if first_of <= POSITIONS
                        else source
                    )
                    _multiply(
                        float32_at(source),
                        reals // 2,
                        float32_at(of_panel),
                        reals,
                        target,
                        float32_at(ahead),
                    )
        for n in range(first, last):
            record, row, column = _corner(n, height, width)
            map_ = y + 4 * (record * height * width * lanes + output)
            _find(places, 2, map_, row, column, height, width, lanes, beyond.ctypes.data)
            for v in range(0, own, PANEL):
                of_tile = float32_at(sums + 4 * (v * room + (n - first) * PANEL))
                _finish(of_tile, apart, further(float32_at(bias), output + v), where, v)


def correlate(task: Any) -> None:
    """A group's gradient of the weight, complex [group, O, C, 3, 3]; a share is a part of its tiles, and a slice of channels and
    of outputs. Who finishes the last part of a slice folds it: in the cache, where there is but one."""
    wide_vectors()
    notes = begin(task)
    places, folded = np.zeros(16, np.int64), np.zeros(9 * LANES, np.float32)
    where = int64_at(places.ctypes.data)
    held = laid = made = nothing = np.zeros(0, np.float32)
    while True:
        at, share = next_share(task, notes)
        if at < 0:
            break
        x, g, m, done, to, reals, lanes = (
            task[at],
            task[at + 1],
            task[at + 2],
            task[at + 3],
            task[at + 4],
            task[at + 5],
            task[at + 6],
        )
        down, across, top, left, height = (
            task[at + 7],
            task[at + 8],
            task[at + 9],
            task[at + 10],
            task[at + 11],
        )
        width, a_group, parts, slices, others = (
            task[at + 12],
            task[at + 13],
            task[at + 14],
            task[at + 15],
            task[at + 16],
        )
        room = task[at + 17]  # for tiles that are transformed before any is multiplied
        squares = float64_at(task[at + 18])
        own, whose = reals // slices, lanes // others  # numbers of a slice
        step, apart, plane = room * own + LANES, room * whose + LANES, own // 2 * whose + LANES
        if len(held) == 0:
            held, laid = (
                np.empty(16 * step + LANES, np.float32),
                np.empty(16 * apart + LANES, np.float32),
            )
            made = np.empty(16 * plane + LANES if parts == 1 else 0, np.float32)
            nothing = np.zeros(max(own, whose), np.float32)
        met, gradients = _whole_lines(held), _whole_lines(laid)
        part, slice_ = share % parts, share // parts
        group, channel, output = (
            slice_ // (slices * others),
            slice_ // others % slices * own,
            slice_ % others * whose,
        )
        of_slice = _whole_lines(made) if parts == 1 else m + 4 * slice_ * parts * 16 * plane
        sums, start = of_slice + 4 * part * 16 * plane, group * a_group
        first_of, end = start + a_group * part // parts, start + a_group * (part + 1) // parts
        for first in range(first_of, end, room):
            last = min(first + room, end)
            for n in range(first, last):
                record, row, column = _corner(n, height, width)
                map_ = x + 4 * (record * down * across * reals + channel)
                _find(
                    places,
                    4,
                    map_,
                    row - top,
                    column - left,
                    down,
                    across,
                    reals,
                    nothing.ctypes.data,
                )
                _transform_input(where, own // LANES, float32_at(met + 4 * (n - first) * own), step)
                map_ = g + 4 * (record * height * width * lanes + output)
                _find(places, 2, map_, row, column, height, width, lanes, nothing.ctypes.data)
                _transform_gradient(
                    where, whose // LANES, float32_at(gradients + 4 * (n - first) * whose), apart
                )
            for f in range(16):
                for v in range(0, whose, PANEL):
                    of_panel = float32_at(gradients + 4 * (f * apart + v))
                    for c in range(0, own, 2 * CHANNELS):
                        target = float32_at(sums + 4 * (f * plane + c // 2 * whose + v))
                        source = float32_at(met + 4 * (f * step + c))
                        if first == first_of:
                            _correlate_first(
                                source, own, of_panel, whose, last - first, target, whose
                            )
                        else:
                            _correlate_further(
                                source, own, of_panel, whose, last - first, target, whose
                            )
        if parts == 1 or counted(int64_at(done), slice_, 1) == parts - 1:
            of_output = 9 * reals // 2  # complex numbers
            target = to + 8 * ((group * lanes // 2 + output // 2) * of_output + channel // 2 * 9)
            sizes = own // 2, whose // 2, of_output
            squares[slice_] = _fold_slice(of_slice, plane, parts, sizes, folded.ctypes.data, target)


@njit
def _fold_slice(m: Any, plane: Any, parts: Any, sizes: Any, folded: Any, to: Any) -> Any:
    """Σ_parts complex [part, 16, channels, outputs] -> [outputs, channels, 3, 3], where an output has `of_output` numbers in all;
    and what it adds to the squared norm."""
    wide_vectors()
    channels, outputs, of_output = sizes
    squares = 0.0
    numbers = int64_at(folded)  # complex ones are moved whole
    for first in range(0, channels, TOGETHER):
        for o in range(0, outputs, LANES // 2):
            for c in range(first, first + TOGETHER):
                source = float32_at(m + 8 * (c * outputs + o))
                _fold(source, plane, parts, 16 * plane, float32_at(folded))
                squares += sum_of_squares(carray(float32_at(folded), (9 * LANES,)))
                for output in range(LANES // 2):
                    target = int64_at(to + 8 * ((o + output) * of_output + c * 9))
                    for t in range(9):
                        target[t] = numbers[t * (LANES // 2) + output]
    return squares
