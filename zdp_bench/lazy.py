"""Modules that are imported when one of their names is first used, because they take a second."""

from __future__ import annotations

import importlib
from typing import Any


class LazyModule:
    """A module by its name, such as `LazyModule("scipy.special")`; its names are attributes."""

    def __init__(self, name: str) -> None:
        self._module = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._module), name)
