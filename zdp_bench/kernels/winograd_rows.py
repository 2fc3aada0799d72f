"""A compiled loop of `few_channels.py`: 3×3 convolutions with 16 products where there are 36 (Winograd; see `winograd.py`).

Positions of few channels lie side by side in a vector, so tiles are transformed a row at a time: as sums of the row, and of the
same row one, two and three positions on. That gives one for every position, of which every other is a tile's.

Some tiles beside each other are a group: transformed, multiplied and transformed back in a thread's innermost cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types

from zdp_bench.kernels.jit import begin, float32_at, next_share, wide_vectors
from zdp_bench.kernels.simd import (
    FLOATS,
    LANES,
    ZEROS,
    at,
    copied,
    everywhere,
    foreseen,
    further,
    fused,
    load,
    load_first,
    repeated,
    steps,
    store,
    store_past,
    tile,
)
from zdp_bench.kernels.winograd_tiles import PANEL, VECTORS, both_ways, of_input, to_outputs

ROWS = 16  # of tiles, that are a thread's share
TILES = 6  # of a group: 12 sums are held in registers
A_PLANE = TILES * PANEL  # numbers of a group's sums of one kind


def _plane(reals: int) -> int:
    """Numbers that a group's transformed input of one kind has room for: whole vectors, else what is read of them waits."""
    return -(-_numbers(reals) // LANES) * LANES


def _numbers(reals: int) -> int:
    """Of a group's transformed input of one kind: of as many positions as lie from its first tile to its last."""
    return (2 * TILES - 1) * reals


_HELD = 16 * _plane(8)


def _transforming(reals: int) -> Callable[..., None]:
    """to[f, :] of 16 transformed numbers f of every position of a group."""

    def code(b: Any, x: Any, line: Any, to: Any) -> None:
        sources = [at(b, row, j * reals) for row in steps(b, x, line, 4) for j in range(4)]
        for number in range(0, _numbers(reals), LANES):
            left = ir.IntType(64)(_numbers(reals) - number)
            met = [load_first(b, at(b, source, number), left) for source in sources]
            for f, vector in enumerate(both_ways(b, of_input, met)):
                store(b, vector, at(b, to, f * _plane(reals) + number))

    return tile([FLOATS, types.int64, FLOATS], code)


def _multiplying(reals: int, past: bool) -> Callable[..., None]:
    """Products, and half of the way back in registers, for the tiles p of a group and a panel of outputs:

        m[k, j, p, :] = Σ_s z[k, j, 2p·reals + s]·w[k, j, s, :]
        h[k, 0] = m[k, 0] + m[k, 1] + m[k, 2]     h[k, 1] = m[k, 1] − m[k, 2] − m[k, 3]

    The last products' sign is the weight's, and m[k, 1] begins with `start[k]`. Meanwhile the memory of the outputs comes to the
    cache (seen, for large maps: a tenth of the time), but where they go `past` it.
    """

    def code(
        b: Any, z: Any, w: Any, start: Any, lanes: Any, h: Any, upper: Any, lower: Any
    ) -> None:
        def multiply(k: Any, nothing: list[Any]) -> list[Any]:
            met, columns, target = (
                at(b, place, b.mul(k, k.type(4 * apart)))
                for place, apart in (
                    (z, _plane(reals)),
                    (w, reals * PANEL),
                    (h, A_PLANE // 2),
                )  # two planes of sums
            )
            first = [
                load(b, at(b, start, b.mul(k, lanes), LANES * v)) for v in range(VECTORS)
            ] * TILES
            quarter = 2 * TILES // 4  # of the positions of either row
            for row in () if past else (upper, lower):
                for place in steps(
                    b, at(b, row, b.mul(b.mul(k, k.type(quarter)), lanes)), lanes, quarter
                ):
                    for v in range(VECTORS):
                        foreseen(b, at(b, place, LANES * v), to_write=True)

            def added(j: int, sums: list[Any]) -> list[Any]:
                for s in range(reals):
                    row = [
                        load(b, at(b, columns, (j * reals + s) * PANEL + LANES * v))
                        for v in range(VECTORS)
                    ]
                    numbers = [
                        everywhere(b, b.load(at(b, met, j * _plane(reals) + 2 * p * reals + s)))
                        for p in range(TILES)
                    ]
                    pairs = [(number, vector) for number in numbers for vector in row]
                    sums = [fused(b, *pair, sum_) for pair, sum_ in zip(pairs, sums, strict=True)]
                return sums

            one, two = added(1, first), added(2, [ZEROS] * len(first))
            left = added(0, [b.fadd(*pair) for pair in zip(one, two, strict=True)])
            right = added(3, [b.fsub(*pair) for pair in zip(one, two, strict=True)])
            for n, sum_ in enumerate([*left, *right]):
                store(b, sum_, at(b, target, LANES * n))
            return nothing

        repeated(b, ir.IntType(64)(4), [], multiply)

    return tile([FLOATS, FLOATS, FLOATS, types.int64, FLOATS, FLOATS, FLOATS], code)


def _finishing(
    to: Callable[[Any, Any, Any], None], b: Any, h: Any, upper: Any, lower: Any, lanes: Any
) -> None:
    """The two rows of a group's outputs, of a panel."""

    def finish(p: Any, nothing: list[Any]) -> list[Any]:
        first = b.mul(b.mul(p, p.type(2)), lanes)
        rows = [steps(b, at(b, row, first), lanes, 2) for row in (upper, lower)]
        for column, v in itertools.product(range(2), range(VECTORS)):
            place = at(b, h, b.mul(p, p.type(PANEL)), column * A_PLANE + LANES * v)
            sums = [load(b, at(b, place, 2 * k * A_PLANE)) for k in range(4)]
            for row, vector in zip(rows, to_outputs(b, sums), strict=True):
                to(b, vector, at(b, row[column], LANES * v))
        return nothing

    repeated(b, lanes.type(TILES), [], finish)


_finish, _finish_past = (
    tile([FLOATS, FLOATS, FLOATS, types.int64], partial(_finishing, to))
    for to in (store, store_past)
)


def _row_convolved(reals: int, past: bool) -> Callable[..., None]:
    """Two rows of outputs in groups, of which the last ends with the row: some tiles are computed twice. There is no lower row,
    or no last column, where the outputs' height or width is odd: what would stand there is laid aside."""
    transform, multiply, finish = (
        _transforming(reals),
        _multiplying(reals, past),
        _finish_past if past else _finish,
    )

    @njit
    def row(
        x: Any,
        line: Any,
        w: Any,
        start: Any,
        upper: Any,
        lowest: Any,
        width: Any,
        lanes: Any,
        held: Any,
    ) -> None:
        columns = (width + 1) // 2
        sums = further(held, _HELD)
        aside = further(sums, 8 * A_PLANE)
        for first in range(0, columns, TILES):
            q = min(first, columns - TILES)
            transform(further(x, 2 * q * reals), line, held)
            inside = min(2 * TILES, width - 2 * q)
            for v in range(0, lanes, PANEL):
                target = further(upper, 2 * q * lanes + v)
                below = further(target, width * lanes)
                multiply(
                    held, further(w, 16 * reals * v), further(start, v), lanes, sums, target, below
                )
                if lowest == 0 and inside == 2 * TILES:
                    finish(sums, target, below, lanes)
                    continue
                _finish(sums, aside, further(aside, 2 * A_PLANE), PANEL)
                for i in range(2 - lowest):
                    for j in range(inside):
                        copied(
                            further(target, (i * width + j) * lanes),
                            further(aside, i * 2 * A_PLANE + j * PANEL),
                            PANEL,
                        )

    return row


_row_6, _row_8 = _row_convolved(6, past=False), _row_convolved(8, past=False)
_row_6_past, _row_8_past = _row_convolved(6, past=True), _row_convolved(8, past=True)


def convolve(task: Any) -> None:
    """y of all records' rows of tiles, from maps with two more positions than the tiles' outputs either way."""
    wide_vectors()
    notes = begin(task)
    room = np.zeros(0, np.float32)
    while True:
        at, share = next_share(task, notes)
        if at < 0:
            break
        x, w, start, y = task[at], float32_at(task[at + 1]), float32_at(task[at + 2]), task[at + 3]
        reals, lanes, rows, height, width = (
            task[at + 4],
            task[at + 5],
            task[at + 6],
            task[at + 7],
            task[at + 8],
        )
        record, line, past = task[at + 9], task[at + 10], task[at + 11] != 0
        if len(room) == 0:
            room = np.empty(_HELD + 8 * A_PLANE + 4 * A_PLANE + LANES, np.float32)
        held = further(float32_at(room.ctypes.data), -(room.ctypes.data // 4) % LANES)
        of_record = (height + 1) // 2
        for n in range(share * ROWS, min((share + 1) * ROWS, rows)):
            row = 2 * (n % of_record)
            source = further(float32_at(x), n // of_record * record + row * line)
            target = further(float32_at(y), (n // of_record * height + row) * width * lanes)
            lowest = row + 1 == height
            if reals == 6 and past:
                _row_6_past(source, line, w, start, target, lowest, width, lanes, held)
            elif reals == 6:
                _row_6(source, line, w, start, target, lowest, width, lanes, held)
            elif past:
                _row_8_past(source, line, w, start, target, lowest, width, lanes, held)
            else:
                _row_8(source, line, w, start, target, lowest, width, lanes, held)
