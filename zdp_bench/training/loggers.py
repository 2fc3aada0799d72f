"""Send a run's test metrics, ε and record to an experiment tracker.

A logger (`logger=NAME`) gets what the record holds and nothing else. Numbers from training examples
would be releases that no ε covers. Trackers add the time of each evaluation, which no ε covers
either. A logger never stops a run: after its first error, which is a warning, it is called again
only at the run's end.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from zdp_bench import records
from zdp_bench.config.schema import NOT_RECORDED, Run
from zdp_bench.errors import UserError, in_one_line
from zdp_bench.foreign_files import read_text
from zdp_bench.records import Record
from zdp_bench.registry import lookup

IDENTITY = "logged_as"  # file in a run's folder that holds the run's name in trackers
RETRYING = "The run goes on without it, and calls it again at its end."
LACKING = "The tracker may lack a part of this run."

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoggedRun:
    """What a logger is told before the first step.

    Attributes:
        identity: name of the run in a tracker. It stays the same when the run is resumed.
        title: the run's name, or its recipe and the first digits of its digest.
        recipe: the recipe's name.
        tags: words to find the run by.
        notes: a text about the run.
        config: the recorded configuration, by dotted key.
        results: the results folder.
        steps_done: steps that were taken before. A killed process may have logged later ones, whose
            weights are lost.
        evaluations: the evaluations of those steps. A tracker may lack some, because a killed
            process may not have sent all.
    """

    identity: str
    title: str
    recipe: str
    tags: list[str]
    notes: str
    config: dict[str, Any]
    results: Path
    steps_done: int
    evaluations: Sequence[dict[str, Any]] = ()


class Logger(Protocol):
    """One tracker; see `zdp_bench/extras/loggers`."""

    def start(self, run: LoggedRun) -> None:
        """Open the run, or the one that this run continues; it is called again if it failed."""

    def log(self, metrics: dict[str, float]) -> None:
        """Add an evaluation: `step`, `epoch`, `epsilon_tight` and the test metrics."""

    def finish(self, record: Record, path: Path) -> None:
        """Add the record, which is stored at `path`, and close the run."""

    def close(self) -> None:
        """Close a run that stopped before its end."""


class Tracker:
    """The configured logger of one run, if any. None of its methods raises an error.

    Raises:
        ImportError: on creation, if the logger's package is not installed.
    """

    def __init__(self, config: Run) -> None:
        self._config = config
        self._home: Path | None = None
        self._logger: Logger | None = None
        self._calls: list[Callable[[], None]] = []  # that the logger has not carried out
        self._has_failed = False
        if plugin := config.logger:
            self._logger = lookup("logger", plugin.name)(**plugin.options)

    def start(
        self, home: Path, steps_done: int, evaluations: Sequence[dict[str, Any]] = ()
    ) -> None:
        """Open the run whose folder is `home`.

        Args:
            home: the run's folder.
            steps_done, evaluations: see `LoggedRun`. Default: no evaluations.
        """
        self._home = home
        known = list(evaluations)  # the caller adds later ones to its own
        if logger := self._logger:
            self._call(lambda: logger.start(describe_run(self._config, home, steps_done, known)))

    def log(self, metrics: dict[str, float]) -> None:
        """Log an evaluation."""
        if self._logger:
            self._call(partial(self._logger.log, metrics))

    def finish(self, record: Record) -> None:
        """Log the record and close the run. Warn if the run had finished before."""
        if self._logger and self._home:
            self._has_failed = False  # a server may be back
            call = partial(self._logger.finish, record, self._home / "record.json")
            self._call(call, LACKING)
            if self._has_failed:
                with suppress(Exception):  # the first error was a warning
                    self._logger.close()
        elif self._logger:
            log.warning(
                "logger=%s: this run was done before and is not logged again; force=true runs it "
                "again.",
                self._config.logger and self._config.logger.name,
            )
        self._logger = None

    def close(self) -> None:
        """Close a run that has not finished.

        A logger that has failed is not called: a server that is down would delay the end of a
        process that was asked to stop.
        """
        if self._logger and self._home:
            self._call(self._logger.close, LACKING)
        self._logger = None

    def _call(self, call: Callable[[], None], consequence: str = RETRYING) -> None:
        """Carry out a call after those that failed before it; until the end, only keep it.

        Args:
            call: the call.
            consequence: what follows from its error, for the warning. Default: `RETRYING`.
        """
        self._calls.append(call)
        if self._has_failed:
            return
        try:
            while self._calls:
                self._calls[0]()
                del self._calls[0]
        except Exception as error:
            self._has_failed = True
            log.warning(
                "logger=%s: %s: %s. %s",
                self._config.logger and self._config.logger.name,
                type(error).__name__,
                in_one_line(error),
                consequence,
            )


def describe_run(
    config: Run,
    home: Path,
    steps_done: int,
    evaluations: Sequence[dict[str, Any]],
) -> LoggedRun:
    """Return what a logger is told about the run in the folder `home`."""
    recorded = {key: value for key, value in config.resolved.items() if key not in NOT_RECORDED}
    return LoggedRun(
        identity=_identity_of(home),
        title=config.name or f"{config.recipe}/{home.name[:8]}",
        recipe=config.recipe,
        tags=config.tags or [],
        notes=config.notes or "",
        config=records.flatten(recorded),
        results=config.results,
        steps_done=steps_done,
        evaluations=evaluations,
    )


def _identity_of(home: Path) -> str:
    """Return the name of a run in trackers, which is new unless the run is resumed.

    Raises:
        UserError: the file with the name is damaged.
    """
    path = home / IDENTITY
    if os.path.lexists(path):
        identity = read_text(path).strip()
        if not re.fullmatch(r"[\w.-]{1,64}", identity):
            raise UserError(f"{path}: is damaged; delete it, and the run gets a new name.")
        return identity
    identity = f"{home.name[:8]}-{secrets.token_hex(3)}"
    records.write_text(path, f"{identity}\n")
    return identity
