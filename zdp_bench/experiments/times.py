"""How long a run takes: as long per epoch as the fastest similar run on the same kind of device."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from zdp_bench.config.digests import drop_empty
from zdp_bench.records import Record

# Options of an algorithm that do not affect how long a step takes.
NOT_TIMED = ("noise", "noise_multiplier", "max_grad_norm", "error_clip")

Times = dict[str, float]  # what the time depends on, as JSON -> seconds per epoch


def read_times(all_records: Iterable[Record], device: str = "cpu") -> Times:
    """Return the smallest number of seconds per epoch in records, for `seconds_of`.

    Args:
        all_records: the records. Runs that were resumed are left out.
        device: "cpu", or "cuda" for any GPU. Default: "cpu".
    """
    times: Times = {}
    for run in all_records:
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
    """Return the expected number of seconds of a run, or None without the record of a similar run.

    A run with the same batch size comes first, then one with another: an epoch has the same number
    of examples, and takes about as long.

    Args:
        resolved: the configuration of the run.
        times: see `read_times`.
    """
    for kind in _kinds(resolved):
        if kind in times:
            return times[kind] * resolved["trainer"]["epochs"]
    return None


def _kinds(config: Mapping[str, Any]) -> list[str]:
    """Return what the time of an epoch depends on, as JSON: with batch size, and without it."""
    trainer = config["trainer"]
    parts = [
        *(dict(config.get(section) or {}) for section in ("model", "dataset", "algorithm")),
        {"augmentations": trainer.get("augmentations"), "bits": config.get("precision")},
        {"nodes": (config.get("federated") or {}).get("nodes")},
    ]
    timed = []
    for part in parts:
        options = {key: value for key, value in part.items() if key not in NOT_TIMED}
        # Records of earlier versions lack options that are off by default.
        timed.append(drop_empty(options))
    size = {key: trainer.get(key) for key in ("sample_rate", "batch_size")}
    return [json.dumps([timed, batch], default=str, sort_keys=True) for batch in (size, None)]
