"""Compilation of loops by numba, the folder of their machine code, and the threads they run on.

And what loops are written in. Vectors of 16 float32 numbers are for sums that numba does not
vectorise: each function writes LLVM's code for one step; `builder` is the place it writes to. A
product and its sum are one operation, rounded once. `as_function` makes a function for loops.
"""

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
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

import numba.core.config
import torch
from llvmlite import ir
from numba import cfunc, njit, types
from numba.core import cgutils
from numba.core.errors import NumbaWarning
from numba.extending import intrinsic

from zdp_bench import __version__, caches

_config: Any = numba.core.config
# numba logs every step of its compiler under `hydra.verbose=true`.
logging.getLogger("numba").setLevel(logging.WARNING)

_WORK = types.void(types.CPointer(types.int64))
# The first words of a loop's work: chunks that threads have taken and finished, and all chunks.
_TAKEN, _FINISHED, _CHUNKS, ARGUMENTS = range(4)


class CompiledLoop:
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


def compile_loop(loop: Callable[[Any], None]) -> CompiledLoop:
    """Compile a loop over the chunks of some work, or read its machine code from `cache_folder`.

    Its arithmetic is IEEE's, operation by operation: the same bits on every processor, except where
    a loop calls what may reorder sums. (Processors without fused products, older than 2013, take
    ten times as long.)
    """
    options: dict[str, Any] = {"error_model": "numpy"}
    before = _config.CACHE_DIR
    if (folder := cache_folder()) is None:
        return CompiledLoop(cfunc(_WORK, **options)(loop))
    with warnings.catch_warnings():
        # Code of processors without fused products cannot be kept.
        warnings.simplefilter("ignore", NumbaWarning)
        try:
            _config.CACHE_DIR = str(folder)
            return CompiledLoop(cfunc(_WORK, cache=True, **options)(loop))
        except (RuntimeError, OSError, EOFError, pickle.UnpicklingError):
            # No folder can be written, the disk is full, or a file was cut short.
            return CompiledLoop(cfunc(_WORK, **options)(loop))
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


# ------------------------------------------------------------------ vectors of 16 float32 numbers

LANES = 16
FLOATS, WORDS = types.CPointer(types.float32), types.CPointer(types.int64)
_INT32 = ir.IntType(32)
_VECTOR, _WORD = ir.VectorType(ir.FloatType(), LANES), ir.IntType(64)
_MASK, _BYTES = ir.VectorType(ir.IntType(1), LANES), ir.IntType(8).as_pointer()
ZEROS = ir.Constant(_VECTOR, [0.0] * LANES)


def as_function(arguments: Sequence[Any], code: Callable[..., None]) -> Callable[..., None]:
    """A function of arguments of these types, whose body `code(builder, *arguments)` writes."""

    def typing(context: Any, *kinds: Any) -> Any:
        def body(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            code(builder, *values)
            return context.get_dummy_value()

        return types.none(*arguments), body

    # numba asks the function how many arguments it takes.
    names = ["context", *(f"argument{i}" for i in range(len(arguments)))]
    parameters = [Parameter(name, Parameter.POSITIONAL_ONLY) for name in names]
    typing.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return as_intrinsic(typing)


def offset(builder: Any, pointer: Any, *steps: Any) -> Any:
    """The pointer moved by so many numbers."""
    for step in steps:
        pointer = builder.gep(pointer, [step if isinstance(step, ir.Value) else _WORD(step)])
    return pointer


def strided(builder: Any, pointer: Any, step: Any, count: int) -> list[Any]:
    """`count` pointers that are `step` numbers apart."""
    pointers = [pointer]
    while len(pointers) < count:
        pointers.append(offset(builder, pointers[-1], step))
    return pointers


def load(builder: Any, pointer: Any) -> Any:
    """A vector from memory of any alignment."""
    return builder.load(builder.bitcast(pointer, _VECTOR.as_pointer()), align=4)


def load_first(builder: Any, pointer: Any, count: Any) -> Any:
    """The first `count` numbers, at most 16, and zeros behind; nothing behind them is read."""
    lanes = ir.VectorType(_INT32, LANES)
    empty = ir.Constant(lanes, ir.Undefined)
    wanted = builder.insert_element(empty, builder.trunc(count, _INT32), _INT32(0))
    wanted = _shuffle(builder, wanted, wanted, [0] * LANES)
    mask = builder.icmp_signed("<", ir.Constant(lanes, list(range(LANES))), wanted)
    arguments = [_VECTOR.as_pointer(), _INT32, _MASK, _VECTOR]
    place = builder.bitcast(pointer, _VECTOR.as_pointer())
    return _call(
        builder, "llvm.masked.load.v16f32.p0", _VECTOR, arguments, (place, _INT32(4), mask, ZEROS)
    )


def store(builder: Any, vector: Any, pointer: Any) -> None:
    """Write a vector to memory of any alignment."""
    builder.store(vector, builder.bitcast(pointer, vector.type.as_pointer()), align=4)


def prefetch(builder: Any, pointer: Any) -> None:
    """Bring the cache line at `pointer` to the core's second cache. Any address is safe."""
    arguments = [_BYTES, _INT32, _INT32, _INT32]
    values = (builder.bitcast(pointer, _BYTES), _INT32(0), _INT32(2), _INT32(1))
    _call(builder, "llvm.prefetch.p0", ir.VoidType(), arguments, values)


def broadcast(builder: Any, number: Any) -> Any:
    """The number in every lane."""
    first = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), number, _INT32(0))
    return _shuffle(builder, first, first, [0] * LANES)


