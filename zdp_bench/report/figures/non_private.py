"""What training without protection reaches: the line that a figure measures others by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zdp_bench.records import Record

ALGORITHM = "sgd"


def setting(run: Record) -> tuple[Any, ...]:
    """Return what a run and its reference have in common: network, data, epochs."""
    config = run["config"]
    epochs = (config.get("trainer") or {}).get("epochs")
    return config.get("model"), run["data"]["digest"], epochs


def values(run: Record, every: Sequence[Record], metric: str) -> list[float]:
    """Return the metric of every run without protection that has a run's setting."""
    return [
        other["metrics"][metric]
        for other in every
        if (other["config"].get("algorithm") or {}).get("name") == ALGORITHM
        and setting(other) == setting(run)
        and metric in other["metrics"]
    ]
