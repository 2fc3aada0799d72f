"""Compiled loops of convolutions, in which a vector of outputs meets one number of the input at a time.

Maps are real: a position's numbers side by side. An entry is one number that an output position meets: so many of every tap.

    convolve     y[q, :] = bias + Σ_entries x[q, entry]·w[entry, :]
    correlate    m[entry, :] = Σ_q x[q, entry]·g[q, :], of every record by itself, and behind the entries Σ_q g[q, :]
    distribute   x[p, c] = Σ_taps Σ g[p − tap, :]·w[tap, c, :]

One more is for maps whose channels are planes, where a vector is 16 positions of one of them:

    correlate_planes   m[o, entry] = Σ_q x[q, entry]·g[o, q], of every record by itself, and Σ_q g[o, q]

A tile is what registers hold at once: up to 24 sums and what they are made of. `correlate` begins its sums anew in each row of an
image, so that long ones lose no digits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from numba import njit, types
from torch import Tensor

from zdp_bench.kernels.jit import begin, float32_at, int64_at, next_share, wide_vectors
from zdp_bench.kernels.simd import (
    FLOATS,
    LANES,
    WORDS,
    ZEROS,
    at,
    copied,
    everywhere,
    further,
    fused,
    load,
    load_first,
    repeated,
    steps,
    store,
    sums,
    tile,
)

ROWS = 32  # of an image that are a thread's share, and summed by themselves
HELD = 12  # rows of an output gradient, likewise, that a thread holds with zeros around
POSITIONS = {1: 12, 2: 8, 4: 5}  # of a tile of `convolve`, of so many vectors of outputs
INPUTS = {2: 12, 4: 6, 6: 4, 8: 3}  # of a tile of `distribute`, of so many numbers of the input
MET = 4, 5  # outputs and entries of a tile of `correlate_planes`
ENTRIES = 9  # of a tile of `correlate`: a 3×3 kernel has a multiple of it


@cache
def have_their_registers() -> bool:
    """Whether this processor has AVX-512: 32 registers of 16 numbers. On others a tile does not fit."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


@lru_cache(maxsize=256)
def places(sizes: tuple[int, ...], steps: tuple[int, ...], multiple: int = 1) -> Tensor:
    """How far from the first number lies every other that a position meets, of `sizes` taps and channels that are `steps` apart,
    the last dimension first; the last once more, until they are a multiple."""
    indices = itertools.product(*(range(size) for size in sizes))
    every = [sum(i * step for i, step in zip(index, steps, strict=True)) for index in indices]
    return torch.tensor(every + every[-1:] * (-len(every) % multiple), device="cpu")


# ------------------------------------------------------------------------------------------------------------- in registers


def _convolving(vectors: int) -> Callable[..., None]:
    """y[p, v] = bias[v] + Σ_s x[entries[s] + p·step]·w[s, v], for `POSITIONS[vectors]` positions p."""
    positions = POSITIONS[vectors]

    def code(
        b: Any, x: Any, entries: Any, count: Any, w: Any, step: Any, bias: Any, y: Any, lanes: Any
    ) -> None:
        sources = steps(b, x, step, positions)

        def add_entry(s: Any, y: list[Any]) -> list[Any]:
            entry = b.load(at(b, entries, s))
            row = [load(b, at(b, w, b.mul(s, lanes), LANES * v)) for v in range(vectors)]
            met = [everywhere(b, b.load(at(b, source, entry))) for source in sources]
            return [
                fused(b, number, row[v], y[p * vectors + v])
                for p, number in enumerate(met)
                for v in range(vectors)
            ]

        first = [load(b, at(b, bias, LANES * v)) for v in range(vectors)] * positions
        done = iter(repeated(b, count, first, add_entry))
        for target in steps(b, y, lanes, positions):
            for v in range(vectors):
                store(b, next(done), at(b, target, LANES * v))

    return tile(
        [FLOATS, WORDS, types.int64, FLOATS, types.int64, FLOATS, FLOATS, types.int64], code
    )


