"""MLflow's SQLite store; to look at it: `mlflow ui --backend-store-uri sqlite:///results/mlflow.db`.

An experiment is a recipe, a run a run.
"""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

from sqlalchemy.engine import URL

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read at its import
with warnings.catch_warnings(action="ignore"):
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

from zdp_bench.config.schema import Run

TAG = "zdp-bench.run"


class Logger:
    """Writes metrics, and the configuration as parameters, into `results/mlflow.db`."""

    def __init__(self, config: Run, name: str, settings: dict[str, Any]) -> None:
        path = config.results.resolve() / "mlflow.db"
        self._uri = URL.create("sqlite", database=str(path)).render_as_string()
        self._recipe, self._name, self._settings = config.recipe, name, settings
        self._client: MlflowClient | None = None
        self._run = ""

    def write(self, numbers: dict[str, float], step: int) -> None:
        with warnings.catch_warnings(action="ignore"):  # of SQLAlchemy, on MLflow's own tables
            if self._client is None:
                self._client = self._open()
            for name, value in numbers.items():
                self._client.log_metric(self._run, name, value, step=step)

    def close(self) -> None:
        if self._client:
            self._client.set_terminated(self._run)

    def _open(self) -> MlflowClient:
        """Open the run of this name, or make it."""
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        logging.getLogger("alembic").setLevel(logging.WARNING)
        client = MlflowClient(tracking_uri=self._uri)
        try:
            experiment = client.create_experiment(self._recipe)
        except MlflowException:  # it is there
            known = client.get_experiment_by_name(self._recipe)
            assert known is not None
            experiment = known.experiment_id
        there = client.search_runs([experiment], f"tags.`{TAG}` = '{self._name}'")
        if there:
            self._run = there[0].info.run_id
            return client
        made = client.create_run(experiment, run_name=self._name, tags={TAG: self._name})
        self._run = made.info.run_id
        for key, value in self._settings.items():
            client.log_param(self._run, key, value)
        return client
