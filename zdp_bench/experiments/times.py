"""Estimate how long a run takes, from the records of similar runs on the same kind of device.

An epoch takes as long as an epoch of the fastest similar run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from zdp_bench.config.digests import drop_empty
from zdp_bench.records import Record

# Options of an algorithm that do not affect how long a step takes.
NOT_TIMED = ("noise", "noise_multiplier", "max_grad_norm", "error_clip")

Times = dict[str, float]  # seconds per epoch, by the settings that it depends on (`_kinds`)


def read_times(all_records: Iterable[Record], device: str = "cpu") -> Times:
    """Return the seconds per epoch of the fastest run of each kind.

    Args:
        all_records: records. Runs that were resumed, or that ended before their last epoch, are
            left out, because their time is not that of all epochs.
        device: "cpu", or "cuda" for any GPU. Default: "cpu".
    """
    times: Times = {}
    for run in all_records:
        measured = run.measured
        epochs = run.config.get("trainer", {}).get("epochs")
        is_whole = measured.resumed_at_step is None and run.stopped_by == "epochs"
        is_on_cpu = run.environment.device.startswith("cpu")
        if not epochs or not is_whole or is_on_cpu != (device == "cpu"):
            continue
        if measured.train_seconds is None:
            continue
        seconds = measured.train_seconds / epochs
        for kind in _kinds(run.config):
            times[kind] = min(times.get(kind, seconds), seconds)
    return times


def seconds_of(resolved: Mapping[str, Any], times: Times) -> float | None:
    """Estimate the seconds that a run takes; None if no similar run has a record.

    If there is no similar run with the same batch size, one with another batch size is used. Its
    epochs have the same number of examples and take about as long.

    Args:
        resolved: configuration of the run.
        times: seconds per epoch, as `read_times` returns them.
    """
    for kind in _kinds(resolved):
        if kind in times:
            return times[kind] * resolved["trainer"]["epochs"]
    return None


def _kinds(config: Mapping[str, Any]) -> list[str]:
    """Return the settings on which the time of an epoch depends, as JSON.

    Returns:
        The settings with the batch size, then the settings without it.
    """
    trainer = config["trainer"]
    federated = config.get("federated") or {}
    sections: list[dict[str, Any]] = []
    for name in ("model", "dataset", "algorithm"):
        sections.append(dict(config.get(name) or {}))
    sections.append(
        {"augmentations": trainer.get("augmentations"), "bits": config.get("precision")}
    )
    sections.append({"nodes": federated.get("nodes")})
    settings = []
    for section in sections:
        timed = {key: value for key, value in section.items() if key not in NOT_TIMED}
        # Empty values are dropped, because records of earlier versions lack newer options.
        settings.append(drop_empty(timed))
    batch_size = {key: trainer.get(key) for key in ("sample_rate", "batch_size")}
    kinds = ([settings, batch_size], [settings, None])
    return [json.dumps(kind, default=str, sort_keys=True) for kind in kinds]
