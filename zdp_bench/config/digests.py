"""Digests of an experiment and a run: SHA-256 of everything that affects what is computed."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping
from typing import Any

from zdp_bench.config.plugins import find_builder
from zdp_bench.config.schema import FEDERATED_RESULT, OPERATIONAL, Plugin, Run

NOT_COMPUTED = ("trainer.micro_batch", "privacy.total_budget")  # these do not affect results


def experiment_digest(run: Run) -> str:
    """Return the SHA-256 of what is computed, without the seed: equal for all seeds of a run.

    Null and false values, and the default unit, are left out, so that a new option that is off by
    default does not change the digests of old records. An option whose default is null is kept if
    it is false, which is then a choice, such as `optimizer.fused=false`.
    """
    left_out_sections = (*OPERATIONAL, "seed", "recipe")
    content = {k: value for k, value in run.resolved.items() if k not in left_out_sections}
    content["optimizer"] = keep_choices("optimizer", run.optimizer)
    if run.scheduler is not None:
        content["scheduler"] = keep_choices("scheduler", run.scheduler)
    privacy = content["privacy"]
    left_out = {*NOT_COMPUTED}
    if privacy["unit"] != "patient":
        left_out.add("privacy.unit")
    for section in ("trainer", "privacy"):
        options = content[section].items()
        content[section] = {k: v for k, v in options if f"{section}.{k}" not in left_out}
    content = drop_empty(content)
    if privacy["target_epsilon"] or privacy["claimed_epsilon"]:  # these set the noise
        content["algorithm"].pop("noise_multiplier", None)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def keep_choices(kind: str, plugin: Plugin) -> dict[str, Any]:
    """Return a plug-in's name and options, with 'false' as a word if the default is null."""
    parameters = inspect.signature(find_builder(kind, plugin.name)).parameters
    content: dict[str, Any] = {"name": plugin.name}
    for key, value in plugin.options.items():
        is_choice = value is False and parameters[key].default is None
        content[key] = "false" if is_choice else value
    return content


def drop_empty(node: Any) -> Any:
    """Return a configuration without null and false values, nor sections that then are empty."""
    if not isinstance(node, dict):
        return node
    kept = {k: drop_empty(v) for k, v in node.items() if v is not None and v is not False}
    return {key: value for key, value in kept.items() if value != {}}


def enters_digest(key: str) -> bool:
    """Return True if a dotted key, or `seed`, affects what is computed."""
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
