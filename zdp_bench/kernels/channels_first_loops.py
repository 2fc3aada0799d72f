"""The compiled loop of `channels_first.py`.

    m[o, s] = Σ_q x[met[s] + q]·g[o, q] for every example, output o and number s that a position
    meets, over positions q

A vector is 16 positions. A tile is what registers hold at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from zdp_bench.kernels.channels_first import INPUTS, OUTPUTS
from zdp_bench.kernels.jit import (
    ARGUMENTS,
    first_chunk,
    float32_at,
    int64_at,
    next_chunk,
    use_wide_vectors,
)
from zdp_bench.kernels.simd import (
    FLOATS,
    LANES,
    WORDS,
    ZEROS,
    advance,
    as_function,
    copy,
    fused,
    load,
    load_first,
    offset,
    repeat,
    store,
    strided,
    sum_lanes,
)


def _multiplying(
    b: Any, x: Any, met: Any, vectors: Any, g: Any, plane: Any, m: Any, count: Any
) -> None:
    """m[o, s] = Σ_q x[met[s] + q]·g[o·plane + q] of a tile, over so many vectors of positions q."""
    sources = [offset(b, x, b.load(offset(b, met, s))) for s in range(INPUTS)]
    targets = strided(b, g, plane, OUTPUTS)

    def add_vector(i: Any, m: list[Any]) -> list[Any]:
        q = b.mul(i, i.type(LANES))
        gradients = [load(b, offset(b, target, q)) for target in targets]
        inputs = [load(b, offset(b, source, q)) for source in sources]
        return [fused(b, inputs[n % INPUTS], gradients[n // INPUTS], m[n]) for n in range(len(m))]

    sums = repeat(b, vectors, [ZEROS] * (OUTPUTS * INPUTS), add_vector)
    for o, target in enumerate(strided(b, m, count, OUTPUTS)):
        store(b, sum_lanes(b, sums[o * INPUTS : (o + 1) * INPUTS]), target)


def _spreading(b: Any, g: Any, rows: Any, width: Any, y: Any, line: Any) -> None:
    """y[row·line + q] = g[row·width + q], with zeros to the end of a vector.

    The next row may begin inside those zeros.
    """

    def copy_row(row: Any, nothing: list[Any]) -> list[Any]:
        source, target = offset(b, g, b.mul(row, width)), offset(b, y, b.mul(row, line))

        def copy_vector(i: Any, nothing: list[Any]) -> list[Any]:
            q = b.mul(i, i.type(LANES))
            store(b, load_first(b, offset(b, source, q), b.sub(width, q)), offset(b, target, q))
            return nothing

        vectors = b.sdiv(b.add(width, width.type(LANES - 1)), width.type(LANES))
        return repeat(b, vectors, nothing, copy_vector)

    repeat(b, rows, [], copy_row)


_multiply = as_function(
    [FLOATS, WORDS, types.int64, FLOATS, types.int64, FLOATS, types.int64], _multiplying
)
_spread = as_function([FLOATS, types.int64, types.int64, FLOATS, types.int64], _spreading)


def correlate(work: Any) -> None:
    """m of every example; a chunk is one example.

    An output's gradients are laid out in rows as long as the input's, with zeros behind, so that
    what one kernel tap meets is contiguous over all rows. The last tile repeats some sums.
    """
    use_wide_vectors()
    x, g, m = work[ARGUMENTS], work[ARGUMENTS + 1], work[ARGUMENTS + 2]
    met, count, outputs = int64_at(work[ARGUMENTS + 3]), work[ARGUMENTS + 4], work[ARGUMENTS + 5]
    height, width = work[ARGUMENTS + 6], work[ARGUMENTS + 7]
    numbers, line = work[ARGUMENTS + 8], work[ARGUMENTS + 9]
    vectors = (height * line + LANES - 1) // LANES
    plane = vectors * LANES
    own = np.zeros(numbers + plane, np.float32)  # the example, with zeros behind
    spread = np.zeros(outputs * plane + 2 * LANES, np.float32)
    example = first_chunk(work)
    while example >= 0:
        # In here, so that numba keeps the arrays. Aligned: no vector crosses a cache line.
        inputs = float32_at(own.ctypes.data)
        gradients = advance(float32_at(spread.ctypes.data), -(spread.ctypes.data // 4) % LANES)
        copy(inputs, advance(float32_at(x), example * numbers), numbers)
        for o in range(outputs):
            source = advance(float32_at(g), (example * outputs + o) * height * width)
            _spread(source, height, width, advance(gradients, o * plane), line)
        for first_output in range(0, outputs, OUTPUTS):
            o = min(first_output, outputs - OUTPUTS)
            own_gradients = advance(gradients, o * plane)
            for first_input in range(0, count, INPUTS):
                s = min(first_input, count - INPUTS)
                target = advance(float32_at(m), (example * outputs + o) * count + s)
                _multiply(inputs, advance(met, s), vectors, own_gradients, plane, target, count)
        example = next_chunk(work)
