"""One line of a ledger's file: a JSON object with the SHA-256 of itself and everything above it.

A ledger of a million steps is read in seconds, so the encoder is made once, and not for each line.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

_KINDS = {"step": int, "of": str, "generation": str, "made": str, "state": str, "sha256": str}
_STEP = {"step", "of", "generation"}
_STATE = {"made", "step", "state", "generation"}
_encode, _decode = json.JSONEncoder(sort_keys=True).encode, json.JSONDecoder().raw_decode


def chain(previous: str, body: dict[str, Any]) -> str:
    """Return the digest that continues `previous` by a line."""
    return hashlib.sha256((previous + _encode(body)).encode()).hexdigest()


def make_line(previous: str, body: dict[str, Any]) -> bytes:
    """Return a line of the file, without its end: the entry and the chain's digest."""
    return _encode(body | {"sha256": chain(previous, body)}).encode()


def parse(line: bytes) -> Any:
    """Return what a line holds.

    Raises:
        ValueError: it is no JSON, or no UTF-8.
    """
    text = line.decode()
    try:
        body, end = _decode(text)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if text[end:].strip():
        raise ValueError("something stands behind the object")
    return body


def is_start(body: dict[str, Any]) -> bool:
    """True if the line notes a state from which a process may start, beside the chain."""
    return "state" in body and body.keys() - {"sha256"} == _STATE and _has_kinds(body)


def is_step(body: dict[str, Any]) -> bool:
    """True if the line, without its digest, is a release."""
    return "step" in body and body.keys() <= _STEP and _has_kinds(body)


def _has_kinds(body: dict[str, Any]) -> bool:
    return all(type(value) is _KINDS[name] for name, value in body.items())
