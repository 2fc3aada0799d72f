"""Compiled loops: their arithmetic is exact, and threads share them without a gap."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numba import carray, cfunc, float32, njit, uint32

from zdp_bench.kernels import jit as room
from zdp_bench.kernels.jit import (
    Loop,
    begin,
    compiled,
    float32_at,
    fused,
    next_share,
    plus,
    rotated,
    side_by_side,
    task_of,
)


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
def test_parts_cover_everything_once_and_begin_at_multiples(
    threads: int, count: int, unit: int, set_threads: Callable[[int], None]
) -> None:
    done = np.zeros(count, dtype=int)
    starts = []

    def work(start: int, stop: int) -> None:
        starts.append(start)
        done[start:stop] += 1

    set_threads(threads)
    side_by_side(work, count, unit, alone=20)
    assert (done == 1).all()
    assert all(start % unit == 0 for start in starts)
    assert len(starts) == (threads if count > 20 else 1)


def test_what_fails_on_another_thread_is_raised_here(set_threads: Callable[[int], None]) -> None:
    def work(start: int, stop: int) -> None:
        if start:
            raise ZeroDivisionError

    set_threads(2)
    with pytest.raises(ZeroDivisionError):
        side_by_side(work, 100, 1, alone=0)


def double(task: Any) -> None:
    """An item's words: place and length; five numbers a share."""
    notes = begin(task)
    while True:
        at, share = next_share(task, notes)
        if at < 0:
            break
        numbers = carray(float32_at(task[at]), (task[at + 1],))
        for i in range(5 * share, min(5 * share + 5, len(numbers))):
            numbers[i] *= 2


def double_all(loop: Loop, *several: torch.Tensor) -> None:
    loop.run(
        task_of(
            [(-(-len(numbers) // 5), [numbers.data_ptr(), len(numbers)]) for numbers in several]
        )
    )


def doubles(loop: Loop) -> bool:
    numbers = torch.arange(7.0)
    double_all(loop, numbers)
    return numbers.tolist() == [0, 2, 4, 6, 8, 10, 12]


@pytest.fixture(scope="module")
def doubling() -> Loop:
    return compiled(double)


@pytest.mark.parametrize("team", [True, False], ids=["torch's threads", "threads of our own"])
@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_every_share_of_every_item_is_done_once(
    monkeypatch: pytest.MonkeyPatch,
    doubling: Loop,
    threads: int,
    team: bool,
    set_threads: Callable[[int], None],
) -> None:
    if not team:
        monkeypatch.setattr(room, "_team", lambda process: None)
    several = [torch.ones(n) for n in (0, 1, 5, 6, 100_003, 0, 40, 2)]
    set_threads(threads)
    for _ in range(3):
        double_all(doubling, *several)
    assert all((numbers == 8).all() for numbers in several)


def test_a_task_without_items_is_done(doubling: Loop) -> None:
    double_all(doubling)


def test_shares_are_done_where_only_one_thread_comes(
    doubling: Loop, set_threads: Callable[[int], None]
) -> None:
    """OpenMP may grant fewer threads than were asked for."""
    numbers = torch.ones(1001)
    set_threads(4)
    task = task_of([(201, [numbers.data_ptr(), 1001])])
    doubling.call(task.buffer_info()[0])
    assert (numbers == 2).all()


def stumble(task: Any) -> None:
    """Raises inside its fourth share, as a loop does that finds no memory."""
    notes = begin(task)
    while True:
        at, share = next_share(task, notes)
        if at < 0:
            break
        if share == 3:
            raise ValueError


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("threads", [1, 3])
def test_a_share_that_was_not_done_is_told(
    threads: int, set_threads: Callable[[int], None]
) -> None:
    """numba prints what is raised in a loop, and goes on: noise would be missing, and nobody the wiser."""
    set_threads(threads)
    with pytest.raises(MemoryError, match="of 7 shares of a compiled loop were not done"):
        Loop(cfunc(room._TASK)(stumble)).run(task_of([(7, [0])]))


def test_a_forked_process_has_no_team() -> None:
    """A fork takes no threads along: whoever waits for them waits for ever."""
    assert room._team(os.getpid() + 1) is None


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of compiled code."""
    monkeypatch.setattr(room, "cache_folder", lambda: tmp_path)
    return tmp_path


def test_code_is_compiled_once_and_then_read(kept: Path) -> None:
    assert compiled(double).code.cache_hits == 0
    assert compiled(double).code.cache_hits == 1


def test_the_folder_of_compiled_code_is_named_by_the_sources(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = room.cache_folder()
    (tmp_path / "jit.py").write_text("changed")
    monkeypatch.setattr(room, "__file__", str(tmp_path / "jit.py"))
    assert room.cache_folder.__wrapped__() != before


def test_where_nothing_can_be_kept_loops_are_compiled_anew(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (kept / "file").touch()
    monkeypatch.setattr(room, "cache_folder", lambda: kept / "file" / "folder")
    assert doubles(compiled(double))


def test_a_file_that_was_cut_short_is_not_used(kept: Path) -> None:
    compiled(double)
    for file in (*kept.rglob("*.nbc"), *kept.rglob("*.nbi")):
        file.write_bytes(file.read_bytes()[:50])
    assert doubles(compiled(double))