def _correlating(entries_: int, vectors: int) -> Callable[..., None]:
    """m[s, v] += Σ_q x[entries[s] + q·step]·g[q, v], over a row of positions q."""

    def code(
        b: Any, x: Any, entries: Any, step: Any, g: Any, lanes: Any, count: Any, m: Any
    ) -> None:
        sources = [at(b, x, b.load(at(b, entries, s))) for s in range(entries_)]

        def add_position(q: Any, m: list[Any]) -> list[Any]:
            row = [load(b, at(b, g, b.mul(q, lanes), LANES * v)) for v in range(vectors)]
            met = [everywhere(b, b.load(at(b, source, b.mul(q, step)))) for source in sources]
            return [
                fused(b, number, row[v], m[s * vectors + v])
                for s, number in enumerate(met)
                for v in range(vectors)
            ]

        done = iter(repeated(b, count, [ZEROS] * (entries_ * vectors), add_position))
        for target in steps(b, m, lanes, entries_):
            for v in range(vectors):
                place = at(b, target, LANES * v)
                store(b, b.fadd(load(b, place), next(done)), place)

    return tile([FLOATS, WORDS, types.int64, FLOATS, types.int64, types.int64, FLOATS], code)


def _distributing(reals: int) -> Callable[..., None]:
    """x[p, c] = Σ_t Σ_lanes g[taps[t] + p·step + lane]·w[t, c, lane], for `INPUTS[reals]` positions p and all c."""
    positions = INPUTS[reals]

    def code(b: Any, g: Any, taps: Any, count: Any, w: Any, step: Any, x: Any) -> None:
        sources = steps(b, g, step, positions)

        def add_tap(t: Any, x: list[Any]) -> list[Any]:
            tap = b.load(at(b, taps, t))
            columns = [
                load(b, at(b, w, b.mul(t, t.type(LANES * reals)), LANES * c)) for c in range(reals)
            ]
            met = [load(b, at(b, source, tap)) for source in sources]
            return [
                fused(b, vector, columns[c], x[p * reals + c])
                for p, vector in enumerate(met)
                for c in range(reals)
            ]

        done = repeated(b, count, [ZEROS] * (positions * reals), add_tap)
        for first in range(0, len(done), LANES):
            store(b, sums(b, done[first : first + LANES]), at(b, x, first))

    return tile([FLOATS, WORDS, types.int64, FLOATS, types.int64, FLOATS], code)


