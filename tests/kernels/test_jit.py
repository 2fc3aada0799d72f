"""Compiled loops: threads share the chunks, every one is done once, and code is kept on disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from numba import carray, cfunc

from zdp_bench.kernels import jit
from zdp_bench.kernels.jit import (
    ARGUMENTS,
    CompiledLoop,
    compile_loop,
    first_chunk,
    float32_at,
    next_chunk,
)


def double(work: Any) -> None:
    """Double numbers, five in a chunk. Arguments: address and length."""
    numbers = carray(float32_at(work[ARGUMENTS]), (work[ARGUMENTS + 1],))
    chunk = first_chunk(work)
    while chunk >= 0:
        for i in range(5 * chunk, min(5 * chunk + 5, len(numbers))):
            numbers[i] *= 2
        chunk = next_chunk(work)


def doubles(loop: CompiledLoop, length: int = 100_003) -> bool:
    numbers = torch.ones(length)
    loop.run(-(-length // 5), [numbers.data_ptr(), length])
    return bool((numbers == 2).all())


@pytest.fixture(scope="module")
def doubling() -> CompiledLoop:
    return compile_loop(double)


@pytest.mark.parametrize("team", [True, False], ids=["torch's threads", "threads of our own"])
@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_every_chunk_is_done_once(
    monkeypatch: pytest.MonkeyPatch,
    doubling: CompiledLoop,
    threads: int,
    team: bool,
    set_threads: Callable[[int], None],
) -> None:
    if not team:
        monkeypatch.setattr(jit, "_torch_team", lambda process: None)
    set_threads(threads)
    assert all(doubles(doubling, length) for length in (0, 1, 5, 6, 100_003))


def test_chunks_are_done_if_fewer_threads_come(
    monkeypatch: pytest.MonkeyPatch, doubling: CompiledLoop, set_threads: Callable[[int], None]
) -> None:
    """OpenMP may grant fewer threads than were asked for."""
    one = lambda address, place, threads, flags: doubling._call(place)  # noqa: E731
    monkeypatch.setattr(jit, "_torch_team", lambda process: one)
    set_threads(4)
    assert doubles(doubling)


def stumble(work: Any) -> None:
    """Raise inside the fourth chunk, as a loop does that finds no memory."""
    chunk = first_chunk(work)
    while chunk >= 0:
        if chunk == 3:
            raise ValueError
        chunk = next_chunk(work)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_in_a_chunk_is_raised(threads: int, set_threads: Callable[[int], None]) -> None:
    """numba prints an exception in a loop and goes on: noise would be missing, unnoticed."""
    set_threads(threads)
    with pytest.raises(MemoryError, match="of 7 chunks of a compiled loop were not done"):
        CompiledLoop(cfunc(jit._WORK)(stumble)).run(7, [])


def test_a_forked_process_has_no_team() -> None:
    """A fork takes no threads along: whoever waits for them waits for ever."""
    assert jit._torch_team(os.getpid() + 1) is None


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of compiled code."""
    monkeypatch.setattr(jit, "cache_folder", lambda: tmp_path)
    return tmp_path


def test_code_is_compiled_once_and_then_read(kept: Path) -> None:
    assert compile_loop(double).code.cache_hits == 0
    assert compile_loop(double).code.cache_hits == 1


def test_the_folder_of_compiled_code_is_named_by_the_sources(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = jit.cache_folder()
    (tmp_path / "jit.py").write_text("changed")
    monkeypatch.setattr(jit, "__file__", str(tmp_path / "jit.py"))
    assert jit.cache_folder.__wrapped__() != before


def test_where_nothing_can_be_kept_loops_are_compiled_anew(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (kept / "file").touch()
    monkeypatch.setattr(jit, "cache_folder", lambda: kept / "file" / "folder")
    assert doubles(compile_loop(double))


def test_a_file_that_was_cut_short_is_not_used(kept: Path) -> None:
    compile_loop(double)
    for file in (*kept.rglob("*.nbc"), *kept.rglob("*.nbi")):
        file.write_bytes(file.read_bytes()[:50])
    assert doubles(compile_loop(double))
