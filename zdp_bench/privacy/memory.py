"""Cache slow results on disk: the σ of a target ε, and every ε that a command shows.

Each result is a small file in `$XDG_CACHE_HOME/zdp-bench/numbers` (or `~/.cache/...`). Its name is
the SHA-256 of its question: the function, its arguments, the code that computes it and the versions
of the libraries below. A seal covers question and number. If the seal does not match, the number is
computed again. The folder can be deleted at any time.

No ε that a run, its record, `audit` or `verify` states comes from this cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from zdp_bench.caches import cache_folder
from zdp_bench.disk import name_partial
from zdp_bench.errors import UserError
from zdp_bench.foreign_files import read_json


def call_cached(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return `function(*arguments)`, from the cache if possible.

    Args:
        function: a function of this package that depends on its arguments only. It returns an
            unrounded number, or other JSON values.
        arguments: JSON values, dataclasses or functions.
    """
    folder = cache_folder("numbers")
    if folder is None:
        return function(*arguments)
    question = json.dumps([function, *arguments], default=_describe, sort_keys=True)
    path = folder / f"{_digest(question)}.json"
    with contextlib.suppress(UserError, KeyError, TypeError):
        cached = read_json(path)
        if cached["seal"] == _seal(question, cached["number"]):
            return cached["number"]
    # The same types as from the cache: a tuple becomes a list.
    number = json.loads(json.dumps(function(*arguments)))
    _write(path, json.dumps({"number": number, "seal": _seal(question, number)}))
    return number


def _describe(value: Any) -> Any:
    """Return JSON values for a dataclass, or for a function: its name and a digest of its code."""
    if callable(value):
        return [value.__module__, value.__qualname__, _code(value.__module__)]
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


@cache
def _code(module: str) -> str:
    """Return a digest of a module, the files of this folder and the versions of libraries."""
    files = {*Path(__file__).parent.glob("*.py"), Path(sys.modules[module].__file__ or "")}
    texts = [path.read_text(encoding="utf-8") for path in sorted(files)]
    versions = [version(name) for name in ("dp-accounting", "numpy", "scipy")]
    return _digest("".join([*texts, *versions]))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _seal(question: str, number: Any) -> str:
    return _digest(f"{question}\n{json.dumps(number)}")


def _write(path: Path, text: str) -> None:
    """Write a file atomically. Ignore errors, which only make the next call slow."""
    part = name_partial(path)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.write_text(text, encoding="utf-8")
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
