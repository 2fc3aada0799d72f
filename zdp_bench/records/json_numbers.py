"""Write ∞ and NaN, which JSON does not have, as the strings "inf", "-inf" and "nan"."""

from __future__ import annotations

import json
import math
import re
from typing import Any

# Match strings that are exactly one of these, but neither keys nor the end of a longer string.
_NUMBERS = {
    f'"{word}"': (re.compile(rf'"{word}"(?<!\\"{word}")(?!\s*:)'), number)
    for word, number in {"inf": "Infinity", "-inf": "-Infinity", "nan": "NaN"}.items()
}

_REPLACED = (float, dict, list, tuple)  # other values are kept without a call, which is faster


def to_json(value: Any) -> Any:
    """Replace ∞ and NaN, which JSON does not have, by strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {
            key: to_json(entry) if isinstance(entry, _REPLACED) else entry
            for key, entry in value.items()
        }
    if isinstance(value, list | tuple):
        return [to_json(entry) if isinstance(entry, _REPLACED) else entry for entry in value]
    return value


def from_json(text: str) -> Any:
    """Parse JSON, and restore the numbers that `to_json` replaced by strings."""
    for word, (pattern, number) in _NUMBERS.items():
        if word in text:
            text = pattern.sub(number, text)
    return json.loads(text)
