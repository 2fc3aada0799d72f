"""Show a run's progress, and call its callbacks.

A callback (`execution.callbacks=[NAME]`) is a plug-in, `@register("callback", "NAME")`: a function
of the run's configuration that returns `on_step(metrics)`. It gets the test metrics and the tight ε
of every evaluation, as in the record. It gets no numbers from training examples, such as a loss or
a batch's size, and neither time nor memory of a step: they would cost privacy.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

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


class Watcher:
    """Follows a run. This base class does nothing. Nothing that it is told costs privacy."""

    def started(
        self,
        recipe: str,
        seed: int,
        steps: int,
        done: int,
    ) -> None: ...
    def opened(self, home: Path, done: int) -> None: ...
    def stepped(self, step: int) -> None: ...
    def evaluated(
        self,
        epoch: int,
        step: int,
        metrics: dict[str, float],
        epsilon: float,
    ) -> None: ...


class Live(Watcher):
    """Shows the progress of one run, with the remaining time from its second epoch on."""

    def __init__(
        self,
        console: Console,
        name: str = "",
    ) -> None:
        self._console = console
        self._prefix = f"{name}  " if name else ""
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._steps = self._first = 0
        self._since: float | None = None
        self._name = ""

    def __enter__(self) -> Live:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def started(
        self,
        recipe: str,
        seed: int,
        steps: int,
        done: int,
    ) -> None:
        self._name = f"{self._prefix}{recipe} seed {seed}"
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
        whole = Column(no_wrap=True)  # steps, ε and time are never truncated
        time_left = Column(no_wrap=True, min_width=len("0:00:00"))
        columns = [
            TextColumn("{task.description}", table_column=_cut(1, 8)),
            MofNCompleteColumn(table_column=whole),
            TextColumn("{task.fields[state]}", table_column=_cut(3, 1)),
            TextColumn("{task.fields[spent]}", table_column=whole),
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

    def evaluated(
        self,
        epoch: int,
        step: int,
        metrics: dict[str, float],
        epsilon: float,
    ) -> None:
        state = _state(metrics)
        spent = f"ε {show_epsilon(epsilon)}"
        now = time.monotonic()
        left = ""
        if self._since is not None and step > self._first:
            seconds_of_step = (now - self._since) / (step - self._first)
            seconds = seconds_of_step * (self._steps - step)
            left = f"  {seconds:.0f} s left"
        if self._bar:
            if self._since is None:
                self._bar.reset(self._task, completed=step)
            self._bar.update(self._task, state=state, spent=spent)
        else:
            self._console.print(
                f"{self._name}: epoch {epoch}, step {step:,}/{self._steps:,}  {state}  {spent}"
                f"{left}",
                highlight=False,
            )
        if self._since is None:
            self._first, self._since = step, now


def _state(metrics: dict[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())


def _cut(ratio: int, least: int) -> Column:
    """Return a column that takes a part of the remaining width, and is truncated to it."""
    return Column(no_wrap=True, overflow="ellipsis", ratio=ratio, min_width=least)


class Reporter(Watcher):
    """Writes the log, calls a run's callbacks and logger, and passes events to another watcher."""

    def __init__(self, beside: Watcher, config: Run) -> None:
        self._beside = beside
        names = dict.fromkeys(config.execution.callbacks or ())
        self._callbacks = [lookup("callback", name)(config) for name in names]
        self._tracker = Tracker(config)

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, *_: object) -> None:
        self._tracker.close()

    def opened(self, home: Path, done: int) -> None:
        self._tracker.start(home, done)

    def finished(self, record: Record) -> None:
        """Pass the record to the logger, if this process carried out the run."""
        self._tracker.finish(record)

    def started(
        self,
        recipe: str,
        seed: int,
        steps: int,
        done: int,
    ) -> None:
        log.info(f"{recipe} seed {seed}: starts at step {done:,} of {steps:,}")
        self._beside.started(recipe, seed, steps, done)

    def stepped(self, step: int) -> None:
        self._beside.stepped(step)

    def evaluated(
        self,
        epoch: int,
        step: int,
        metrics: dict[str, float],
        epsilon: float,
    ) -> None:
        evaluation = {"step": step, "epoch": epoch, "epsilon_tight": epsilon, **metrics}
        for on_step in self._callbacks:
            on_step(dict(evaluation))
        self._tracker.log(evaluation)
        log.info(f"epoch {epoch}, step {step:,}  {_state(metrics)}  ε {show_epsilon(epsilon)}")
        self._beside.evaluated(epoch, step, metrics, epsilon)
