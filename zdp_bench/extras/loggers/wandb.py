"""Weights & Biases' offline files. Nothing is sent, unless you say `wandb sync` with their folder.

Only numbers and the configuration are written: no code, console, machine or system metrics. Time
and memory of steps follow from how many examples were drawn, which no ε covers.
"""

from __future__ import annotations

import hashlib
import os
from typing import Any

os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
import wandb

from zdp_bench.config.schema import Run

SETTINGS: dict[str, Any] = {
    "console": "off",
    "disable_git": True,
    "disable_job_creation": True,
    "save_code": False,
    "silent": True,
    "x_disable_machine_info": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
}


class Logger:
    """Writes into `results/wandb`."""

    def __init__(self, config: Run, name: str, settings: dict[str, Any]) -> None:
        self._folder, self._name, self._settings = config.results, name, settings
        self._run: Any = None

    def write(self, numbers: dict[str, float], step: int) -> None:
        if self._run is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._run = wandb.init(
                project="zdp-bench",
                dir=str(self._folder),
                id=hashlib.sha256(self._name.encode()).hexdigest()[:8],
                name=self._name,
                config=self._settings,
                mode="offline",
                reinit="create_new",
                settings=wandb.Settings(**SETTINGS),
            )
        self._run.log(numbers, step=step)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