def times_i(builder: Any, vector: Any) -> Any:
    """i times the 8 complex numbers of a vector: (−imaginary, real) for (real, imaginary)."""
    swapped = _shuffle(builder, vector, vector, [lane ^ 1 for lane in range(LANES)])
    lanes = [lane if lane % 2 else LANES + lane for lane in range(LANES)]
    return _shuffle(builder, swapped, builder.fneg(swapped), lanes)


def fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a·b + c, lane by lane, rounded once."""
    return _call(builder, "llvm.fma.v16f32", _VECTOR, [_VECTOR] * 3, (a, b, c))


def repeat(
    builder: Any, count: Any, carried: list[Any], body: Callable[[Any, list[Any]], list[Any]]
) -> list[Any]:
    """`carried = body(i, carried)` for i in 0..count, at least once; kept in registers."""
    before, inside = builder.block, builder.append_basic_block("inside")
    builder.branch(inside)
    builder.position_at_end(inside)
    i = builder.phi(_WORD)
    values = [builder.phi(value.type) for value in carried]
    new = body(i, values)
    following = builder.add(i, _WORD(1))
    starts, ends = [_WORD(0), *carried], [following, *new]
    for phi, start, end in zip([i, *values], starts, ends, strict=True):
        phi.add_incoming(start, before)
        phi.add_incoming(end, builder.block)
    after = builder.append_basic_block("after")
    builder.cbranch(builder.icmp_signed("<", following, count), inside, after)
    builder.position_at_end(after)
    return new


def sum_lanes(builder: Any, vectors: list[Any]) -> Any:
    """The sums over lanes of up to 16 vectors: lane i has vector i's, of as many lanes as vectors.

    Two vectors are folded into one, half of whose lanes are of either, and so on: 15 sums in all.
    """
    many, width = [*vectors, *[ZEROS] * (LANES - len(vectors))], LANES
    while width > 1:
        blocks, half = range(0, 2 * LANES, width), width // 2
        low = [first + j for first in blocks for j in range(half)]
        high = [lane + half for lane in low]
        many = [
            builder.fadd(_shuffle(builder, a, b, low), _shuffle(builder, a, b, high))
            for a, b in zip(many[::2], many[1::2], strict=True)
        ]
        width = half
    if len(vectors) == LANES:
        return many[0]
    return _shuffle(builder, many[0], many[0], list(range(len(vectors))))


def _shuffle(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    """Lanes of two vectors, the second's counted from 16."""
    kind = ir.VectorType(_INT32, len(lanes))
    return builder.shuffle_vector(a, b, ir.Constant(kind, lanes))


def _call(builder: Any, name: str, returns: Any, arguments: list[Any], values: Any) -> Any:
    """Call one of LLVM's intrinsics."""
    kind = ir.FunctionType(returns, arguments)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)


def _copying(builder: Any, to: Any, source: Any, count: Any) -> None:
    cgutils.raw_memcpy(builder, to, source, count, 4)


copy = as_function([FLOATS, FLOATS, types.int64], _copying)


def _advancing(context: Any, pointer: Any, count: Any) -> Any:
    return pointer(pointer, types.int64), lambda context, builder, signature, values: offset(
        builder, *values
    )


advance = as_intrinsic(_advancing)  # the pointer, moved by so many numbers or words
