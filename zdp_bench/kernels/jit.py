"""Compilation of loops by numba, the folder of their machine code, and the threads they run on."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import pickle
import warnings
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numba.core.config
import torch
from numba import cfunc, njit, types
from numba.core.errors import NumbaWarning
from numba.extending import intrinsic

from zdp_bench import __version__, caches

_config: Any = numba.core.config
# numba logs every step of its compiler under `hydra.verbose=true`.
logging.getLogger("numba").setLevel(logging.WARNING)

_WORK = types.void(types.CPointer(types.int64))
# The first words of a loop's work: chunks that threads have taken and finished, and all chunks.
_TAKEN, _FINISHED, _CHUNKS, ARGUMENTS = range(4)


class Loop:
    """A compiled loop over the chunks of some work, which any number of threads may run at once."""

    def __init__(self, code: Any) -> None:
        self.code = code  # keeps the machine code alive
        self._call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(code.address)

    def run(self, chunks: int, arguments: Sequence[int]) -> None:
        """Work on all chunks, on as many threads as torch uses, without the interpreter's lock.

        Args:
            arguments: 64-bit words that the loop reads from `work[ARGUMENTS]` on.

        Raises:
            MemoryError: a thread stopped inside a chunk, so the result is incomplete. (numba prints
                an exception that is raised in a loop, and goes on.)
        """
        work = array("q", (0, 0, chunks, *arguments))
        place, threads = work.buffer_info()[0], min(torch.get_num_threads(), chunks)
        if threads <= 1:
            self._call(place)
        elif (team := _torch_team(os.getpid())) is not None:
            team(self.code.address, place, threads, 0)
        else:
            pool = _pool(os.getpid(), threads)
            for done in [pool.submit(self._call, place) for _ in range(threads)]:
                done.result()
        if work[_FINISHED] != chunks:
            missing = f"{chunks - work[_FINISHED]} of {chunks}"
            raise MemoryError(f"{missing} chunks of a compiled loop were not done")


@cache
def _torch_team(process: int) -> Callable[[int, int, int, int], None] | None:
    """GOMP_parallel, which runs a function on torch's own threads; None if torch has no such team.

    torch's threads spin for a while after each task, and a second pool would compete with them. A
    forked process has none of them.
    """
    if process != _HOME or not torch.backends.openmp.is_available():
        return None
    try:
        parallel = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):  # another system's OpenMP
        return None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return parallel


@cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """Threads of this process; a forked process has none of its parent's."""
    return ThreadPoolExecutor(threads, thread_name_prefix="kernels")


_HOME = os.getpid()


def compile_loop(loop: Callable[[Any], None]) -> Loop:
    """Compile a loop over the chunks of some work, or read its machine code from `cache_folder`.

    Its arithmetic is IEEE's, operation by operation: the same bits on every processor, except where
    a loop calls what may reorder sums. (Processors without fused products, older than 2013, take
    ten times as long.)
    """
    options: dict[str, Any] = {"error_model": "numpy"}
    before = _config.CACHE_DIR
    if (folder := cache_folder()) is None:
        return Loop(cfunc(_WORK, **options)(loop))
    with warnings.catch_warnings():
        # Code of processors without fused products cannot be kept.
        warnings.simplefilter("ignore", NumbaWarning)
        try:
            _config.CACHE_DIR = str(folder)
            return Loop(cfunc(_WORK, cache=True, **options)(loop))
        except (RuntimeError, OSError, EOFError, pickle.UnpicklingError):
            # No folder can be written, the disk is full, or a file was cut short.
            return Loop(cfunc(_WORK, **options)(loop))
        finally:
            _config.CACHE_DIR = before


@cache
def cache_folder() -> Path | None:
    """The folder of compiled code, named by this package's version and a hash of the kernels.

    numba itself compares the date of one file only, and loops are made of several files' pieces.
    """
    sources = b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py")))
    name = f"kernels-{__version__}-{hashlib.sha256(sources).hexdigest()[:16]}"
    return caches.cache_folder(name, _config.CACHE_DIR)


# ------------------------------------------------------------------------ what loops are written in

inlined: Callable[[Callable[..., Any]], Callable[..., Any]] = njit(inline="always")


def as_intrinsic(code: Callable[..., Any]) -> Callable[..., Any]:
    """numba's `intrinsic`; mypy takes its typing context for an argument of the call."""
    return intrinsic(code)


@as_intrinsic
def use_wide_vectors(context: Any) -> Any:
    """Let the loop that calls this use the widest vectors there are.

    LLVM halves AVX-512's to keep the clock high, which processors since 2019 need not. llvmlite
    knows no attribute of this name, so it is added without its check.
    """

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.none(), code


@as_intrinsic
def add_atomically(context: Any, words: Any, index: Any, by: Any) -> Any:
    """Add to a word that other threads add to as well; return what it was before.

    Whoever adds later sees everything that was written before this call.
    """

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = builder.gep(arguments[0], [arguments[1]])
        return builder.atomic_rmw("add", word, arguments[2], "acq_rel")

    return types.int64(types.CPointer(types.int64), types.int64, types.int64), code


@inlined
def first_chunk(work: Any) -> Any:
    """Take a chunk for this thread: its number, or -1 if all are taken."""
    chunk = add_atomically(work, _TAKEN, 1)
    return chunk if chunk < work[_CHUNKS] else -1


@inlined
def next_chunk(work: Any) -> Any:
    """Count a chunk as finished, and take the next."""
    add_atomically(work, _FINISHED, 1)
    return first_chunk(work)


def _pointer_to(kind: Any) -> Callable[..., Any]:
    def code_of(context: Any, address: Any) -> Any:
        pointer = types.CPointer(kind)

        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(pointer))

        return pointer(types.int64), code

    return as_intrinsic(code_of)


# A word of a loop's work as the address of such numbers.
float32_at, float64_at, int64_at = map(_pointer_to, (types.float32, types.float64, types.int64))
