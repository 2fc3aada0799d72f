"""How long a run takes, by the records: the quickest of its kind on the same device."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from zdp_bench.config.digests import drop_empty
from zdp_bench.records import Record

# Options of an algorithm that do not change how long a step takes.
AS_LONG = ("noise", "noise_multiplier", "max_grad_norm", "error_clip")

Times = dict[str, float]  # seconds of an epoch, by what they depend on


def read_times(every: Iterable[Record], device: str = "cpu") -> Times:
    """Return the least seconds that an epoch took in the records of a kind of device.

    An epoch in batches of another size holds as many examples, and takes about as long.
    """
    times: Times = {}
    for run in every:
        measured = run.measured
        epochs = run.config.get("trainer", {}).get("epochs")
        is_whole = measured.resumed_at_step is None and measured.train_seconds is not None
        is_on_cpu = run.environment.device.startswith("cpu")
        if not epochs or not is_whole or is_on_cpu != (device == "cpu"):
            continue
        assert measured.train_seconds is not None
        seconds = measured.train_seconds / epochs
        for kind in _kinds(run.config):
            times[kind] = min(times.get(kind, seconds), seconds)
    return times


def seconds_of(resolved: Mapping[str, Any], times: Times) -> float | None:
    """Return how long a run takes; None if no record states it."""
    for kind in _kinds(resolved):
        if kind in times:
            return times[kind] * resolved["trainer"]["epochs"]
    return None


def _kinds(config: Mapping[str, Any]) -> list[str]:
    """Return what the length of an epoch depends on, with and without the size of the batch."""
    trainer = config["trainer"]
    parts = [
        *(dict(config.get(section) or {}) for section in ("model", "dataset", "algorithm")),
        {"augmentations": trainer.get("augmentations"), "bits": config.get("precision")},
        {"nodes": (config.get("federated") or {}).get("nodes")},
    ]
    kept = []
    for part in parts:
        options = {key: value for key, value in part.items() if key not in AS_LONG}
        # Records sort their keys, and those of an earlier version lack what is off by default.
        kept.append(drop_empty(options))
    size = {key: trainer.get(key) for key in ("sample_rate", "batch_size")}
    return [json.dumps([kept, more], default=str, sort_keys=True) for more in (size, None)]
