"""Log to TensorBoard: one folder of event files per run."""

from __future__ import annotations

import json
from pathlib import Path

from zdp_bench.disk import expand_home
from zdp_bench.records import Record, to_json
from zdp_bench.training.loggers import LoggedRun


class TensorboardLogger:
    """Logs to TensorBoard; `tensorboard --logdir results/tensorboard` shows the runs.

    After an error, such as a full disk, TensorBoard writes nothing more of this process, and a
    resumed run does not repeat the evaluations before it; the record has all.

    Args:
        folder: the folder of the event files. Default: `tensorboard` in the results folder.
    """

    def __init__(self, *, folder: str | None = None) -> None:
        import tensorboard  # noqa: F401 - so that the error names it if it is missing
        from torch.utils.tensorboard import SummaryWriter

        self._writer_class = SummaryWriter
        self._folder = folder

    def start(self, run: LoggedRun) -> None:
        """Open the run's folder; evaluations that a resumed run repeats are replaced."""
        folder = expand_home(self._folder or run.results / "tensorboard")
        self._writer = self._writer_class(
            folder / run.recipe / run.identity, purge_step=run.steps_done + 1
        )
        self._last_step = run.steps_done
        self._add_text("config", run.config)
        labels = {"name": run.title, "tags": run.tags, "notes": run.notes}
        self._add_text("run", labels)

    def log(self, metrics: dict[str, float]) -> None:
        """Add an evaluation."""
        self._last_step = int(metrics["step"])
        for key, value in metrics.items():
            if key != "step":
                self._writer.add_scalar(key, value, self._last_step)
        self._writer.flush()

    def finish(self, record: Record, path: Path) -> None:
        """Add the record as text."""
        self._add_text("record", record.document)
        self._writer.close()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()

    def _add_text(self, name: str, value: object) -> None:
        """Add a value as JSON, indented so that TensorBoard's Markdown shows it as code."""
        lines = json.dumps(to_json(value), indent=1, ensure_ascii=False).splitlines()
        text = "\n".join(f"    {line}" for line in lines)
        self._writer.add_text(name, text, self._last_step)
