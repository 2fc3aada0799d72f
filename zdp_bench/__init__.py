"""Differentially private deep learning on medical and complex-valued data."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
_MODULES = {"load": "zdp_bench.sharing.loading"}  # imported when first used


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(_MODULES[name]), name)
