"""Loops that become machine code, by numba, and threads that share them: for what would take torch ten passes over memory."""

from __future__ import annotations

import logging
import os
import pickle
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numba
import torch
from numba import njit, types
from numba.core.errors import NumbaWarning
from numba.extending import intrinsic

logging.getLogger("numba").setLevel(logging.WARNING)  # under `hydra.verbose=true` it tells every step of its compiler


def compiled(function: Callable[..., None], right: Callable[[Callable[..., None]], bool]) -> Callable[..., None]:
    """The machine code of a loop: what an earlier process kept on disk where that is `right`, else made anew, in seconds.

    numba tells by one file's date whether kept code is today's, and may keep it under the wrong date when a disk is full: so
    `right` calls the code and looks at what it does.

    It lets go of the interpreter's lock while it runs. Its arithmetic is IEEE's, operation by operation: the same bits on every
    processor. (Those without fused products, older than 2013, take ten times as long.)

    Raises:
        RuntimeError: not even new code is right.
    """
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumbaWarning)  # that code of such old processors cannot be kept
        try:
            kept = njit(cache=True, **options)(function)
            if right(kept):
                return kept
        except (RuntimeError, OSError, EOFError, pickle.UnpicklingError):  # no folder, a full disk, a file cut short
            pass
        fresh = njit(**options)(function)
        if not right(fresh):
            raise RuntimeError(f"{function.__name__}: the code that numba {numba.__version__} makes for this machine is wrong")
        return fresh


inlined: Callable[[Callable[..., Any]], Callable[..., Any]] = njit(inline="always")  # a piece of a compiled loop


def _intrinsic(code: Callable[..., Any]) -> Callable[..., Any]:
    """mypy takes numba's typing context for an argument of the call."""
    return intrinsic(code)


@_intrinsic
def wide_vectors(context: Any) -> Any:
    """The loop it is called in uses the widest vectors there are; LLVM would halve AVX-512's for fear of a slower clock, which
    processors since 2019 do not have. (llvmlite knows no attribute of this name, so it is set behind its back.)"""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.none(), code


@_intrinsic
def fused(context: Any, a: Any, b: Any, c: Any) -> Any:
    """a·b + c of float32 numbers, rounded once."""
    f32 = types.float32
    return f32(f32, f32, f32), lambda context, builder, signature, arguments: builder.fma(*arguments)


@_intrinsic
def plus(context: Any, a: Any, b: Any) -> Any:
    """a + b mod 2³²; numba's own sum of two words has 64 bits."""
    return types.uint32(types.uint32, types.uint32), lambda context, builder, signature, arguments: builder.add(*arguments)


@_intrinsic
def rotated(context: Any, word: Any, bits: Any) -> Any:
    """The word turned left."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word, bits = arguments
        return builder.or_(builder.shl(word, bits), builder.lshr(word, builder.sub(bits.type(32), bits)))

    return types.uint32(types.uint32, types.uint32), code


def side_by_side(work: Callable[[int, int], None], count: int, unit: int, alone: int) -> None:
    """`work(start, stop)` over 0..count, cut at multiples of `unit` into as many parts as torch uses threads; in one for a count
    up to `alone`, for which handing over would eat the gain.

    Threads of our own, not OpenMP's: what they call lets go of the interpreter's lock while it computes.
    """
    threads = torch.get_num_threads() if count > alone else 1
    cuts = [*(count * i // threads // unit * unit for i in range(threads)), count]
    others = [_pool(os.getpid(), threads - 1).submit(work, *cuts[i : i + 2]) for i in range(1, threads)]
    work(cuts[0], cuts[1])
    for other in others:
        other.result()


@cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """The threads beside the caller's own; a process's own, for a fork takes no threads along."""
    return ThreadPoolExecutor(max_workers=threads, thread_name_prefix="side-by-side")
