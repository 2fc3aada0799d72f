"""Compiled loops of convolutions in which a vector of outputs meets one number of the input at a time (`few_channels.py`).

Maps are real: a position's numbers side by side. An entry is one number that an output position meets: so many of every tap.

    convolve     y[q, :] = bias + Σ_entries x[q, entry]·w[entry, :]
    correlate    m[entry, :] = Σ_q x[q, entry]·g[q, :], of every record by itself, and behind the entries Σ_q g[q, :]
    distribute   x[p, c] = Σ_taps Σ g[p − tap, :]·w[tap, c, :]

A tile is what registers hold at once: up to 24 sums and what they are made of. `correlate` begins its sums anew in each row of an
image, so that long ones lose no digits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, types

from zdp_bench.compiled import begin, float32_at, int64_at, next_share, wide_vectors
from zdp_bench.vectors import (
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
    repeated,
    store,
    sums,
    tile,
)

ROWS = 32  # of an image that are a thread's share, and summed by themselves
HELD = 12  # rows of an output gradient, likewise, that a thread holds with zeros around
POSITIONS = {1: 12, 2: 8, 4: 5}  # of a tile of `convolve`, of so many vectors of outputs
INPUTS = {2: 12, 4: 6, 6: 4, 8: 3}  # of a tile of `distribute`, of so many numbers of the input
ENTRIES = 9  # of a tile of `correlate`: a 3×3 kernel has a multiple of it


# ------------------------------------------------------------------------------------------------------------- in registers


def _convolving(vectors: int) -> Callable[..., None]:
    """y[p, v] = bias[v] + Σ_s x[entries[s] + p·step]·w[s, v], for `POSITIONS[vectors]` positions p."""
    positions = POSITIONS[vectors]

    def code(b: Any, x: Any, entries: Any, count: Any, w: Any, step: Any, bias: Any, y: Any, lanes: Any) -> None:
        sources = _steps(b, x, step, positions)

        def add_entry(s: Any, y: list[Any]) -> list[Any]:
            entry = b.load(at(b, entries, s))
            row = [load(b, at(b, w, b.mul(s, lanes), LANES * v)) for v in range(vectors)]
            met = [everywhere(b, b.load(at(b, source, entry))) for source in sources]
            return [fused(b, number, row[v], y[p * vectors + v]) for p, number in enumerate(met) for v in range(vectors)]

        first = [load(b, at(b, bias, LANES * v)) for v in range(vectors)] * positions
        done = iter(repeated(b, count, first, add_entry))
        for target in _steps(b, y, lanes, positions):
            for v in range(vectors):
                store(b, next(done), at(b, target, LANES * v))

    return tile([FLOATS, WORDS, types.int64, FLOATS, types.int64, FLOATS, FLOATS, types.int64], code)


def _correlating(entries_: int, vectors: int) -> Callable[..., None]:
    """m[s, v] += Σ_q x[entries[s] + q·step]·g[q, v], over a row of positions q."""

    def code(b: Any, x: Any, entries: Any, step: Any, g: Any, lanes: Any, count: Any, m: Any) -> None:
        sources = [at(b, x, b.load(at(b, entries, s))) for s in range(entries_)]

        def add_position(q: Any, m: list[Any]) -> list[Any]:
            row = [load(b, at(b, g, b.mul(q, lanes), LANES * v)) for v in range(vectors)]
            met = [everywhere(b, b.load(at(b, source, b.mul(q, step)))) for source in sources]
            return [fused(b, number, row[v], m[s * vectors + v]) for s, number in enumerate(met) for v in range(vectors)]

        done = iter(repeated(b, count, [ZEROS] * (entries_ * vectors), add_position))
        for target in _steps(b, m, lanes, entries_):
            for v in range(vectors):
                place = at(b, target, LANES * v)
                store(b, b.fadd(load(b, place), next(done)), place)

    return tile([FLOATS, WORDS, types.int64, FLOATS, types.int64, types.int64, FLOATS], code)


def _distributing(reals: int) -> Callable[..., None]:
    """x[p, c] = Σ_t Σ_lanes g[taps[t] + p·step + lane]·w[t, c, lane], for `INPUTS[reals]` positions p and all c."""
    positions = INPUTS[reals]

    def code(b: Any, g: Any, taps: Any, count: Any, w: Any, step: Any, x: Any) -> None:
        sources = _steps(b, g, step, positions)

        def add_tap(t: Any, x: list[Any]) -> list[Any]:
            tap = b.load(at(b, taps, t))
            columns = [load(b, at(b, w, b.mul(t, t.type(LANES * reals)), LANES * c)) for c in range(reals)]
            met = [load(b, at(b, source, tap)) for source in sources]
            return [fused(b, vector, columns[c], x[p * reals + c]) for p, vector in enumerate(met) for c in range(reals)]

        done = repeated(b, count, [ZEROS] * (positions * reals), add_tap)
        for first in range(0, len(done), LANES):
            store(b, sums(b, done[first : first + LANES]), at(b, x, first))

    return tile([FLOATS, WORDS, types.int64, FLOATS, types.int64, FLOATS], code)


def _steps(builder: Any, place: Any, step: Any, count: int) -> list[Any]:
    """Places a step apart."""
    places = [place]
    while len(places) < count:
        places.append(at(builder, places[-1], step))
    return places


# ---------------------------------------------------------------------------------------------------------------- over rows


def _row_convolved(vectors: int) -> Callable[..., None]:
    """A row of outputs in tiles, of which the last ends with the row: some positions are computed twice."""
    convolve, positions = _convolving(vectors), POSITIONS[vectors]

    @njit
    def row(x: Any, entries: Any, count: Any, w: Any, step: Any, bias: Any, y: Any, lanes: Any, width: Any) -> None:
        for first in range(0, width, positions):
            q = min(first, width - positions)
            convolve(further(x, q * step), entries, count, w, step, bias, further(y, q * lanes), lanes)

    return row


def _row_correlated(vectors: int) -> Callable[..., None]:
    """A row's part of a weight's gradient, and behind it of the bias's, which meets ones."""
    correlate, add_up = _correlating(ENTRIES, vectors), _correlating(1, vectors)

    @njit
    def row(x: Any, entries: Any, count: Any, step: Any, g: Any, lanes: Any, width: Any, m: Any, one: Any) -> None:
        for s in range(0, count, ENTRIES):
            correlate(x, further(entries, s), step, g, lanes, width, further(m, s * lanes))
        add_up(one, entries, 0, g, lanes, width, further(m, count * lanes))  # the first entry is at 0

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
_distribute_2, _distribute_4, _distribute_6, _distribute_8 = (_row_distributed(reals) for reals in (2, 4, 6, 8))


