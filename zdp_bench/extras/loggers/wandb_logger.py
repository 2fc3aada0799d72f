"""Log to Weights & Biases: one W&B run per run, offline unless `logger.mode=online`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Literal

from zdp_bench import records
from zdp_bench.records import Record
from zdp_bench.training.loggers import LoggedRun


class WandbLogger:
    """Logs to Weights & Biases; `wandb sync` uploads what was logged offline.

    Host, command line and system metrics are not collected, because ε does not cover the memory
    that training takes. W&B adds the time of each evaluation, which ε does not cover either.

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

        self._wandb = wandb
        self._project = project
        self._entity = entity
        self._mode: Literal["offline", "online"] = mode
        self._run: Any = None

    def start(self, run: LoggedRun) -> None:
        """Open the W&B run of this identity; steps of a resumed run follow those it has."""
        settings = self._wandb.Settings(
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

    def log(self, metrics: dict[str, float]) -> None:
        """Add an evaluation at its step, by which a resumed run continues where it stopped."""
        self._run.log(metrics, step=int(metrics["step"]))

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
