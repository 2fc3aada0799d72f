"""Differentially private deep learning on medical and complex-valued data.

The library's entry point is `zdp_bench.make_private`; docs/library.md describes it and its
building blocks. Names outside `__all__` are private. Names are imported when they are first used,
so that the command line does not wait for torch.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "make_private": "library",
    "Private": "library",
    "check_model": "library",
    "clipped_sum": "library",
    "represent": "representations",
    "load": "extras.sharing.loading",
    "tight_epsilon": "privacy.accounting",
    "calibrate": "privacy.calibration",
    "Mechanism": "privacy.mechanism",
    "Block": "privacy.mechanism",
    "Sampling": "privacy.mechanism",
    "UserError": "errors",
}
_OWN_NAMES = {"calibrate": "calibrate_mechanism"}

__all__ = ["__version__", "nn", *_HOMES]


def __getattr__(name: str) -> Any:
    if name == "nn":
        return importlib.import_module("zdp_bench.nn")
    if name not in _HOMES:
        raise AttributeError(f"module 'zdp_bench' has no attribute '{name}'")
    home = importlib.import_module(f"zdp_bench.{_HOMES[name]}")
    return getattr(home, _OWN_NAMES.get(name, name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
