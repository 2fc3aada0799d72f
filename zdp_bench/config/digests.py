"""Digests that name an experiment and a run: SHA-256 of what is computed, and of nothing else."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping
from typing import Any

from zdp_bench.config.plugins import find_builder
from zdp_bench.config.schema import FEDERATED_RESULT, OPERATIONAL, Plugin, Run

NOT_COMPUTED = ("trainer.micro_batch", "privacy.total_budget")  # they change no result


def experiment_digest(run: Run) -> str:
    """Return the SHA-256 of what is computed, without the seed: equal for repetitions of a run.

    Null and false values, and the example as the unit of privacy, are left out, so that a new
    option that is off by default keeps old records valid. An option that is null by default stays
    when it is false, which then is a choice of its own, such as `optimizer.fused`.
    """
    no_part = (*OPERATIONAL, "seed", "recipe")
    content = {key: value for key, value in run.resolved.items() if key not in no_part}
    content["optimizer"] = keep_choices("optimizer", run.optimizer)
    if run.scheduler is not None:
        content["scheduler"] = keep_choices("scheduler", run.scheduler)
    privacy = content["privacy"]
    left_out = {*NOT_COMPUTED, *([] if privacy["unit"] == "patient" else ["privacy.unit"])}
    for section in ("trainer", "privacy"):
        options = content[section].items()
        content[section] = {k: v for k, v in options if f"{section}.{k}" not in left_out}
    content = drop_empty(content)
    if privacy["target_epsilon"] or privacy["claimed_epsilon"]:  # these set the noise
        content["algorithm"].pop("noise_multiplier", None)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def keep_choices(kind: str, plugin: Plugin) -> dict[str, Any]:
    """Return a plug-in's name and options; false is spelled out where the default is null."""
    parameters = inspect.signature(find_builder(kind, plugin.name)).parameters
    content: dict[str, Any] = {"name": plugin.name}
    for key, value in plugin.options.items():
        is_choice = value is False and parameters[key].default is None
        content[key] = "false" if is_choice else value
    return content


def drop_empty(node: Any) -> Any:
    """Return a configuration without null and false values and the sections left empty by that."""
    if not isinstance(node, dict):
        return node
    kept = {k: drop_empty(v) for k, v in node.items() if v is not None and v is not False}
    return {key: value for key, value in kept.items() if value != {}}


def enters_digest(key: str) -> bool:
    """Return True if a dotted key is part of what is computed; True also for `seed`."""
    section, _, name = key.partition(".")
    if section == "federated":
        return name in FEDERATED_RESULT
    return section not in OPERATIONAL and key not in NOT_COMPUTED


def run_digest(run: Run, data_digest: str, plugins: Mapping[str, str] | None = None) -> str:
    """Return the SHA-256 of experiment, seed, data and plug-ins, which names the run's folder."""
    named = f"{experiment_digest(run)}:{run.seed}:{data_digest}"
    if plugins:
        named += f":{json.dumps(plugins, sort_keys=True)}"
    return hashlib.sha256(named.encode()).hexdigest()
