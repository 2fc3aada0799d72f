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
    found: Times = {}
    for run in every:
        on, measured = run.environment.device, run.measured
        epochs = run.config.get("trainer", {}).get("epochs")
        if measured.train_seconds is None or measured.resumed_at_step is not None:
            continue
        if epochs and on.startswith("cpu") == (device == "cpu"):
            seconds = measured.train_seconds / epochs
            for kind in _kinds(run.config):
                found[kind] = min(found.get(kind, seconds), seconds)
    return found


def seconds_of(resolved: Mapping[str, Any], times: Times) -> float | None:
    """Return how long a run takes; None if no record states it."""
    epochs = resolved["trainer"]["epochs"]
    known = (times[kind] * epochs for kind in _kinds(resolved) if kind in times)
    return next(known, None)


def _kinds(config: Mapping[str, Any]) -> list[str]:
    """Return what the length of an epoch depends on, with and without the size of the batch."""
    trainer = config["trainer"]
    parts = [dict(config.get(part) or {}) for part in ("model", "dataset", "algorithm")]
    parts.append({"augmentations": trainer.get("augmentations"), "bits": config.get("precision")})
    parts.append({"nodes": (config.get("federated") or {}).get("nodes")})
    # Records sort their keys, and those of an earlier version lack what is off by default.
    told = [drop_empty({k: v for k, v in part.items() if k not in AS_LONG}) for part in parts]
    size = {key: trainer.get(key) for key in ("sample_rate", "batch_size")}
    return [json.dumps([told, more], default=str, sort_keys=True) for more in (size, None)]
