"""How good a trial was: a metric of its trained model over public validation examples."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from zdp_bench.config.schema import Run
from zdp_bench.data import Source, Splits
from zdp_bench.errors import UserError, unknown
from zdp_bench.extras.search.plan import Search
from zdp_bench.report.cells import LESS_IS_BETTER
from zdp_bench.training import checkpoint
from zdp_bench.training.evaluation import evaluate
from zdp_bench.training.setup import ModelSetup


@dataclass(frozen=True)
class Yardstick:
    """What trials are chosen by.

    Attributes:
        metric: its name.
        part: "validation" or "test".
        examples: the set it is measured over.
    """

    metric: str
    part: str
    examples: Source

    @property
    def direction(self) -> Literal["minimize", "maximize"]:
        """What Optuna is to do with it."""
        return "minimize" if self.metric in ("loss", *LESS_IS_BETTER) else "maximize"


def make_yardstick(search: Search, config: Run, data: Splits) -> Yardstick:
    """Return what the trials of a search are chosen by.

    Raises:
        UserError: there are no validation examples and nobody said that the test set may choose; or
            the task has no such metric.
    """
    if data.validation is None and not search.on_test:
        own = [key for key in config.dataset.options if key.startswith("validation_")]
        more = f"set dataset.{own[0]}" if own else "take a data set that has some"
        raise UserError(
            f"a search chooses by validation records, and dataset={config.dataset.name} has none: "
            f"{more}. --choose-by-test would choose by the test set, whose metric then says too "
            "much of the best trial."
        )
    if search.on_test and data.validation is not None:
        raise UserError(
            f"--choose-by-test: dataset={config.dataset.name} has validation records; leave it out."
        )
    part, examples = ("test", data.test) if search.on_test else ("validation", data.validation)
    assert examples is not None
    setup = ModelSetup.of(config, data, torch.device("cpu"))
    known = evaluate(setup.model, setup.task, examples, setup.device)
    metric = search.metric or setup.task.headline
    if metric not in known:
        raise unknown("metric", metric, known)
    return Yardstick(metric, part, examples)


def score(by: Yardstick, config: Run, data: Splits, home: Path, run: str) -> float | None:
    """Return the metric of a finished run's model; None if it is no number.

    Raises:
        UserError: the run's weights are not there any more.
    """
    saved = checkpoint.load(home / "checkpoint.pt", run)
    if saved is None:
        raise UserError(
            f"{home}: holds a record without its weights, so the trial cannot be measured; move "
            "the folder away, and the search makes it again."
        )
    setup = ModelSetup.of(config, data)
    setup.model.load_state_dict(saved.model)
    value = evaluate(setup.model, setup.task, by.examples, setup.device).get(by.metric, math.nan)
    return value if math.isfinite(value) else None
