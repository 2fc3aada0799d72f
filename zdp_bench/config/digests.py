"""What names an experiment and a run: SHA-256 of what is computed, and of nothing else."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from zdp_bench.config.schema import FEDERATED_RESULT, OPERATIONAL, Run


def experiment_digest(run: Run) -> str:
    """SHA-256 of what is computed, but for the seed: runs with one digest are repetitions of one another.

    What is null or false says nothing and is left out, so that a new option which is off by default keeps old records valid.
    """

    def said(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        inside = {
            key: said(value)
            for key, value in node.items()
            if value is not None and value is not False
        }
        return {key: value for key, value in inside.items() if value != {}}

    content = {
        key: value
        for key, value in run.resolved.items()
        if key not in (*OPERATIONAL, "seed", "recipe")
    }
    content["trainer"] = {
        key: value for key, value in content["trainer"].items() if key != "micro_batch"
    }
    content = said(content)
    if run.privacy.target_epsilon or run.privacy.claimed_epsilon:  # what is calibrated is no choice
        content["algorithm"].pop("noise_multiplier", None)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def enters_digest(key: str) -> bool:
    """Whether a dotted key is part of what is computed; but for `seed`, which names a repetition."""
    section, _, name = key.partition(".")
    if section == "federated":
        return name in FEDERATED_RESULT
    return section not in OPERATIONAL and key != "trainer.micro_batch"


def run_digest(run: Run, data_digest: str) -> str:
    """SHA-256 of the resolved configuration and the data: names the run's folder."""
    return hashlib.sha256(f"{experiment_digest(run)}:{run.seed}:{data_digest}".encode()).hexdigest()
