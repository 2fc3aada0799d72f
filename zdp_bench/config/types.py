"""Values checked against the types of a dataclass or of a builder's parameters."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import fields, make_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from zdp_bench.errors import UserError, first_line, unknown

_CHECKED: dict[str, dict[str, Any]] = {}
T = TypeVar("T")
REQUIRED = MISSING  # the default of a parameter that has none
WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    NoneType: "null",
}


def check_section(schema: type[T], values: dict[str, Any], prefix: str) -> T:
    """Return `values` as an instance of the dataclass `schema`.

    Raises:
        UserError: see `check_types`.
    """
    hints = get_type_hints(schema)
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
        UserError: a key is unknown, missing or of the wrong type; the sentence names the full key.
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
    known = repr((types, values))  # the jobs of a sweep have most sections in common
    if known not in _CHECKED:
        _CHECKED[known] = _convert(types, values, dot)
    return deepcopy(_CHECKED[known])


def _convert(types: dict[str, tuple[Any, Any]], values: dict[str, Any], dot: str) -> dict[str, Any]:
    plain = [(name, _without_literals(hint), default) for name, (hint, default) in types.items()]
    merged = OmegaConf.structured(make_dataclass("Options", plain))
    for key, value in values.items():
        if "${" in str(value):  # of a record: whatever was composed here is resolved already
            raise UserError(f"{dot}{key}={value}: is looked up nowhere; say the value itself.")
        try:
            merged[key] = value
        except OmegaConfBaseException as error:
            rule = _rule_of(_without_literals(types[key][0])) or first_line(error).rstrip(".")
            raise UserError(f"{dot}{key}={value}: {rule}.") from None
        except OverflowError:
            raise UserError(f"{dot}{key}: its value is too large for a number.") from None
    if lacking := OmegaConf.missing_keys(merged):
        raise UserError(
            f"{dot}{min(lacking)} has no value: set it in the recipe or on the command line."
        )
    checked = vars(OmegaConf.to_object(merged))
    for key, (hint, _) in types.items():
        if (choices := _choices(hint)) and checked[key] not in choices:
            shown = ["null" if choice is None else str(choice) for choice in choices]
            raise unknown(f"{dot}{key}", str(checked[key]), shown)
    return checked


def _choices(hint: Any) -> tuple[Any, ...]:
    """Return the values that a `Literal` allows, None among them if optional; () if it is none."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    inside = [_choices(one) for one in get_args(hint)]
    return (*(choice for one in inside for choice in one), None) if any(inside) else ()


def _without_literals(hint: Any) -> Any:
    """Return the hint with `str` for a `Literal`, which OmegaConf does not know."""
    choices = _choices(hint)
    return hint if not choices else str | None if None in choices else str


def _rule_of(hint: Any) -> str:
    """Return in words what a value of this type must be; empty if the type is not a simple one."""
    inside = [one for one in (get_args(hint) or (hint,)) if one is not Ellipsis]
    if get_origin(hint) is UnionType and get_origin(inside[0]) in (list, tuple):  # list[str] | None
        return _rule_of(inside[0])
    if not all(one in WORDS for one in inside):
        return ""
    if get_origin(hint) in (list, tuple):
        example = "[a,b]" if inside[0] is str else "[1,2]"
        return f"must be a list, each of it {WORDS[inside[0]]}, such as {example}"
    return f"must be {' or '.join(WORDS[one] for one in inside)}"
