"""The trials of a search: kept in Optuna's study, made into runs within one ε, and scored.

A trial that a killed search left open is carried out again with the values it has, so that its run
continues from its checkpoint. What Optuna proposes depends on the trial's number and those before
it, and on nothing that a restart would lose.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import optuna
import torch
from optuna.samplers import RandomSampler, TPESampler
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.engine import URL

from zdp_bench import records
from zdp_bench.config import configured
from zdp_bench.config.compose import hydra_session
from zdp_bench.config.constraints import require_central
from zdp_bench.config.schema import Run
from zdp_bench.data import Source, Splits
from zdp_bench.errors import UserError, unknown
from zdp_bench.experiments.sweep import Shown, launch
from zdp_bench.extras.search.space import Search
from zdp_bench.privacy.accounting import tight_epsilon
from zdp_bench.privacy.calibration import calibrate_mechanism
from zdp_bench.privacy.composition import Spent, together
from zdp_bench.privacy.mechanism import Mechanism
from zdp_bench.privacy.statement import show_epsilon
from zdp_bench.report.cells import LESS_IS_BETTER
from zdp_bench.training import checkpoint
from zdp_bench.training.evaluation import DIVERGED, evaluate
from zdp_bench.training.public_start import digest_of
from zdp_bench.training.setup import ModelSetup, Setup, load_data

Direction = Literal["minimize", "maximize"]


class Study:
    """An Optuna study of a search, in one SQLite file that survives a kill at any time.

    Args:
        folder: the search's own; `study.db` is in it.
        seed: the recipe's, from which proposals follow.
    """

    def __init__(self, search: Search, folder: Path, direction: Direction, seed: int) -> None:
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._search, self._seed = search, seed
        url = URL.create("sqlite", database=str(folder / "study.db"))
        self._study = optuna.create_study(
            storage=url.render_as_string(),
            study_name="search",
            direction=direction,
            load_if_exists=True,
        )

    def trials(self) -> list[FrozenTrial]:
        """Return every trial that has its values, in order."""
        every = self._study.get_trials(deepcopy=False)
        return [one for one in every if set(one.params) == set(self._search.space.searched)]

    def take(self, most: int) -> list[FrozenTrial]:
        """Return trials to carry out, at most so many: open ones, or else new ones; [] if none."""
        known = self.trials()
        mine = [one.number for one in known if not one.state.is_finished()][:most]
        if not mine:
            left = range(len(known), min(len(known) + most, self._search.trials))
            mine = [self._ask(number) for number in left]
        return [one for one in self.trials() if one.number in mine]

    def tell(self, trial: FrozenTrial, value: float | None) -> None:
        """Enter a trial's score; None: it failed."""
        state = TrialState.FAIL if value is None else TrialState.COMPLETE
        self._study.tell(trial.number, value, state=state)

    def _ask(self, number: int) -> int:
        search, own = self._search, hashlib.sha256(f"{self._seed}:{number}".encode()).digest()[:4]
        seed = int.from_bytes(own)
        with warnings.catch_warnings(
            action="ignore", category=optuna.exceptions.ExperimentalWarning
        ):
            tpe = TPESampler(seed=seed, constant_liar=True)
        self._study.sampler = tpe if search.sampler == "tpe" else RandomSampler(seed=seed)
        if search.sampler == "grid":  # a killed search may have left it there already
            self._study.enqueue_trial(search.space.grid()[number], skip_if_exists=True)
        return self._study.ask(search.space.searched).number


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
class TrialRun:
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
        self._jobs: dict[int, TrialRun] = {}
        self._spent: dict[int, Spent] = {}

    def job(self, trial: FrozenTrial) -> TrialRun:
        """Return a trial as a run."""
        if trial.number not in self._jobs:
            self._jobs[trial.number] = self._make_job(trial)
        return self._jobs[trial.number]

    def _make_job(self, trial: FrozenTrial) -> TrialRun:
        plain = self.search.space.words(trial.params)
        words = [*plain, *noise_words(self.search, plain, self.data)]
        config = configured(words)
        run = digest_of(config, self.data.digest)
        return TrialRun(words, config, records.folder(config.results, config.recipe, run), run)

    def carry_out(self, trials: Sequence[FrozenTrial], study: Study, by: Launch) -> None:
        """Run trials, measure them and tell the study.

        Raises:
            UserError: a run could not be made, for another reason than that it diverged.
        """
        jobs = {trial.number: self.job(trial) for trial in trials}
        if self.search.epsilon:
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


SLACK = 1 + 1e-9  # a cluster's FFT may round an ε to the other side


def spend(config: Run, data: Splits) -> Spent:
    """Return what a run will spend if it takes all its steps.

    Raises:
        UserError: see `Setup.of`.
    """
    setup = Setup.of(config, data, torch.device("cpu"))
    return Spent(setup.mechanism.z, setup.plan.sampling, setup.plan.steps)


def noise_words(search: Search, words: Sequence[str], data: Splits) -> list[str]:
    """Return the overrides that give a trial its share of the search's ε; [] without one.

    Formal guarantees: as many trials as this one as are planned have together a tight ε of at most
    `search.epsilon`. `max_epsilon` ends a trial that has to repeat steps after a kill.

    Raises:
        UserError: no noise reaches the ε.
    """
    if search.epsilon is None:
        return []
    off = [f"privacy.{key}=null" for key in ("target_epsilon", "claimed_epsilon", "max_epsilon")]
    first = configured([*words, *off])
    if "noise_multiplier" not in first.algorithm.options:
        raise UserError(
            f"--epsilon with algorithm={first.algorithm.name}: it has no noise that could keep the "
            "search within an ε; name a private algorithm, or leave --epsilon out."
        )
    delta = first.privacy.delta
    unit = spend(configured([*words, *off, "algorithm.noise_multiplier=1.0"]), data)
    try:
        mechanism, steps = Mechanism.of_z(unit.z, unit.sampling), unit.steps * search.trials
        found = calibrate_mechanism(search.epsilon, mechanism, steps, delta)
    except ValueError as error:
        raise UserError(f"--epsilon {search.epsilon:g}: {error}.") from None
    noise = f"algorithm.noise_multiplier={found!r}"
    own = spend(configured([*words, *off, noise]), data)
    most = tight_epsilon(Mechanism.of_z(own.z, own.sampling), own.steps, delta) * SLACK
    return [*off[:2], noise, f"privacy.max_epsilon={most!r}"]


def require_within(search: Search, spent: Sequence[Spent], delta: float) -> None:
    """Refuse a trial that would take the search past its ε.

    Args:
        spent: of every trial so far, the new one last.

    Raises:
        UserError: says so.
    """
    assert search.epsilon is not None
    total = together(spent, delta)
    if total > search.epsilon:
        raise UserError(
            f"--epsilon {search.epsilon:g}: with trial {len(spent)} the search would have a "
            f"tight ε of {show_epsilon(total)}, since its trials differ in sampling or steps. It "
            "ends here; search keys that change neither, or ask for fewer trials."
        )


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
