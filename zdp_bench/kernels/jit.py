"""Loops that become machine code, by numba, and threads that share them: for what would take torch ten passes over memory."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import pickle
import struct
import warnings
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal

import numba.core.config
import numpy as np
import torch
from numba import cfunc, njit, types
from numba.core.errors import NumbaWarning
from numba.extending import intrinsic

from zdp_bench import __version__

_config: Any = numba.core.config
logging.getLogger("numba").setLevel(
    logging.WARNING
)  # under `hydra.verbose=true` it tells every step of its compiler


class Loop:
    """A compiled loop over the shares of a task, that any number of threads may run at once.

    A task (`task_of`) is words of 64 bits: a count of shares taken, and whatever the loop reads. Each thread takes a share, works
    on it, and takes another until there is none (`next_share`): every share is done once, whoever comes.
    """

    def __init__(self, code: Any) -> None:
        self.code, self.address = code, code.address  # one holds the other
        self.call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(code.address)

    def run(self, task: array[int]) -> None:
        """Work on all shares of a task.

        The threads are torch's own, where they answer: those wait for work a while before they sleep, and keep others from
        their processors as long. It lets go of the interpreter's lock meanwhile.

        Raises:
            MemoryError: a thread ended inside a share (numba only prints what is raised there): what was asked is done in part.
        """
        where, threads = task.buffer_info()[0], task[_THREADS]
        if threads == 1:
            self.call(where)
        elif (team := _team(os.getpid())) is not None:
            team(self.address, where, threads, 0)
        else:
            others = [
                _pool(os.getpid(), threads - 1).submit(self.call, where) for _ in range(1, threads)
            ]
            self.call(where)
            for other in others:
                other.result()
        if task[_DONE] != task[_SHARES]:
            raise MemoryError(
                f"{task[_SHARES] - task[_DONE]} of {task[_SHARES]} shares of a compiled loop were not done"
            )


def compiled(loop: Callable[[Any], None]) -> Loop:
    """Compile a loop over a task's shares, or read its machine code from `cache_folder`.

    Its arithmetic is IEEE's, operation by operation: the same bits on every processor, except where
    a loop calls what may reorder sums. (Processors without fused products, older than 2013, take
    ten times as long.)
    """
    options: dict[str, Any] = {"error_model": "numpy"}
    before = _config.CACHE_DIR
    with warnings.catch_warnings():
        # Code of processors without fused products cannot be kept.
        warnings.simplefilter("ignore", NumbaWarning)
        try:
            _config.CACHE_DIR = str(cache_folder())
            return Loop(cfunc(_TASK, cache=True, **options)(loop))
        except (RuntimeError, OSError, EOFError, pickle.UnpicklingError):
            # No folder can be written, the disk is full, or a file was cut short.
            return Loop(cfunc(_TASK, **options)(loop))
        finally:
            _config.CACHE_DIR = before


@cache
def cache_folder() -> Path:
    """The folder of compiled code, named by this package's version and a hash of the kernels.

    numba itself compares the date of one file only, and loops are made of several files' pieces.
    """
    sources = b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py")))
    root = Path(_config.CACHE_DIR or os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    name = f"kernels-{__version__}-{hashlib.sha256(sources).hexdigest()[:16]}"
    return root.expanduser() / "zdp-bench" / name


_TASK = types.void(types.CPointer(types.int64))
inlined: Callable[[Callable[..., Any]], Callable[..., Any]] = njit(
    inline="always"
)  # a piece of a compiled loop


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


@njit(fastmath={"reassoc", "contract"}, error_model="numpy")
def sum_of_squares(numbers: Any) -> Any:
    """Float32 numbers', summed in float64 and in whatever order is fastest."""
    wide_vectors()
    total = 0.0
    for i in range(len(numbers)):
        x = types.float64(numbers[i])
        total += x * x
    return total


@_intrinsic
def fused(context: Any, a: Any, b: Any, c: Any) -> Any:
    """a·b + c of float32 numbers, rounded once."""
    f32 = types.float32
    return f32(f32, f32, f32), lambda context, builder, signature, arguments: builder.fma(
        *arguments
    )


@_intrinsic
def plus(context: Any, a: Any, b: Any) -> Any:
    """a + b mod 2³²; numba's own sum of two words has 64 bits."""
    return types.uint32(
        types.uint32, types.uint32
    ), lambda context, builder, signature, arguments: builder.add(*arguments)


