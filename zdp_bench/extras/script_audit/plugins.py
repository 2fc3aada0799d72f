"""What this extra adds, as `zdp_bench/registry.py` reads it: nothing, for `audit` imports it."""

from __future__ import annotations

ADDS: dict[str, dict[str, str]] = {}
