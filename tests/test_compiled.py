"""Compiled loops: their arithmetic is exact, and threads share them without a gap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numba import float32, njit, uint32

from zdp_bench import compiled as room
from zdp_bench.compiled import compiled, fused, plus, rotated, side_by_side, wide_vectors
from zdp_bench.privacy import normal_stream


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


def double(out: Any) -> None:
    wide_vectors()
    for i in range(len(out)):
        out[i] *= 2


def doubles(loop: Callable[..., None]) -> bool:
    numbers = np.arange(5.0)
    loop(numbers)
    return numbers.tolist() == [0, 2, 4, 6, 8]


def wrong(*arguments: Any) -> None:
    """Does nothing."""


def keeping_wrong_code(*, cache: bool = False, **options: Any) -> Any:
    """numba, with another version's code on disk."""
    return (lambda function: wrong) if cache else njit(**options)


@pytest.mark.parametrize(
    "fault", [RuntimeError("no locator available"), OSError(28, "No space left"), EOFError("Ran out of input")]
)
def test_where_nothing_can_be_kept_on_disk_loops_are_compiled_anew(monkeypatch: pytest.MonkeyPatch, fault: Exception) -> None:
    """numba refuses to cache where no folder can be written, and stumbles over a full disk and a file cut short."""

    def faulty(*, cache: bool = False, **options: Any) -> Any:
        def refuse(function: Any) -> Any:
            raise fault

        return refuse if cache else njit(**options)

    monkeypatch.setattr(room, "njit", faulty)
    assert doubles(compiled(double, doubles))


def test_kept_code_that_is_another_versions_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """numba looks at the date of one file only."""
    monkeypatch.setattr(room, "njit", keeping_wrong_code)
    assert doubles(compiled(double, doubles))


def test_a_machine_whose_code_is_wrong_is_told() -> None:
    with pytest.raises(RuntimeError, match=r"double: the code that numba .* makes for this machine is wrong"):
        compiled(double, lambda loop: False)


def test_noise_of_kept_code_is_looked_at_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "njit", keeping_wrong_code)
    assert normal_stream._right(compiled(normal_stream._add_normals, normal_stream._right))
    assert not normal_stream._right(lambda key, out, std, start, stop: None)
