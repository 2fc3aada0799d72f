"""Vectors of 16 float32 numbers in compiled loops: what a loop of many sums is written in where numba finds no vectors by itself.

Each piece writes LLVM's code for one step; `builder` is the place it writes to. A product and its sum are one operation,
rounded once, on every processor. `tile` makes of a piece what a compiled loop can call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import Parameter, Signature
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
FLOATS, WORDS = (
    types.CPointer(types.float32),
    types.CPointer(types.int64),
)  # places of numbers, and of words of 64 bits
_VECTOR, _WORD = ir.VectorType(ir.FloatType(), LANES), ir.IntType(64)
ZEROS = ir.Constant(_VECTOR, [0.0] * LANES)


def tile(arguments: Sequence[Any], code: Callable[..., None]) -> Callable[..., None]:
    """A function for compiled loops, of arguments of these types, whose code `code(builder, *arguments)` writes."""

    def typing(context: Any, *kinds: Any) -> Any:
        def written(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            code(builder, *values)
            return context.get_dummy_value()

        return types.none(*arguments), written

    names = [
        "context",
        *(f"argument{i}" for i in range(len(arguments))),
    ]  # numba asks the function how many it takes
    typing.__signature__ = Signature([Parameter(name, Parameter.POSITIONAL_ONLY) for name in names])  # type: ignore[attr-defined]
    return intrinsic(typing)


def at(builder: Any, place: Any, *further: Any) -> Any:
    """The place so many numbers further."""
    for step in further:
        place = builder.gep(place, [step if isinstance(step, ir.Value) else _WORD(step)])
    return place


def steps(builder: Any, place: Any, step: Any, count: int) -> list[Any]:
    """Places a step apart."""
    places = [place]
    while len(places) < count:
        places.append(at(builder, places[-1], step))
    return places


def load(builder: Any, place: Any) -> Any:
    return builder.load(builder.bitcast(place, _VECTOR.as_pointer()), align=4)


def load_first(builder: Any, place: Any, count: Any) -> Any:
    """So many numbers, or 16 where there are more, and zeros behind them: nothing there is read."""
    lanes = ir.VectorType(ir.IntType(32), LANES)
    wanted = builder.insert_element(
        ir.Constant(lanes, ir.Undefined), builder.trunc(count, ir.IntType(32)), ir.IntType(32)(0)
    )
    mask = builder.icmp_signed(
        "<", ir.Constant(lanes, list(range(LANES))), _picked(builder, wanted, wanted, [0] * LANES)
    )
    masked = cgutils.get_or_insert_function(builder.module, _MASKED, "llvm.masked.load.v16f32.p0")
    return builder.call(
        masked, (builder.bitcast(place, _VECTOR.as_pointer()), ir.IntType(32)(4), mask, ZEROS)
    )


_MASKED = ir.FunctionType(
    _VECTOR, [_VECTOR.as_pointer(), ir.IntType(32), ir.VectorType(ir.IntType(1), LANES), _VECTOR]
)


def store(builder: Any, vector: Any, place: Any) -> None:
    builder.store(vector, builder.bitcast(place, vector.type.as_pointer()), align=4)


def store_past(builder: Any, vector: Any, place: Any) -> None:
    """A whole line of memory, which begins there, past the caches: it is not read before, as one that is kept would be."""
    stored = builder.store(
        vector, builder.bitcast(place, vector.type.as_pointer()), align=4 * LANES
    )
    stored.set_metadata("nontemporal", builder.module.add_metadata([ir.IntType(32)(1)]))


def foreseen(builder: Any, place: Any, to_write: bool = False) -> None:
    """The line of memory around a place comes to the core's larger cache, or to write it to the smaller one, while other work
    goes on. Any place is allowed."""
    fetch = cgutils.get_or_insert_function(builder.module, _FETCH, "llvm.prefetch.p0")
    write, locality, data = (
        ir.IntType(32)(number) for number in ((1, 3, 1) if to_write else (0, 2, 1))
    )
    builder.call(fetch, (builder.bitcast(place, _BYTES), write, locality, data))


_BYTES = ir.IntType(8).as_pointer()
_FETCH = ir.FunctionType(ir.VoidType(), [_BYTES, ir.IntType(32), ir.IntType(32), ir.IntType(32)])


def everywhere(builder: Any, number: Any) -> Any:
    """The number in every lane."""
    first = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), number, ir.IntType(32)(0))
    return _picked(builder, first, first, [0] * LANES)


def exchanged(builder: Any, vector: Any) -> Any:
    """The 8 complex numbers of a vector, real parts and imaginary ones in each other's place."""
    return _picked(builder, vector, vector, [lane ^ 1 for lane in range(LANES)])


