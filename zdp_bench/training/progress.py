"""The console, and a run's progress: a bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.segment import Segment

from zdp_bench.errors import printable
from zdp_bench.privacy.statement import write_epsilon

BAR, BAR_TERMINAL = 20, 110  # widths: of the bar, and of the narrowest terminal with one
SHORTEST = 12  # a run's name is not cut below this; its metrics are


class PlainText(Console):
    """A console whose text is printable, and no markup, whatever a record holds."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else printable(segment.text)
            yield segment._replace(text=text)


def console() -> Console:
    """Return standard output; wide enough for a table if it is no terminal."""
    return PlainText(width=None if sys.stdout.isatty() else 160, markup=False)


class Silent:
    """A `loop.Watcher` that prints nothing."""

    def started(self, recipe: str, seed: int, steps: int, done: int) -> None: ...
    def stepped(self, step: int) -> None: ...
    def evaluated(
        self, epoch: int, step: int, metrics: dict[str, float], epsilon: float
    ) -> None: ...


class Live:
    """A `loop.Watcher` that shows one run; a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._steps = self._first = 0
        self._since = time.monotonic()
        self._name = ""

    def __enter__(self) -> Live:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def started(self, recipe: str, seed: int, steps: int, done: int) -> None:
        self._name, self._steps, self._first, self._since = (
            f"{recipe} seed {seed}",
            steps,
            done,
            time.monotonic(),
        )
        if done:
            self._console.print(f"{self._name}: goes on at step {done:,} of {steps:,}")
        if self._console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                *([BarColumn(BAR)] if self._console.width >= BAR_TERMINAL else []),
                MofNCompleteColumn(),
                TextColumn("{task.fields[state]}"),
                TextColumn("{task.fields[spent]}"),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task(
                self._fit([], "")[0], total=steps, completed=done, state="", spent=""
            )
            self._bar.start()

    def stepped(self, step: int) -> None:
        if self._bar:
            self._bar.update(self._task, completed=step)

    def evaluated(self, epoch: int, step: int, metrics: dict[str, float], epsilon: float) -> None:
        shown, spent = (
            [f"{name} {value:.4g}" for name, value in metrics.items()],
            f"ε {write_epsilon(epsilon)}",
        )
        if self._bar:
            name, state = self._fit(shown, spent)
            self._bar.update(self._task, description=name, state=state, spent=spent)
        else:
            left = (
                (time.monotonic() - self._since) / max(1, step - self._first) * (self._steps - step)
            )
            state = "  ".join([*shown, spent])
            self._console.print(
                f"{self._name}: epoch {epoch}, step {step:,}/{self._steps:,}  {state}  {left:.0f} "
                "s left",
                highlight=False,
            )

    def _fit(self, shown: list[str], spent: str) -> tuple[str, str]:
        """Return name and metrics, cut so that steps, ε and the time left fit beside them."""
        bar = BAR + 1 if self._console.width >= BAR_TERMINAL else 0
        room = self._console.width - bar - 2 * len(str(self._steps)) - len(f"/ {spent} 0:00:00") - 3
        state = ""
        for metric in shown:
            longer = f"{state}  {metric}".strip()
            if len(longer) + SHORTEST > room:
                break
            state = longer
        left = max(1, room - len(state))
        return (self._name if len(self._name) <= left else self._name[: left - 1] + "…"), state
