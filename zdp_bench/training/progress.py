"""Show a run's progress, and call its callbacks.

A callback (`execution.callbacks=[NAME]`) is a plug-in, `@register("callback", "NAME")`: a function
that takes the run's configuration and returns a function `on_step(metrics)`. The latter is called
with the test metrics and the tight ε of every evaluation, as in the record. It gets no numbers that
depend on training examples, such as a loss, a batch's size, or the time or memory of a step,
because no ε would cover them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from zdp_bench.privacy.statement import show_epsilon
from zdp_bench.records import Record
from zdp_bench.registry import lookup
from zdp_bench.training.loggers import Tracker

if TYPE_CHECKING:  # what prints a table needs neither Hydra nor torch
    from zdp_bench.config.schema import Run

log = logging.getLogger(__name__)
BAR_WIDTH = 20
MIN_WIDTH_FOR_BAR = 110  # width of the narrowest terminal that shows a bar


class Evaluation(NamedTuple):
    """An evaluation of the model on the test set.

    Attributes:
        epoch: number of the epoch.
        step: number of steps that the model has taken.
        metrics: the metrics.
        epsilon: tight ε of these steps.
    """

    epoch: int
    step: int
    metrics: dict[str, float]
    epsilon: float


class Watcher:
    """Receives the events of a run. This base class ignores them.

    No event contains anything that is computed from training examples, except through the trained
    weights.
    """

    def started(
        self,
        config: Run,
        home: Path,
        steps: int,
        done: int,
        evaluations: Sequence[dict[str, Any]] = (),
    ) -> None:
        """A run in the folder `home` is about to take steps.

        Args:
            config: the run's configuration.
            home: its folder.
            steps: number of its steps.
            done: number of those that were taken before.
            evaluations: what `evaluated` was called with for those, as rows. Default: none.
        """

    def stepped(self, step: int) -> None:
        """The model has taken `step` steps."""

    def evaluated(self, evaluation: Evaluation) -> None:
        """The model was evaluated."""


class Live(Watcher):
    """Shows the progress of one run, with the remaining time from its second evaluation on.

    Args:
        console: where to print. On a terminal, progress is one line that is updated in place.
        name: text that precedes the recipe's name. Default: none.
    """

    def __init__(
        self,
        console: Console,
        name: str = "",
    ) -> None:
        self._console = console
        self._prefix = f"{name}  " if name else ""
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._steps = 0
        # Step and time of the first evaluation. The speed is measured from there, because the first
        # epoch includes warm-up.
        self._timed_from_step = 0
        self._timed_from: float | None = None
        self._name = ""

    def __enter__(self) -> Live:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def started(
        self,
        config: Run,
        home: Path,
        steps: int,
        done: int,
        evaluations: Sequence[dict[str, Any]] = (),
    ) -> None:
        self._name = f"{self._prefix}{config.recipe} seed {config.seed}"
        self._steps = steps
        if done:
            self._console.print(f"{self._name}: continues at step {done:,} of {steps:,}")
        if self._console.is_terminal:
            self._bar = self._make_bar()
            self._task = self._bar.add_task(
                self._name, total=steps, completed=done, state="", spent=""
            )
            self._bar.start()

    def _make_bar(self) -> Progress:
        untruncated = Column(no_wrap=True)  # for steps, ε and time
        time_left = Column(no_wrap=True, min_width=len("0:00:00"))
        columns = [
            TextColumn("{task.description}", table_column=_truncated_column(1, 8)),
            MofNCompleteColumn(table_column=untruncated),
            TextColumn("{task.fields[state]}", table_column=_truncated_column(3, 1)),
            TextColumn("{task.fields[spent]}", table_column=untruncated),
            TimeRemainingColumn(table_column=time_left),
        ]
        if self._console.width >= MIN_WIDTH_FOR_BAR:
            columns.insert(1, BarColumn(BAR_WIDTH))
        return Progress(
            *columns,
            console=self._console,
            transient=True,
            expand=True,
            speed_estimate_period=10,
        )

    def stepped(self, step: int) -> None:
        if self._bar:
            self._bar.update(self._task, completed=step)

    def evaluated(self, evaluation: Evaluation) -> None:
        step = evaluation.step
        shown_metrics = _format_metrics(evaluation.metrics)
        shown_epsilon = f"ε {show_epsilon(evaluation.epsilon)}"
        now = time.monotonic()
        time_left = ""
        if self._timed_from is not None and step > self._timed_from_step:
            seconds_per_step = (now - self._timed_from) / (step - self._timed_from_step)
            seconds_left = seconds_per_step * (self._steps - step)
            time_left = f"  {seconds_left:.0f} s left"
        if self._bar:
            if self._timed_from is None:
                self._bar.reset(self._task, completed=step)
            self._bar.update(self._task, state=shown_metrics, spent=shown_epsilon)
        else:
            self._console.print(
                f"{self._name}: epoch {evaluation.epoch}, step {step:,}/{self._steps:,}  "
                f"{shown_metrics}  {shown_epsilon}{time_left}",
                highlight=False,
            )
        if self._timed_from is None:
            self._timed_from_step = step
            self._timed_from = now


def _format_metrics(metrics: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())


def _truncated_column(ratio: int, min_width: int) -> Column:
    """Return a column that takes a part of the remaining width, and is truncated to it."""
    return Column(no_wrap=True, overflow="ellipsis", ratio=ratio, min_width=min_width)


class Reporter(Watcher):
    """Writes the log, calls a run's callbacks and logger, and passes events to another watcher.

    Args:
        watcher: the other watcher.
        config: the run's configuration, which names callbacks and logger.
    """

    def __init__(self, watcher: Watcher, config: Run) -> None:
        self._watcher = watcher
        names = dict.fromkeys(config.execution.callbacks or ())
        self._callbacks = [lookup("callback", name)(config) for name in names]
        self._tracker = Tracker(config)

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, *_: object) -> None:
        self._tracker.close()

    def finished(self, record: Record) -> None:
        """Pass the record to the logger, if this process carried out the run."""
        self._tracker.finish(record)

    def started(
        self,
        config: Run,
        home: Path,
        steps: int,
        done: int,
        evaluations: Sequence[dict[str, Any]] = (),
    ) -> None:
        log.info(f"{config.recipe} seed {config.seed}: starts at step {done:,} of {steps:,}")
        self._watcher.started(config, home, steps, done, evaluations)
        self._tracker.start(home, done, evaluations)

    def stepped(self, step: int) -> None:
        self._watcher.stepped(step)

    def evaluated(self, evaluation: Evaluation) -> None:
        epoch, step, metrics, epsilon = evaluation
        values = {"step": step, "epoch": epoch, "epsilon_tight": epsilon, **metrics}
        for on_step in self._callbacks:
            on_step(dict(values))
        self._tracker.log(values)
        shown_metrics = _format_metrics(metrics)
        log.info(f"epoch {epoch}, step {step:,}  {shown_metrics}  ε {show_epsilon(epsilon)}")
        self._watcher.evaluated(evaluation)