@_intrinsic
def rotated(context: Any, word: Any, bits: Any) -> Any:
    """The word turned left."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word, bits = arguments
        return builder.or_(
            builder.shl(word, bits), builder.lshr(word, builder.sub(bits.type(32), bits))
        )

    return types.uint32(types.uint32, types.uint32), code


def task_of(items: list[tuple[int, list[int]]]) -> array[int]:
    """A task of items, each so many shares and words of its own, as many as any other's; for as many threads as torch uses.

    Each thread begins with a stretch of its own, the same as torch's loops give it, whose numbers lie in its cache; and then
    helps the others.
    """
    shares, of_items = 0, array("q")
    for its_shares, own in items:
        of_items.append(shares)
        of_items.fromlist(own)
        shares += its_shares
    threads = max(1, min(torch.get_num_threads(), shares))
    width = 1 + len(items[0][1]) if items else 0
    words = array(
        "q",
        (0, 0, shares, threads, width, _TAKEN + threads + len(of_items), *[0] * threads),
    )
    return words + of_items


@lru_cache(maxsize=4096)
def word_of(number: float, kind: Literal["<f", "<d"]) -> int:
    """The bits of a float32 or float64, as a word of a task."""
    return int.from_bytes(struct.pack(kind, number), "little", signed=True)


# Words in front of the items: threads that came, shares that are done, all shares, threads, words
# an item, words in all, and shares taken of each thread's stretch.
_COME, _DONE, _SHARES, _THREADS, _WIDTH, _END, _TAKEN = range(7)


@_intrinsic
def counted(context: Any, words: Any, at: Any, by: Any) -> Any:
    """Counts a word up; what it was, which no other thread is told. What was written before is there for those that count on."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = builder.gep(arguments[0], [arguments[1]])
        return builder.atomic_rmw("add", word, arguments[2], "acq_rel")

    return types.int64(types.CPointer(types.int64), types.int64, types.int64), code


@inlined
def begin(task: Any) -> Any:
    """A thread's own notes on a task: whose stretch it begins with, how many stretches it has seen the end of, and how many
    shares it has taken."""
    notes = np.zeros(3, np.int64)
    notes[0] = counted(task, _COME, 1)
    return notes


@inlined
def next_share(task: Any, notes: Any) -> Any:
    """Where the words of its item begin, and which of the item's shares it is; a negative place where all are taken."""
    shares, threads, width = task[_SHARES], task[_THREADS], task[_WIDTH]
    at, share = -1, 0
    while at < 0 and notes[1] < threads:
        whose = (notes[0] + notes[1]) % threads
        share = shares * whose // threads + counted(task, _TAKEN + whose, 1)
        if share < shares * (whose + 1) // threads:
            at = _TAKEN + threads
        else:
            notes[1] += 1
    if at >= 0:
        while at + width < task[_END] and task[at + width] <= share:
            at += width
        share -= task[at]
        at += 1
        notes[2] += 1
    else:  # whoever comes to ask for more has done what it took
        counted(task, _DONE, notes[2])
    return at, share


def _place_of(kind: Any) -> Callable[..., Any]:
    def place(context: Any, address: Any) -> Any:
        pointer = types.CPointer(kind)

        def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(pointer))

        return pointer(types.int64), code

    return _intrinsic(place)


# A word of a task as the place of such numbers.
float32_at, float64_at, int64_at = (
    _place_of(types.float32),
    _place_of(types.float64),
    _place_of(types.int64),
)


@cache
def _team(process: int) -> Callable[[int, int, int, int], None] | None:
    """Has a function run on every one of so many of torch's threads, the caller's own among them. None where torch's are not
    OpenMP's, or are another process's: a fork takes no threads along."""
    if process != _HOME or not torch.backends.openmp.is_available():
        return None
    try:
        parallel = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):  # another system's OpenMP
        return None
    parallel.argtypes, parallel.restype = (
        [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint],
        None,
    )
    return parallel


_HOME = os.getpid()


def side_by_side(work: Callable[[int, int], None], count: int, unit: int, alone: int) -> None:
    """`work(start, stop)` over 0..count, cut at multiples of `unit` into as many parts as torch uses threads; in one for a count
    up to `alone`, for which handing over would eat the gain.

    Threads of our own: what they call lets go of the interpreter's lock while it computes.
    """
    threads = torch.get_num_threads() if count > alone else 1
    cuts = [*(count * i // threads // unit * unit for i in range(threads)), count]
    others = [
        _pool(os.getpid(), threads - 1).submit(work, *cuts[i : i + 2]) for i in range(1, threads)
    ]
    work(cuts[0], cuts[1])
    for other in others:
        other.result()


@cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """The threads beside the caller's own; a process's own, for a fork takes no threads along."""
    return ThreadPoolExecutor(max_workers=threads, thread_name_prefix="side-by-side")