def _meeting(
    b: Any, x: Any, entries: Any, vectors: Any, g: Any, plane: Any, m: Any, count: Any
) -> None:
    """m[o, s] = Σ_q x[entries[s] + q]·g[o·plane + q] over so many vectors of positions q, of `MET` outputs o and entries s."""
    outputs, inputs = MET
    sources = [at(b, x, b.load(at(b, entries, s))) for s in range(inputs)]
    targets = steps(b, g, plane, outputs)

    def add_vector(i: Any, m: list[Any]) -> list[Any]:
        q = b.mul(i, i.type(LANES))
        gradients = [load(b, at(b, target, q)) for target in targets]
        met = [load(b, at(b, source, q)) for source in sources]
        return [
            fused(b, met[n % inputs], gradients[n // inputs], m[n]) for n in range(outputs * inputs)
        ]

    done = repeated(b, vectors, [ZEROS] * (outputs * inputs), add_vector)
    for o, target in enumerate(steps(b, m, count, outputs)):
        store(b, sums(b, done[o * inputs : (o + 1) * inputs]), target)


_meet = tile([FLOATS, WORDS, types.int64, FLOATS, types.int64, FLOATS, types.int64], _meeting)


def _spreading(b: Any, g: Any, rows: Any, width: Any, y: Any, line: Any, total: Any) -> None:
    """y[row·line + q] = g[row·width + q], and zeros behind each row to the end of a vector, where the next row may begin; and the
    sum of g."""

    def lay_row(row: Any, sum_: list[Any]) -> list[Any]:
        source, target = at(b, g, b.mul(row, width)), at(b, y, b.mul(row, line))

        def lay_vector(i: Any, sum_: list[Any]) -> list[Any]:
            q = b.mul(i, i.type(LANES))
            vector = load_first(b, at(b, source, q), b.sub(width, q))
            store(b, vector, at(b, target, q))
            return [b.fadd(sum_[0], vector)]

        return repeated(
            b, b.sdiv(b.add(width, width.type(LANES - 1)), width.type(LANES)), sum_, lay_vector
        )

    store(b, sums(b, repeated(b, rows, [ZEROS], lay_row)), total)


_spread = tile([FLOATS, types.int64, types.int64, FLOATS, types.int64, FLOATS], _spreading)


# ---------------------------------------------------------------------------------------------------------------- over rows


def _row_convolved(vectors: int) -> Callable[..., None]:
    """A row of outputs in tiles, of which the last ends with the row: some positions are computed twice."""
    convolve, positions = _convolving(vectors), POSITIONS[vectors]

    @njit
    def row(
        x: Any,
        entries: Any,
        count: Any,
        w: Any,
        step: Any,
        bias: Any,
        y: Any,
        lanes: Any,
        width: Any,
    ) -> None:
        for first in range(0, width, positions):
            q = min(first, width - positions)
            convolve(
                further(x, q * step), entries, count, w, step, bias, further(y, q * lanes), lanes
            )

    return row


def _row_correlated(vectors: int) -> Callable[..., None]:
    """A row's part of a weight's gradient, and behind it of the bias's, which meets ones."""
    correlate, add_up = _correlating(ENTRIES, vectors), _correlating(1, vectors)

    @njit
    def row(
        x: Any,
        entries: Any,
        count: Any,
        step: Any,
        g: Any,
        lanes: Any,
        width: Any,
        m: Any,
        one: Any,
    ) -> None:
        for s in range(0, count, ENTRIES):
            correlate(x, further(entries, s), step, g, lanes, width, further(m, s * lanes))
        add_up(
            one, entries, 0, g, lanes, width, further(m, count * lanes)
        )  # the first entry is at 0

    return row


def _row_distributed(reals: int) -> Callable[..., None]:
    """A row of an input's gradient, in tiles as above."""
    distribute, positions = _distributing(reals), INPUTS[reals]

    @njit
    def row(g: Any, taps: Any, count: Any, w: Any, lanes: Any, x: Any, width: Any) -> None:
        for first in range(0, width, positions):
            p = min(first, width - positions)
            distribute(further(g, p * lanes), taps, count, w, lanes, further(x, p * reals))

    return row


_convolve_1, _convolve_2, _convolve_4 = (_row_convolved(vectors) for vectors in (1, 2, 4))
_correlate_1, _correlate_2 = (_row_correlated(vectors) for vectors in (1, 2))
_distribute_2, _distribute_4, _distribute_6, _distribute_8 = (
    _row_distributed(reals) for reals in (2, 4, 6, 8)
)


# ---------------------------------------------------------------------------------------------------------------- over maps


def convolve(task: Any) -> None:
    """y of all records' rows."""
    wide_vectors()
    notes = begin(task)
    while True:
        at, share = next_share(task, notes)
        if at < 0:
            break
        x, w, bias, y, entries = (
            task[at],
            task[at + 1],
            task[at + 2],
            task[at + 3],
            int64_at(task[at + 4]),
        )
        count, lanes, rows, height, width = (
            task[at + 5],
            task[at + 6],
            task[at + 7],
            task[at + 8],
            task[at + 9],
        )
        record, line, step = task[at + 10], task[at + 11], task[at + 12]
        for row in range(share * ROWS, min((share + 1) * ROWS, rows)):
            source = further(float32_at(x), row // height * record + row % height * line)
            target = further(float32_at(y), row * width * lanes)
            v = 0
            while v < lanes:
                columns, start, end = (
                    further(float32_at(w), v),
                    further(float32_at(bias), v),
                    further(target, v),
                )
                if lanes - v >= 4 * LANES:
                    _convolve_4(source, entries, count, columns, step, start, end, lanes, width)
                    v += 4 * LANES
                elif lanes - v >= 2 * LANES:
                    _convolve_2(source, entries, count, columns, step, start, end, lanes, width)
                    v += 2 * LANES
                else:
                    _convolve_1(source, entries, count, columns, step, start, end, lanes, width)
                    v += LANES


def correlate(task: Any) -> None:
    """m of every part of a record's rows, [record, part, entry, lane]; behind the entries the bias's."""
    wide_vectors()
    notes = begin(task)
    while True:
        at, share = next_share(task, notes)
        if at < 0:
            break
        x, g, m, one, entries = (
            task[at],
            task[at + 1],
            task[at + 2],
            float32_at(task[at + 3]),
            int64_at(task[at + 4]),
        )
        count, lanes, parts, height, width = (
            task[at + 5],
            task[at + 6],
            task[at + 7],
            task[at + 8],
            task[at + 9],
        )
        record, line, step = task[at + 10], task[at + 11], task[at + 12]
        whose, first = share // parts, share % parts * ROWS
        for row in range(first, min(first + ROWS, height)):
            source = further(float32_at(x), whose * record + row * line)
            target = further(float32_at(m), share * (count + 1) * lanes)
            gradients = further(float32_at(g), (whose * height + row) * width * lanes)
            v = 0
            while v < lanes:
                if lanes - v >= 2 * LANES:
                    _correlate_2(
                        source,
                        entries,
                        count,
                        step,
                        further(gradients, v),
                        lanes,
                        width,
                        further(target, v),
                        one,
                    )
                    v += 2 * LANES
                else:
                    _correlate_1(
                        source,
                        entries,
                        count,
                        step,
                        further(gradients, v),
                        lanes,
                        width,
                        further(target, v),
                        one,
                    )
                    v += LANES


def distribute(task: Any) -> None:
    """x of every part of a record's rows, from the rows of g that reach them: those are held with zeros around."""
    wide_vectors()
    notes = begin(task)
    held = np.zeros(0, np.float32)
    while True:
        at, share = next_share(task, notes)
        if at < 0:
            break
        g, w, x, taps = task[at], float32_at(task[at + 1]), task[at + 2], int64_at(task[at + 3])
        count, lanes, reals, parts = task[at + 4], task[at + 5], task[at + 6], task[at + 7]
        height, width, down, across = task[at + 8], task[at + 9], task[at + 10], task[at + 11]
        line = (width + across) * lanes
        if len(held) == 0:
            held = np.zeros((HELD + down) * line, np.float32)
        kept = float32_at(held.ctypes.data)
        whose, first = share // parts, share % parts * HELD
        last = min(first + HELD, height)
        for row in range(first - down, last):
            place = (row - first + down) * line + across * lanes
            own = (width - across) * lanes
            if 0 <= row < height - down:
                copied(
                    further(kept, place),
                    further(float32_at(g), (whose * (height - down) + row) * own),
                    own,
                )
            else:
                held[place : place + own] = 0
        for row in range(first, last):
            source, target = (
                further(kept, (row - first) * line),
                further(float32_at(x), (whose * height + row) * width * reals),
            )
            if reals == 2:
                _distribute_2(source, taps, count, w, lanes, target, width)
            elif reals == 4:
                _distribute_4(source, taps, count, w, lanes, target, width)
            elif reals == 6:
                _distribute_6(source, taps, count, w, lanes, target, width)
            else:
                _distribute_8(source, taps, count, w, lanes, target, width)


def correlate_planes(task: Any) -> None:
    """m of every record, [record, output, entry], where a map's channels are planes; and Σ_q g[q, :], [record, output].

    An output's gradients are laid out in rows as long as the input's, zeros behind: then what an entry meets are the input's
    numbers one after the other, over all rows. Tiles end with what there is: the last takes some outputs and entries again.
    """
    wide_vectors()
    notes = begin(task)
    own, laid = np.zeros(0, np.float32), np.zeros(0, np.float32)
    while True:
        at, share = next_share(task, notes)
        if at < 0:
            break
        x, g, m, total, entries = (
            task[at],
            task[at + 1],
            task[at + 2],
            task[at + 3],
            int64_at(task[at + 4]),
        )
        count, outputs, height, width = task[at + 5], task[at + 6], task[at + 7], task[at + 8]
        record, line = task[at + 9], task[at + 10]
        vectors = (height * line + LANES - 1) // LANES
        plane = vectors * LANES
        if len(own) == 0:
            own, laid = (
                np.zeros(record + plane, np.float32),
                np.zeros(outputs * plane + 2 * LANES, np.float32),
            )
        inputs = float32_at(own.ctypes.data)  # with zeros behind
        gradients = further(
            float32_at(laid.ctypes.data), -(laid.ctypes.data // 4) % LANES
        )  # no vector across two lines of cache
        copied(inputs, further(float32_at(x), share * record), record)
        for o in range(outputs):
            source = further(float32_at(g), (share * outputs + o) * height * width)
            _spread(
                source,
                height,
                width,
                further(gradients, o * plane),
                line,
                further(float32_at(total), share * outputs + o),
            )
        for first in range(0, outputs, MET[0]):
            o = min(first, outputs - MET[0])
            for entry in range(0, count, MET[1]):
                s = min(entry, count - MET[1])
                target = further(float32_at(m), (share * outputs + o) * count + s)
                _meet(
                    inputs,
                    further(entries, s),
                    vectors,
                    further(gradients, o * plane),
                    plane,
                    target,
                    count,
                )
