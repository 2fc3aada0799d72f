"""The trials of a search as runs: made of words, carried out by a launcher, measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from optuna.trial import FrozenTrial

from zdp_bench import records
from zdp_bench.config import configured
from zdp_bench.config.compose import hydra_session
from zdp_bench.config.constraints import require_central
from zdp_bench.config.schema import Run
from zdp_bench.data import Splits
from zdp_bench.errors import UserError
from zdp_bench.experiments.sweep import Shown, launch
from zdp_bench.extras.search.noise import noise_words, require_within, spend
from zdp_bench.extras.search.plan import Search
from zdp_bench.extras.search.score import Yardstick, make_yardstick, score
from zdp_bench.extras.search.study import Study
from zdp_bench.privacy.composition import Spent
from zdp_bench.training.evaluation import DIVERGED
from zdp_bench.training.public_start import digest_of
from zdp_bench.training.setup import load_data

FOLDER = "searches"  # under the results folder


@dataclass(frozen=True)
class Launch:
    """Who carries the trials out.

    Attributes:
        launcher: one of Hydra's, by name.
        settings: its own overrides, `hydra.launcher.KEY=VALUE`.
        at_once: how many trials it gets at a time.
        show: of each trial on standard output.
    """

    launcher: str = "local"
    settings: tuple[str, ...] = ()
    at_once: int = 1
    show: Shown = "progress"


@dataclass(frozen=True)
class Job:
    """A trial as a run: its words, its configuration and its folder."""

    words: list[str]
    config: Run
    home: Path
    run: str


class Trials:
    """The runs behind the trials of a search.

    Attributes:
        config: of an example trial.
        data: that all trials train on.
        by: what they are measured by.
    """

    def __init__(self, search: Search) -> None:
        """Check the search before its first step.

        Raises:
            UserError: a key is unknown, the data is not usable, or nothing may choose the best.
        """
        self.search = search
        self.config = configured(search.space.example())
        require_central(self.config, "search")
        self.data: Splits = load_data(self.config)
        self.by: Yardstick = make_yardstick(search, self.config, self.data)
        self.folder = self.config.results / FOLDER / f"{self.config.recipe}-{search.name}"
        self._jobs: dict[int, Job] = {}
        self._spent: dict[int, Spent] = {}

    def job(self, trial: FrozenTrial) -> Job:
        """Return a trial as a run."""
        if trial.number not in self._jobs:
            self._jobs[trial.number] = self._make_job(trial)
        return self._jobs[trial.number]

    def _make_job(self, trial: FrozenTrial) -> Job:
        plain = self.search.space.words(trial.params)
        words = [*plain, *noise_words(self.search, plain, self.data)]
        config = configured(words)
        run = digest_of(config, self.data.digest)
        return Job(words, config, records.folder(config.results, config.recipe, run), run)

    def carry_out(self, trials: Sequence[FrozenTrial], study: Study, by: Launch) -> None:
        """Run trials, measure them and tell the study.

        Raises:
            UserError: a run could not be made, for another reason than that it diverged.
        """
        jobs = {trial.number: self.job(trial) for trial in trials}
        if self.search.law or self.search.epsilon:
            for trial in study.trials():
                if trial.number <= trials[-1].number and trial.number not in self._spent:
                    self._spent[trial.number] = spend(self.job(trial).config, self.data)
            spent = [one for _, one in sorted(self._spent.items())]
            require_within(self.search, spent, self.config.privacy.delta)
        words = [job.words for job in jobs.values()]
        with hydra_session() as driver:
            failed = launch(driver, words, by.launcher, list(by.settings), by.show)
        reasons = {tuple(said[-len(words[0]) :]): reason for said, reason in failed}
        for trial in trials:
            job = jobs[trial.number]
            if records.read(job.home / "record.json"):
                study.tell(trial, score(self.by, job.config, self.data, job.home, job.run))
                continue
            reason = reasons.get(tuple(job.words), "it left no record")
            if not reason.startswith(DIVERGED):
                raise UserError(f"trial {trial.number + 1}: {reason}")
            study.tell(trial, None)
