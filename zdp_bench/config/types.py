"""Check the values of a section, or of a plug-in's options, against their types with pydantic.

A type may include a range: `Annotated[int, Ge(1)]`.
"""

from __future__ import annotations

import os
import re
from dataclasses import fields
from functools import cache
from typing import Annotated, Any, TypeVar, get_type_hints

from annotated_types import Ge, Gt, Interval, Le
from pydantic import AfterValidator, ConfigDict, TypeAdapter, ValidationError

from zdp_bench.errors import UserError, setting, setting_name, unknown
from zdp_bench.privacy.mechanism import MAX_COUNT, MAX_NOISE, MIN_NOISE

T = TypeVar("T")
REQUIRED = "???"  # stands for the default of a required value, as in Hydra


def _require_noise(value: float) -> float:
    if value != 0 and not MIN_NOISE <= value <= MAX_NOISE:
        raise ValueError(f"must be 0, or lie in {MIN_NOISE:g} to {MAX_NOISE:g}")
    return value


NOISE = AfterValidator(_require_noise)
NORM = Interval(ge=1e-12, le=1e12)  # outside, float32 norms lose all digits
SEED = Interval(ge=0, lt=2**32)  # seed of a split or pairing; libraries take at most 32 bits
SHARE = Interval(gt=0, lt=1)
COUNT = Interval(ge=1, le=MAX_COUNT)
Count = Annotated[int, COUNT]
Positive = Annotated[float, Gt(0)]
MAX_THREADS = max(256, 4 * (os.cpu_count() or 1))  # enough for any use; far more would do harm
Threads = Annotated[int, Ge(1), Le(MAX_THREADS)]


def check_section(schema: type[T], values: dict[str, Any], prefix: str) -> T:
    """Return `values` as an instance of the dataclass `schema`."""
    hints = hints_of(schema)  # type: ignore[arg-type]
    types = {field.name: (hints[field.name], REQUIRED) for field in fields(schema)}  # type: ignore[arg-type]
    return schema(**check_types(types, values, prefix))


def check_types(
    types: dict[str, tuple[Any, Any]], values: dict[str, Any], prefix: str
) -> dict[str, Any]:
    """Return values converted to their types, and completed by their defaults.

    Args:
        types: name -> (type hint, default or `REQUIRED`).
        values: the values, by name.
        prefix: section of the names, for errors; '' for none.

    Raises:
        UserError: a name is not known, a value is missing, or a value does not have its type.
    """
    dot = f"{prefix}." if prefix else ""
    if not isinstance(values, dict):
        raise UserError(f"{prefix}={values}: set one of its keys: {', '.join(types)}.")
    for key in values:
        if key not in types:
            raise unknown("key", f"{dot}{key}", [f"{dot}{name}" for name in types])
    completed = {key: values.get(key, default) for key, (_, default) in types.items()}
    if missing := [key for key, value in completed.items() if value == REQUIRED]:
        raise UserError(
            f"{dot}{min(missing)} has no value: set it in the recipe or on the command line."
        )
    return {
        key: check_value(f"{dot}{key}", types[key][0], value) for key, value in completed.items()
    }


@cache
def hints_of(builder: Any) -> dict[str, Any]:
    """Return the type hints of a class or function, with their annotated ranges."""
    return get_type_hints(builder, include_extras=True)


@cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint, config=ConfigDict(coerce_numbers_to_str=True))


def is_valid(hint: Any, value: Any) -> bool:
    """Return True if a value has a type."""
    try:
        _adapter(hint).validate_python(value)
    except (ValidationError, UserError):  # UserError: of a validator of ours
        return False
    return True


@cache
def takes_text(hint: Any) -> bool:
    """Return True if a type is a text, or a list of texts, so that a number becomes one."""
    for number, text in ((1, "1"), ([1], ["1"])):
        if is_valid(hint, number) and _adapter(hint).validate_python(number) == text:
            return True
    return False


def check_value(key: str, hint: Any, value: Any) -> Any:
    """Return a value converted to its type.

    Args:
        key: name of the value, for errors.
        hint: type hint, which may include a range.
        value: the value.

    Raises:
        UserError: the value does not have the type, or is out of range.
    """
    if "${" in str(value):  # only in a damaged record: a composed value is resolved already
        raise UserError(f"{setting(key, value)}: is not resolved; write the value itself.")
    # NaN would pass all limits, because comparisons are false.
    if str(value).lower() == "nan" and not takes_text(hint):
        raise UserError(f"{setting(key, value)}: must be a number.")
    try:
        checked = _adapter(hint).validate_python(value)
    except ValidationError as error:
        faults = error.errors()
        if faults[0]["type"] == "literal_error":
            allowed = re.findall(r"'(.*?)'", faults[0]["ctx"]["expected"])
            word = "null" if value is None else str(value)
            raise unknown(setting_name(key), word, allowed) from None
        rules = [fault["msg"].removeprefix("Value error, ") for fault in faults]
        rule = "; or ".join(rules).replace("Input should", "must")
        raise UserError(f"{setting(key, value)}: {rule}.") from None
    if _counts_truth(value, checked):
        raise UserError(f"{setting(key, value)}: must be a number, not true or false.")
    return checked + 0.0 if type(checked) is float else checked  # -0.0 becomes 0.0


def _counts_truth(value: Any, checked: Any) -> bool:
    """Return True if pydantic took true or false for the number 1 or 0, also in a list."""
    if isinstance(value, list) and isinstance(checked, list | tuple):
        return any(map(_counts_truth, value, checked))
    return isinstance(value, bool) and isinstance(checked, int | float) and checked is not value
