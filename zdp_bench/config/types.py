"""Values checked against the types of a dataclass or of a builder's parameters.

A type may carry rules for its values: `Annotated[int, at_least(1)]`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from zdp_bench.errors import UserError, require, unknown
from zdp_bench.privacy.mechanism import LEAST_NOISE, MOST, MOST_NOISE

T = TypeVar("T")
REQUIRED = "???"  # the default of a parameter that has none; Hydra's word for a value to be given
WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    NoneType: "null",
}
# What YAML and Hydra leave as text or as a number.
TRUTHS = {"y": True, "yes": True, "on": True, "true": True, "1": True}
TRUTHS |= {"n": False, "no": False, "off": False, "false": False, "0": False}


@dataclass(frozen=True)
class Rule:
    """What a value must be beside its type, and the words for it."""

    holds: Callable[[Any], bool]
    words: str


def at_least(least: int) -> Rule:
    """Return the rule of numbers from `least` on."""
    return Rule(lambda x: x >= least, f"must be at least {least}" if least else "must be 0 or more")


def at_most(most: int, why: str = "") -> Rule:
    """Return the rule of numbers up to `most`."""
    return Rule(lambda x: x <= most, f"must be at most {most:,}{why}")


POSITIVE = Rule(lambda x: x > 0, "must be positive")
NOISE = Rule(
    lambda x: x == 0 or LEAST_NOISE <= x <= MOST_NOISE,
    f"must be 0, or lie in {LEAST_NOISE:g} to {MOST_NOISE:g}",
)
# Beyond, norms in single precision lose all digits.
NORM = Rule(lambda x: 1e-12 <= x <= 1e12, "must lie in 1e-12 to 1e+12")
Count = Annotated[int, at_least(1), at_most(MOST)]
Positive = Annotated[float, POSITIVE]
MOST_THREADS = max(256, 4 * (os.cpu_count() or 1))  # more than help, fewer than do harm
Threads = Annotated[int, at_least(1), at_most(MOST_THREADS, " on this machine")]
# Of a split or a pairing; libraries take no more bits.
SEED = Rule(lambda x: 0 <= x < 2**32, "must be 0 or more, and below 2³²")


def check_section(schema: type[T], values: dict[str, Any], prefix: str) -> T:
    """Return `values` as an instance of the dataclass `schema`.

    Raises:
        UserError: see `check_types`.
    """
    hints = get_type_hints(schema, include_extras=True)
    types = {field.name: (hints[field.name], REQUIRED) for field in fields(schema)}  # type: ignore[arg-type]
    return schema(**check_types(types, values, prefix))


def check_types(
    types: dict[str, tuple[Any, Any]], values: dict[str, Any], prefix: str
) -> dict[str, Any]:
    """Return `values`, converted to their types and completed by the defaults.

    Args:
        types: (type hint, default) by name; the default `REQUIRED` means there is none.
        prefix: the section, for error messages; empty at the top.

    Raises:
        UserError: a key is unknown, missing, of the wrong type or out of range; the sentence names
            the full key.
    """
    dot = f"{prefix}." if prefix else ""
    if not isinstance(values, dict):
        raise UserError(
            f"{prefix}={values}: is no value but a section; "
            f"set one of its keys, such as {dot}{next(iter(types))}."
        )
    for key in values:
        if key not in types:
            raise unknown("key", f"{dot}{key}", [f"{dot}{name}" for name in types])
    given = {key: values.get(key, default) for key, (_, default) in types.items()}
    if lacking := [key for key, value in given.items() if value == REQUIRED]:
        raise UserError(
            f"{dot}{min(lacking)} has no value: set it in the recipe or on the command line."
        )
    return {key: check_value(f"{dot}{key}", types[key][0], value) for key, value in given.items()}


def check_value(key: str, hint: Any, value: Any) -> Any:
    """Return one value, converted to its type, in the type's range.

    Raises:
        UserError: it is of another type, or out of range.
    """
    if "${" in str(value):  # of a record: whatever was composed here is resolved already
        raise UserError(f"{key}={value}: is looked up nowhere; say the value itself.")
    if (choices := _choices(hint)) and isinstance(value, str | int | float | None):
        if value not in choices:
            words = ["null" if one is None else str(one) for one in (value, *choices)]
            raise unknown(key, words[0], words[1:])
        return choices[choices.index(value)]
    try:
        converted = _convert(hint, value)
    except OverflowError:
        raise UserError(f"{key}: its value is too large for a number.") from None
    except (KeyError, TypeError, ValueError):
        shown = "null" if value is None else value
        raise UserError(f"{key}={shown}: {_describe(hint)}.") from None
    for rule in _rules(hint) if converted is not None else ():
        require(rule.holds(converted), key, converted, rule.words)
    return converted


def _convert(hint: Any, value: Any) -> Any:
    """Return a value as its type: 1 as 1.0, "1" as 1, [1] as [1.0].

    Raises:
        KeyError, ValueError, TypeError, OverflowError: it is none of that type.
    """
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _convert(inner[0], value)
    if origin in (Union, UnionType):
        return _convert_one_of([one for one in inner if one is not NoneType], value, hint)
    if origin in (list, tuple):
        if not isinstance(value, list | tuple):
            raise TypeError
        return [_convert(inner[0], one) for one in value]
    if origin is dict:
        items = value.items() if isinstance(value, dict) else _refuse()
        return {_convert(inner[0], name): _convert(inner[1], one) for name, one in items}
    if hint is bool:
        return TRUTHS[str(value).lower()] if isinstance(value, str | int) else _refuse()
    if hint is int:
        whole = type(value) in (int, str) or (type(value) is float and value.is_integer())
        return int(value) if whole else _refuse()
    if hint is float:  # 0, not -0
        return float(value) + 0.0 if type(value) in (int, float, str) else _refuse()
    if hint is str:
        text = str(value).lower() if isinstance(value, bool) else str(value)
        return text if isinstance(value, str | int | float) else _refuse()
    return value if hint is Any or isinstance(value, origin or hint) else _refuse()


def _convert_one_of(hints: list[Any], value: Any, whole: Any) -> Any:
    """Return a value as the first of the types that takes it; text is the last resort of text."""
    if value is None and NoneType in get_args(whole):
        return None
    if len(hints) == 1:
        return _convert(hints[0], value)
    for hint in hints if isinstance(value, str) else [one for one in hints if one is not str]:
        with suppress(KeyError, TypeError, ValueError):
            return _convert(hint, value)
    return _refuse()


def _refuse() -> Any:
    raise ValueError


def _choices(hint: Any) -> tuple[Any, ...]:
    """Return the values that a `Literal` allows, None among them if optional; () if it is none."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    inside = [_choices(one) for one in get_args(hint)]
    return (*(choice for one in inside for choice in one), None) if any(inside) else ()


def _rules(hint: Any) -> tuple[Rule, ...]:
    """Return the rules that a type carries, in its order."""
    own = [one for one in getattr(hint, "__metadata__", ()) if isinstance(one, Rule)]
    inside = [
        rule for one in get_args(hint) if get_origin(one) is Annotated for rule in _rules(one)
    ]
    return (*own, *inside)


def _describe(hint: Any) -> str:
    """Return in words what a value of this type must be."""
    inside = [one for one in get_args(hint) or (hint,) if one is not Ellipsis]
    if get_origin(hint) in (list, tuple):
        example = "[a,b]" if inside[0] is str else "[1,2]"
        return f"must be a list, each of it {_name(inside[0])}, such as {example}"
    if get_origin(hint) is Annotated or get_origin(inside[0]) in (list, tuple):
        return _describe(inside[0])
    return f"must be {' or '.join(_name(one) for one in inside)}"


def _name(hint: Any) -> str:
    plain = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    return WORDS.get(plain, str(plain))
