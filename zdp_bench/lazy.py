"""Modules that are imported when they are first used, because importing them takes a second."""

from __future__ import annotations

import importlib
from typing import Any


class LazyModule:
    """A module that is imported on first use, such as `LazyModule("scipy.special")`."""

    def __init__(self, name: str) -> None:
        self._module = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._module), name)
