"""Log to Weights & Biases: one W&B run per run, offline unless `logger.mode=online`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Literal

from zdp_bench import records
from zdp_bench.records import Record
from zdp_bench.training.loggers import LoggedRun

INIT_SECONDS = 20  # how long a run waits for W&B's server at its start
FINISH_SECONDS = 60  # and for the upload at its end; `wandb sync` uploads what is left


class WandbLogger:
    """Logs to Weights & Biases; `wandb sync` uploads what was logged offline.

    Host, command line and system metrics are not collected, because ε does not cover the memory
    that training takes. W&B adds the time of each evaluation, which ε does not cover either.

    W&B writes to disk in blocks, and a killed process loses its last one. So a resumed run logs its
    evaluations from the first on. The server keeps the first value of a step.

    Args:
        project: the W&B project.
        entity: a W&B team or user. Default: the default entity of the account.
        mode: 'offline' writes to `wandb` in the results folder, 'online' to the server.
    """

    def __init__(
        self,
        *,
        project: str = "zdp-bench",
        entity: str | None = None,
        mode: Literal["offline", "online"] = "offline",
    ) -> None:
        import wandb

        # W&B asks for an account on a terminal, unless it may not print.
        wandb.setup(wandb.Settings(silent=True, login_timeout=1))
        self._wandb = wandb
        self._project = project
        self._entity = entity
        self._mode: Literal["offline", "online"] = mode
        self._run: Any = None

    def start(self, run: LoggedRun) -> None:
        """Open the W&B run of this identity, and log the evaluations that it may lack."""
        limits: dict[str, Any] = {"init_timeout": INIT_SECONDS}
        if "finish_timeout" in self._wandb.Settings.model_fields:  # not in old versions
            limits |= {"finish_timeout": FINISH_SECONDS, "finish_timeout_raises": True}
        settings = self._wandb.Settings(
            **limits,
            console="off",
            silent=True,
            disable_git=True,
            save_code=False,
            x_disable_meta=True,
            x_disable_machine_info=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        run.results.mkdir(parents=True, exist_ok=True)
        self._run = self._wandb.init(
            project=self._project,
            entity=self._entity,
            mode=self._mode,
            dir=run.results,
            id=run.identity,
            resume="allow",
            name=run.title,
            group=run.recipe,
            tags=run.tags,
            notes=run.notes or None,
            config=run.config,
            reinit="create_new",
            settings=settings,
        )
        for evaluation in run.evaluations:
            self.log(evaluation)

    def log(self, metrics: dict[str, float]) -> None:
        """Add an evaluation at its step, unless the server has one of this or a later step."""
        step = int(metrics["step"])
        if step >= self._run.step:
            self._run.log(metrics, step=step)

    def finish(self, record: Record, path: Path) -> None:
        """Add the record's metrics and ε to the summary, and attach the record."""
        summary = records.flatten({"test": record.metrics, "privacy": record.document["privacy"]})
        numbers = {key: value for key, value in summary.items() if not isinstance(value, list)}
        self._run.summary.update(numbers)
        attached = Path(self._run.dir) / path.name  # a copy: W&B would link to the file itself
        shutil.copy(path, attached)
        self._run.save(attached, base_path=attached.parent, policy="now")
        self._run.finish()

    def close(self) -> None:
        """Mark the run as stopped."""
        self._run.finish(exit_code=1)
