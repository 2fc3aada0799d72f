"""Values checked against types, by pydantic: those of a section, or of a builder's options.

A type may carry a range: `Annotated[int, Ge(1)]`.
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
from zdp_bench.privacy.mechanism import LEAST_NOISE, MOST, MOST_NOISE

T = TypeVar("T")
REQUIRED = "???"  # the default of a parameter that has none; Hydra's word for a value to be given


def _require_noise(value: float) -> float:
    if value != 0 and not LEAST_NOISE <= value <= MOST_NOISE:
        raise ValueError(f"must be 0, or lie in {LEAST_NOISE:g} to {MOST_NOISE:g}")
    return value


NOISE = AfterValidator(_require_noise)
NORM = Interval(ge=1e-12, le=1e12)  # beyond, norms in single precision lose all digits
SEED = Interval(ge=0, lt=2**32)  # of a split or a pairing; libraries take no more bits
SHARE = Interval(gt=0, lt=1)
COUNT = Interval(ge=1, le=MOST)
Count = Annotated[int, COUNT]
Positive = Annotated[float, Gt(0)]
MOST_THREADS = max(256, 4 * (os.cpu_count() or 1))  # more than help, fewer than do harm
Threads = Annotated[int, Ge(1), Le(MOST_THREADS)]


def check_section(schema: type[T], values: dict[str, Any], prefix: str) -> T:
    """Return `values` as an instance of the dataclass `schema`."""
    hints = hints_of(schema)  # type: ignore[arg-type]
    types = {field.name: (hints[field.name], REQUIRED) for field in fields(schema)}  # type: ignore[arg-type]
    return schema(**check_types(types, values, prefix))


def check_types(
    types: dict[str, tuple[Any, Any]], values: dict[str, Any], prefix: str
) -> dict[str, Any]:
    """Return `values`, converted to `types` (name -> hint, default or `REQUIRED`) and completed."""
    dot = f"{prefix}." if prefix else ""
    if not isinstance(values, dict):
        raise UserError(f"{prefix}={values}: set one of its keys: {', '.join(types)}.")
    for key in values:
        if key not in types:
            raise unknown("key", f"{dot}{key}", [f"{dot}{name}" for name in types])
    given = {key: values.get(key, default) for key, (_, default) in types.items()}
    if lacking := [key for key, value in given.items() if value == REQUIRED]:
        raise UserError(
            f"{dot}{min(lacking)} has no value: set it in the recipe or on the command line."
        )
    return {key: check_value(f"{dot}{key}", types[key][0], value) for key, value in given.items()}


@cache
def hints_of(described: Any) -> dict[str, Any]:
    """Return the type hints of a class or a function with what annotates them."""
    return get_type_hints(described, include_extras=True)


@cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint, config=ConfigDict(coerce_numbers_to_str=True))


def check_value(key: str, hint: Any, value: Any) -> Any:
    """Return one value, converted to its type, in the type's range."""
    if "${" in str(value):  # of a record: whatever was composed here is resolved already
        raise UserError(f"{setting(key, value)}: is not resolved; write the value itself.")
    if str(value).lower() == "nan":  # which compares as false with every limit
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
    return checked + 0.0 if type(checked) is float else checked  # no -0
