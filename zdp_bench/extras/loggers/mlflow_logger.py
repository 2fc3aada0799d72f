"""Log to MLflow: one MLflow run per run, by default in a local SQLite file."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

from zdp_bench import records
from zdp_bench.disk import hold_lock
from zdp_bench.records import Record
from zdp_bench.training.loggers import LoggedRun

IDENTITY = "zdp_bench.run"  # the tag by which a resumed run finds its MLflow run
MAX_TEXT = 500  # characters of a parameter; MLflow's own limit is 6,000


class MlflowLogger:
    """Logs to MLflow; `mlflow ui --backend-store-uri sqlite:///results/mlflow.db` shows the runs.

    Numbers that are not finite are in the attached record only: MLflow would show ∞ as 1.8e308.

    Args:
        uri: URI of a tracking server or database. Default: `mlflow.db` in the results folder.
        experiment: the MLflow experiment.
    """

    def __init__(self, *, uri: str | None = None, experiment: str = "zdp-bench") -> None:
        import mlflow

        self._mlflow = mlflow
        self._uri = uri
        self._experiment = experiment
        self._client: Any = None
        self._run = ""
        self._logged: set[tuple[str, int, float]] = set()  # (metric, step, value)

    def start(self, run: LoggedRun) -> None:
        """Open the MLflow run of this identity, which a resumed run continues."""
        run.results.mkdir(parents=True, exist_ok=True)
        uri = self._uri or f"sqlite:///{run.results.absolute()}/mlflow.db"
        # Without the lock, two processes could both create the database's tables.
        with hold_lock(run.results / ".mlflow.lock"):
            self._client = self._mlflow.MlflowClient(uri)
            experiment = self._find_experiment(run.results)
        known = self._client.search_runs(
            [experiment], filter_string=f"tags.`{IDENTITY}` = '{run.identity}'"
        )
        if known:
            self._run = known[0].info.run_id
            self._logged = self._read_logged(known[0].data.metrics)
            self._client.update_run(self._run, status="RUNNING")
            return
        # Ours come last, so that no tag of the user's replaces them.
        tags = dict.fromkeys(run.tags, "true") | {IDENTITY: run.identity, "recipe": run.recipe}
        if run.notes:
            tags["mlflow.note.content"] = run.notes
        created = self._client.create_run(experiment, run_name=run.title, tags=tags)
        self._run = created.info.run_id
        for key, value in run.config.items():
            self._client.log_param(self._run, key, str(value)[:MAX_TEXT])

    def _read_logged(self, metrics: Iterable[str]) -> set[tuple[str, int, float]]:
        """Return the logged metrics, because a resumed run repeats evaluations after a kill."""
        histories = [self._client.get_metric_history(self._run, name) for name in metrics]
        return {(point.key, point.step, point.value) for point in chain.from_iterable(histories)}

    def _find_experiment(self, results: Path) -> str:
        """Return the id of the experiment, which is created if it does not exist."""
        known = self._client.get_experiment_by_name(self._experiment)
        if known:
            return str(known.experiment_id)
        folder = None if self._uri else (results.absolute() / "mlartifacts").as_uri()
        return str(self._client.create_experiment(self._experiment, artifact_location=folder))

    def log(self, metrics: dict[str, float]) -> None:
        """Add an evaluation."""
        step = int(metrics["step"])
        for key, value in metrics.items():
            is_new = (key, step, value) not in self._logged
            if key != "step" and is_new and math.isfinite(value):
                self._client.log_metric(self._run, key, value, step=step)

    def finish(self, record: Record, path: Path) -> None:
        """Add the final metrics and ε, and attach the record."""
        final = {f"final_{key}": value for key, value in record.metrics.items()}
        privacy = records.flatten(record.document["privacy"], "privacy.")
        numbers = {k: v for k, v in privacy.items() if type(v) in (int, float)}
        for key, value in (final | numbers).items():
            if math.isfinite(value):
                self._client.log_metric(self._run, key, value)
        self._client.log_artifact(self._run, str(path))
        self._client.set_terminated(self._run, "FINISHED")

    def close(self) -> None:
        """Mark the run as stopped."""
        self._client.set_terminated(self._run, "KILLED")
