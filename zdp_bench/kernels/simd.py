"""Vectors of 16 float32 numbers in compiled loops, for sums that numba does not vectorise.

Each function writes LLVM's code for one step; `builder` is the place it writes to. A product and
its sum are one operation, rounded once. `as_function` makes a function for compiled loops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import Parameter, Signature
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from zdp_bench.kernels.jit import as_intrinsic

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
