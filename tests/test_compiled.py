"""Compiled loops: their arithmetic is exact, and threads share them without a gap."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numba import float32, njit, uint32

from zdp_bench import compiled as room
from zdp_bench.compiled import compiled, fused, plus, rotated, side_by_side, wide_vectors


@njit
def _fused(a: Any, b: Any, c: Any) -> Any:
    return fused(float32(a), float32(b), float32(c))


@njit
def _words(a: Any, b: Any, bits: Any) -> Any:
    return plus(uint32(a), uint32(b)), rotated(uint32(a), uint32(bits))


def test_a_fused_product_is_rounded_once() -> None:
    a = np.float32(1 + 2.0**-12)
    assert a * a - np.float32(1 + 2.0**-11) == 0  # the product's last digit is lost
    assert _fused(a, a, -np.float32(1 + 2.0**-11)) == 2.0**-24


def test_words_have_32_bits() -> None:
    assert _words(2**32 - 1, 2, 8) == (1, 2**32 - 1)
    assert _words(0x80000001, 0, 4) == (0x80000001, 0x18)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("count", "unit"), [(0, 5), (1, 5), (99, 10), (100, 10), (101, 1)])
def test_parts_cover_everything_once_and_begin_at_multiples(threads: int, count: int, unit: int) -> None:
    done = np.zeros(count, dtype=int)
    starts = []

    def work(start: int, stop: int) -> None:
        starts.append(start)
        done[start:stop] += 1

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        side_by_side(work, count, unit, alone=20)
    finally:
        torch.set_num_threads(before)
    assert (done == 1).all()
    assert all(start % unit == 0 for start in starts)
    assert len(starts) == (threads if count > 20 else 1)


def test_what_fails_on_another_thread_is_raised_here() -> None:
    def work(start: int, stop: int) -> None:
        if start:
            raise ZeroDivisionError

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(ZeroDivisionError):
            side_by_side(work, 100, 1, alone=0)
    finally:
        torch.set_num_threads(before)


def test_where_no_folder_can_be_written_loops_are_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """numba refuses to cache there."""

    def unwritable(*, cache: bool = False, **options: Any) -> Any:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return njit(**options)

    monkeypatch.setattr(room, "njit", unwritable)

    @compiled
    def double(out: Any) -> None:
        wide_vectors()
        for i in range(len(out)):
            out[i] *= 2

    numbers = np.arange(5.0)
    double(numbers)
    assert numbers.tolist() == [0, 2, 4, 6, 8]
