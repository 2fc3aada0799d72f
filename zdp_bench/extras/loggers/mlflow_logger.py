"""Log to MLflow: one MLflow run per run, by default in a local SQLite file."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from zdp_bench import records
from zdp_bench.disk import hold_lock
from zdp_bench.records import Record
from zdp_bench.training.loggers import LoggedRun

IDENTITY = "zdp_bench.run"  # the tag by which a resumed run finds its MLflow run
MAX_TEXT = 500  # characters of a parameter; MLflow's own limit is 6,000
# By default, MLflow keeps a run waiting for four minutes and more if its server is down.
PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}


class MlflowLogger:
    """Logs to MLflow; `mlflow ui --backend-store-uri sqlite:///results/mlflow.db` shows the runs.

    Numbers that are not finite are in the attached record only: MLflow would show ∞ as 1.8e308.
    A request to a server takes at most two times 10 s, unless the environment has other limits
    (`MLFLOW_HTTP_REQUEST_TIMEOUT`).

    Args:
        uri: URI of a tracking server or database. Default: `mlflow.db` in the results folder.
        experiment: the MLflow experiment.
    """

    def __init__(self, *, uri: str | None = None, experiment: str = "zdp-bench") -> None:
        import mlflow

        for variable, value in PATIENCE.items():
            os.environ.setdefault(variable, value)
        self._mlflow = mlflow
        self._uri = uri
        self._experiment = experiment
        self._client: Any = None
        self._run = ""
        self._logged: set[tuple[str, int]] = set()  # (metric, step)
        self._is_unanswered = False  # the server may have the last metrics, or not

    def start(self, run: LoggedRun) -> None:
        """Open the MLflow run of this identity, and complete it.

        If it has evaluations of later steps than this run, which a killed process logged, it is
        marked as replaced, and a new one begins: MLflow cannot delete them. If there are several,
        as after a request that was repeated, the newest one without later steps is continued.
        """
        run.results.mkdir(parents=True, exist_ok=True)
        uri = self._uri or f"sqlite:///{run.results.absolute()}/mlflow.db"
        # Without the lock, two processes could both create the database's tables.
        with hold_lock(run.results / ".mlflow.lock"):
            self._client = self._mlflow.MlflowClient(uri)
            experiment = self._find_experiment(run.results)
        earlier_runs = self._client.search_runs(
            [experiment], filter_string=f"tags.`{IDENTITY}` = '{run.identity}'"
        )
        continued: Any = None  # the MLflow run that this run continues
        for earlier_run in earlier_runs:  # the newest first
            earlier_id = earlier_run.info.run_id
            logged = self._read_logged(earlier_id, earlier_run.data.metrics)
            has_later_steps = any(step > run.steps_done for _, step in logged)
            if continued or has_later_steps:
                self._client.set_tag(earlier_id, IDENTITY, f"{run.identity} (replaced)")
                self._client.set_terminated(earlier_id, "KILLED")
            else:
                continued = earlier_run
                self._logged = logged
        known_parameters = dict[str, str]()
        if continued:
            self._run = continued.info.run_id
            known_parameters = continued.data.params
            self._client.update_run(self._run, status="RUNNING")
        else:
            self._logged = set()
            self._run = self._create_run(experiment, run)
        parameters = []
        for key, value in run.config.items():
            if key not in known_parameters:
                parameters.append(self._mlflow.entities.Param(key, str(value)[:MAX_TEXT]))
        self._client.log_batch(self._run, params=parameters)
        for evaluation in run.evaluations:
            self.log(evaluation)

    def _create_run(self, experiment: str, run: LoggedRun) -> str:
        """Create an MLflow run without metrics and parameters, and return its id."""
        # Ours come last, so that no tag of the user's replaces them.
        tags = dict.fromkeys(run.tags, "true") | {IDENTITY: run.identity, "recipe": run.recipe}
        if run.notes:
            tags["mlflow.note.content"] = run.notes
        created = self._client.create_run(experiment, run_name=run.title, tags=tags)
        return str(created.info.run_id)

    def _read_logged(self, run_id: str, metrics: Iterable[str]) -> set[tuple[str, int]]:
        """Return the steps of an MLflow run's metrics."""
        histories = [self._client.get_metric_history(run_id, name) for name in metrics]
        return {(point.key, point.step) for point in chain.from_iterable(histories)}

    def _find_experiment(self, results: Path) -> str:
        """Return the id of the experiment, which is created if it does not exist."""
        known = self._client.get_experiment_by_name(self._experiment)
        if known:
            return str(known.experiment_id)
        folder = None if self._uri else (results.absolute() / "mlartifacts").as_uri()
        return str(self._client.create_experiment(self._experiment, artifact_location=folder))

    def log(self, metrics: dict[str, float]) -> None:
        """Add an evaluation, unless the MLflow run has it."""
        step = int(metrics["step"])
        values = {key: value for key, value in metrics.items() if key != "step"}
        self._log_at(step, values)

    def _log_at(self, step: int, values: Mapping[str, float]) -> None:
        """Add the finite ones of these values that the MLflow run does not have."""
        if self._is_unanswered:
            metrics = self._client.get_run(self._run).data.metrics
            self._logged = self._read_logged(self._run, metrics)
        now = int(1000 * time.time())
        points = []
        for key, value in values.items():
            if (key, step) not in self._logged and math.isfinite(value):
                points.append(self._mlflow.entities.Metric(key, value, now, step))
        self._is_unanswered = True
        self._client.log_batch(self._run, metrics=points)
        self._is_unanswered = False
        self._logged.update((point.key, step) for point in points)

    def finish(self, record: Record, path: Path) -> None:
        """Add the final metrics and ε, and attach the record."""
        final = {f"final_{key}": value for key, value in record.metrics.items()}
        privacy = records.flatten(record.document["privacy"], "privacy.")
        numbers = {k: v for k, v in privacy.items() if type(v) in (int, float)}
        self._log_at(0, final | numbers)
        self._client.log_artifact(self._run, str(path))
        self._client.set_terminated(self._run, "FINISHED")

    def close(self) -> None:
        """Mark the run as stopped."""
        self._client.set_terminated(self._run, "KILLED")