# ---------------------------------------------------------------------------------------------------------------- over maps


def convolve(task: Any) -> None:
    """y of all records' rows."""
    wide_vectors()
    notes = begin(task)
    while True:
        at, share = next_share(task, notes)
        if at < 0:
            break
        x, w, bias, y, entries = task[at], task[at + 1], task[at + 2], task[at + 3], int64_at(task[at + 4])
        count, lanes, rows, height, width = task[at + 5], task[at + 6], task[at + 7], task[at + 8], task[at + 9]
        record, line, step = task[at + 10], task[at + 11], task[at + 12]
        for row in range(share * ROWS, min((share + 1) * ROWS, rows)):
            source = further(float32_at(x), row // height * record + row % height * line)
            target = further(float32_at(y), row * width * lanes)
            v = 0
            while v < lanes:
                columns, start, end = further(float32_at(w), v), further(float32_at(bias), v), further(target, v)
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
        x, g, m, one, entries = task[at], task[at + 1], task[at + 2], float32_at(task[at + 3]), int64_at(task[at + 4])
        count, lanes, parts, height, width = task[at + 5], task[at + 6], task[at + 7], task[at + 8], task[at + 9]
        record, line, step = task[at + 10], task[at + 11], task[at + 12]
        whose, first = share // parts, share % parts * ROWS
        for row in range(first, min(first + ROWS, height)):
            source = further(float32_at(x), whose * record + row * line)
            target = further(float32_at(m), share * (count + 1) * lanes)
            gradients = further(float32_at(g), (whose * height + row) * width * lanes)
            v = 0
            while v < lanes:
                if lanes - v >= 2 * LANES:
                    _correlate_2(source, entries, count, step, further(gradients, v), lanes, width, further(target, v), one)
                    v += 2 * LANES
                else:
                    _correlate_1(source, entries, count, step, further(gradients, v), lanes, width, further(target, v), one)
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
        count, lanes, reals, parts, height, width = (
            task[at + 4],
            task[at + 5],
            task[at + 6],
            task[at + 7],
            task[at + 8],
            task[at + 9],
        )
        down, across = task[at + 10], task[at + 11]
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
                copied(further(kept, place), further(float32_at(g), (whose * (height - down) + row) * own), own)
            else:
                held[place : place + own] = 0
        for row in range(first, last):
            source, target = further(kept, (row - first) * line), further(float32_at(x), (whose * height + row) * width * reals)
            if reals == 2:
                _distribute_2(source, taps, count, w, lanes, target, width)
            elif reals == 4:
                _distribute_4(source, taps, count, w, lanes, target, width)
            elif reals == 6:
                _distribute_6(source, taps, count, w, lanes, target, width)
            else:
                _distribute_8(source, taps, count, w, lanes, target, width)
