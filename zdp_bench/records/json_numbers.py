"""Write ∞ and NaN, which JSON does not have, as the strings "inf", "-inf" and "nan".

A text that is one of these, such as a run's name, is written with an escape: "\\u0069nf". JSON
reads it as the same text, and `from_json` does not take it for a number.
"""

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
_WORDS = {number: word for word, (_, number) in _NUMBERS.items()}
# texts that look like a number -> how they are written
_ESCAPED = {'"inf"': r'"\u0069nf"', '"-inf"': r'"-\u0069nf"', '"nan"': r'"\u006ean"'}
_TEXT_OR_NUMBER = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|-?Infinity|NaN')

_REPLACED = (float, dict, list, tuple)  # other values are kept without a call, which is faster


def to_json(value: Any) -> Any:
    """Replace ∞ and NaN by strings, to show a value. To write it, use `format_json`."""
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


def format_json(value: Any) -> str:
    """Return a value as indented JSON, from which `from_json` restores it."""
    text = json.dumps(value, indent=1, sort_keys=True)
    if any(token in text for token in (*_WORDS, *_ESCAPED)):
        text = _TEXT_OR_NUMBER.sub(_replace, text)
    return text


def _replace(match: re.Match[str]) -> str:
    """Return a text or a number as it is written: ∞ and NaN as words, such texts with an escape."""
    token = match[0]
    return _WORDS.get(token) or _ESCAPED.get(token, token)


def from_json(text: str) -> Any:
    """Parse JSON, and restore the numbers that `format_json` wrote as strings."""
    for word, (pattern, number) in _NUMBERS.items():
        if word in text:
            text = pattern.sub(number, text)
    return json.loads(text)