def turned(builder: Any, vector: Any) -> Any:
    """i times the 8 complex numbers of a vector: (−imaginary, real) for (real, imaginary)."""
    other = exchanged(builder, vector)
    return _picked(
        builder,
        other,
        builder.fneg(other),
        [lane if lane % 2 else LANES + lane for lane in range(LANES)],
    )


def parted(builder: Any, a: Any, b: Any) -> tuple[Any, Any]:
    """The real parts of the 16 complex numbers of two vectors, and the imaginary ones."""
    return _picked(builder, a, b, list(range(0, 2 * LANES, 2))), _picked(
        builder, a, b, list(range(1, 2 * LANES, 2))
    )


def woven(builder: Any, real: Any, imaginary: Any) -> tuple[Any, Any]:
    """Two vectors of 8 complex numbers each, of 16 parts of either kind."""
    lanes = [lane for i in range(LANES) for lane in (i, LANES + i)]
    return _picked(builder, real, imaginary, lanes[:LANES]), _picked(
        builder, real, imaginary, lanes[LANES:]
    )


def fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """a·b + c, lane by lane, rounded once."""
    return builder.call(
        cgutils.get_or_insert_function(builder.module, _FUSED, "llvm.fma.v16f32"), (a, b, c)
    )


_FUSED = ir.FunctionType(_VECTOR, [_VECTOR] * 3)


def repeated(
    builder: Any, count: Any, carried: list[Any], body: Callable[[Any, list[Any]], list[Any]]
) -> list[Any]:
    """`carried = body(i, carried)` for i in 0..count, at least once; what is carried stays in registers."""
    before, within = builder.block, builder.append_basic_block("within")
    builder.branch(within)
    builder.position_at_end(within)
    i = builder.phi(_WORD)
    values = [builder.phi(value.type) for value in carried]
    new = body(i, values)
    following = builder.add(i, _WORD(1))
    for phi, first, next_ in zip(
        [i, *values], [_WORD(0), *carried], [following, *new], strict=True
    ):
        phi.add_incoming(first, before)
        phi.add_incoming(next_, builder.block)
    behind = builder.append_basic_block("behind")
    builder.cbranch(builder.icmp_signed("<", following, count), within, behind)
    builder.position_at_end(behind)
    return new


def sums(builder: Any, vectors: list[Any]) -> Any:
    """The sums over lanes of up to 16 vectors, in one: lane i has vector i's. Of as many the vector is as there are.

    Two vectors are folded into one, half of whose lanes are of either, and so on: 15 sums in all.
    """
    many, width = [*vectors, *[ZEROS] * (LANES - len(vectors))], LANES
    while width > 1:
        blocks = list(range(0, 2 * LANES, width))
        low = [first + j for first in blocks for j in range(width // 2)]
        high = [first + width // 2 + j for first in blocks for j in range(width // 2)]
        pairs = zip(many[::2], many[1::2], strict=True)
        many = [
            builder.fadd(_picked(builder, a, b, low), _picked(builder, a, b, high))
            for a, b in pairs
        ]
        width //= 2
    return (
        many[0]
        if len(vectors) == LANES
        else _picked(builder, many[0], many[0], list(range(len(vectors))))
    )


def _picked(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    """Lanes of two vectors, the second's counted from 16."""
    return builder.shuffle_vector(
        a, b, ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes)
    )


copied = tile(
    [FLOATS, FLOATS, types.int64],
    lambda builder, to, source, count: cgutils.raw_memcpy(builder, to, source, count, 4),
)


def _further(context: Any, place: Any, count: Any) -> Any:
    return place(place, types.int64), lambda context, builder, signature, values: at(
        builder, *values
    )


further: Callable[..., Any] = intrinsic(_further)  # the place so many numbers, or words, further
