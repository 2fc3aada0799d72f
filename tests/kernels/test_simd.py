"""Vectors in compiled loops: each lane has its own sum, and products are rounded once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import njit, types

from zdp_bench.kernels.jit import float32_at
from zdp_bench.kernels.simd import (
    FLOATS,
    LANES,
    ZEROS,
    as_function,
    broadcast,
    fused,
    load,
    offset,
    repeat,
    store,
    sum_lanes,
)


@pytest.mark.parametrize("count", [1, 5, 16])
def test_sums_of_lanes_are_in_the_order_of_their_vectors(count: int) -> None:
    def code(builder: Any, source: Any, target: Any) -> None:
        store(
            builder,
            sum_lanes(
                builder, [load(builder, offset(builder, source, LANES * i)) for i in range(count)]
            ),
            target,
        )

    summed = as_function([FLOATS, FLOATS], code)

    @njit
    def run(source: Any, target: Any) -> None:
        summed(float32_at(source), float32_at(target))

    numbers = np.random.default_rng(0).integers(-99, 99, (count, LANES)).astype(np.float32)
    found = np.full(LANES, 7, np.float32)
    run(numbers.ctypes.data, found.ctypes.data)
    assert (found[:count] == numbers.sum(axis=1)).all()
    assert (found[count:] == 7).all()  # nothing behind them is written


def test_a_loop_carries_its_values_and_rounds_products_once() -> None:
    def code(builder: Any, source: Any, count: Any, target: Any) -> None:
        def step(i: Any, carried: list[Any]) -> list[Any]:
            number = broadcast(builder, builder.load(offset(builder, source, i)))
            return [fused(builder, number, number, carried[0])]

        store(builder, repeat(builder, count, [ZEROS], step)[0], target)

    squares = as_function([FLOATS, types.int64, FLOATS], code)

    @njit
    def run(source: Any, count: Any, target: Any) -> None:
        squares(float32_at(source), count, float32_at(target))

    small = np.float32(1 + 2.0**-12)
    root = np.float32(np.sqrt(np.float64(small)))
    numbers, found = np.array([1, 2, 3, root], np.float32), np.zeros(LANES, np.float32)
    run(numbers.ctypes.data, 3, found.ctypes.data)
    assert (found == 14).all()
    run(numbers.ctypes.data, 4, found.ctypes.data)  # all four
    assert (found == np.float32(np.float64(root) ** 2 + 14)).all()
