"""Digests of experiments and runs: the SHA-256 of all that affects what is computed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from zdp_bench.config.plugins import find_builder, option_types
from zdp_bench.config.schema import FEDERATED_RESULT, OPERATIONAL, PLUGINS, Run
from zdp_bench.config.types import is_valid

NO_EFFECT = ("trainer.micro_batch", "privacy.total_budget")  # keys that affect no result


def experiment_digest(run: Run) -> str:
    """Return the SHA-256 of what is computed, apart from the seed.

    Null and false values, and the default unit, are left out. So the digests of old records stay
    valid when an option is added that is off by default. A false value of an option that may also
    be null is kept, because it is a choice, such as `optimizer.fused=false`.
    """
    left_out_sections = (*OPERATIONAL, "seed", "recipe")
    content = {k: value for k, value in run.resolved.items() if k not in left_out_sections}
    for kind in PLUGINS:
        plugin = getattr(run, kind)
        if kind in content and plugin is not None:
            content[kind] = keep_choices(kind, plugin.name, content[kind])
    privacy = content["privacy"]
    left_out = {*NO_EFFECT}
    if privacy["unit"] != "patient":  # old records, whose unit is the example, lack the key
        left_out.add("privacy.unit")
    for section in ("trainer", "privacy"):
        options = content[section].items()
        content[section] = {k: v for k, v in options if f"{section}.{k}" not in left_out}
    content = drop_empty(content)
    if privacy["target_epsilon"] or privacy["claimed_epsilon"]:  # these set the noise
        content["algorithm"].pop("noise_multiplier", None)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def keep_choices(kind: str, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return a plug-in's options, with 'false' for a false value that differs from null."""
    types = option_types(kind, find_builder(kind, name))
    content = {}
    for key, value in options.items():
        is_choice = value is False and key in types and is_valid(types[key], None)
        content[key] = "false" if is_choice else value
    return content


def drop_empty(node: Any) -> Any:
    """Return a configuration without null and false values and without empty sections."""
    if not isinstance(node, dict):
        return node
    reduced = {k: drop_empty(v) for k, v in node.items() if v is not None and v is not False}
    return {key: value for key, value in reduced.items() if value != {}}


def enters_digest(key: str) -> bool:
    """Return True if a dotted key, or `seed`, affects what is computed."""
    section, _, name = key.partition(".")
    if section == "federated":
        return name in FEDERATED_RESULT
    return section not in OPERATIONAL and key not in NO_EFFECT


def run_digest(
    run: Run,
    data_digest: str,
    plugins: Mapping[str, str] | None = None,
    weights_files: Mapping[str, str] | None = None,
) -> str:
    """Return the SHA-256 of all that is computed with, which names the run's folder.

    Args:
        run: the run: its experiment and seed.
        data_digest: digest of the data.
        plugins: digests of the plug-ins of other packages, by name. Default: none.
        weights_files: SHA-256 of each file that `models.WeightsFile` marks, by key. Default: none.
    """
    content = f"{experiment_digest(run)}:{run.seed}:{data_digest}"
    for digests in (plugins, weights_files):
        if digests:
            content += f":{json.dumps(digests, sort_keys=True)}"
    return hashlib.sha256(content.encode()).hexdigest()
