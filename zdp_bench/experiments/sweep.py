"""Jobs: one composed configuration each, carried out here or by Hydra's launchers."""

from __future__ import annotations

import math
import os
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from omegaconf import DictConfig, OmegaConf

from zdp_bench import records
from zdp_bench.config import compose, parse
from zdp_bench.config.words import parse_words, read_words
from zdp_bench.errors import Busy, UserError
from zdp_bench.records import Record
from zdp_bench.registry import lookup
from zdp_bench.report import names
from zdp_bench.report.number_format import epsilon
from zdp_bench.report.papers import check_claims
from zdp_bench.report.sheet import Sheet
from zdp_bench.training.interrupts import end_with_parent, explain, find_stop, raise_if_asked

if TYPE_CHECKING:
    from zdp_bench.training.run import Runner

MOST_JOBS = 100_000  # of a sweep, which Hydra lists before it begins
Shown = Literal["all", "progress", "nothing"]
# What joblib and submitit raise when they lose a process; by name, for neither need be installed.
LOST = (
    "TerminatedWorkerError",
    "BrokenProcessPool",
    "FailedJobError",
    "UncompletedJobError",
    "JobPausedError",
)


@dataclass(frozen=True)
class Place:
    """Where a job stands among others.

    Attributes:
        count: of all jobs.
        keys: in which they differ.
        numbers: of those that a launcher gets at a time, from 0; None if it gets all.
    """

    count: int
    keys: tuple[str, ...] = ()
    numbers: tuple[int, ...] | None = None

    def name(self, number: int, words: Sequence[str]) -> str:
        """Return '#2/4 lr=1 σ=1' for a job of a launcher's list with these overrides."""
        number = self.numbers[number] if self.numbers else number
        short = dict(zip(self.keys, names.short(self.keys), strict=True))
        settings = [f"{short[key]}={value}" for key, value in self.values(words).items()]
        return " ".join([f"#{number + 1}/{self.count}", *settings])

    def values(self, words: Sequence[str]) -> dict[str, str]:
        """Return the values that overrides give to the keys in which jobs differ."""
        given = {key: value for key, _, value in (word.partition("=") for word in words)}
        return {key: _brief_value(given[key]) for key in self.keys if key in given}


def _brief_value(word: str) -> str:
    """Return a value without spaces, with four digits if it is a fraction."""
    try:
        return word if word.lstrip("+-").isdecimal() else f"{float(word):.4g}"
    except ValueError:
        return word.replace(" ", "")


@dataclass(frozen=True)
class Made:
    """What a job's run is, in short: other processes hand it back."""

    metric: str
    value: float
    epsilon: float
    run: str


@dataclass(frozen=True)
class Job:
    """A job that has ended: its overrides, and its run or why there is none."""

    words: list[str]
    ended: Made | str


class SweepJob:
    """What Hydra calls with a composed configuration, in this process or a launcher's.

    It returns errors instead of raising them, so that one bad job does not end a sweep.

    Args:
        sweep: a bug of ours is returned as well, after its traceback was printed.
        wait: wait for another process that runs the same job; otherwise return `Busy`.
        show: of each run on standard output: its progress, and all: also its summary at its end.
        place: of several jobs, what they are called by.
        number: of this one, where Hydra does not say it.
    """

    def __init__(
        self,
        sweep: bool = False,
        wait: bool = True,
        show: Shown = "all",
        place: Place | None = None,
        number: int | None = None,
    ) -> None:
        self.sweep = sweep
        self.wait = wait
        self.show = show
        self.place = place
        self.number = number
        self._starter = os.getpid()

    def __call__(self, config: DictConfig) -> UserError | Made:
        from hydra.core.hydra_config import HydraConfig

        raise_if_asked()
        hydra = HydraConfig.get()
        if os.getpid() != self._starter and "joblib" in hydra.launcher._target_:
            end_with_parent(self._starter)
        try:
            overrides = list(hydra.overrides.task)
            name = ""
            if self.place:
                number = hydra.job.num if self.number is None else self.number
                name = self.place.name(number, overrides)
            record = _carry_out(config, overrides, wait=self.wait, show=self.show, name=name)
            return Made(
                record["headline"]["name"],
                record["headline"]["value"],
                record["privacy"]["epsilon_tight"],
                record["run"],
            )
        except Exception as error:
            if stop := find_stop(error):
                raise stop from None
            if isinstance(error, UserError):
                return error
            if sentence := explain(error):
                return sentence
            if not self.sweep:
                raise
            traceback.print_exc()
            return UserError(f"{_brief(error)} (a bug; its traceback is above)")


def sweep(driver: Any, overrides: list[str]) -> tuple[Place, list[Job]]:
    """Carry out every job of a sweep; return what they are called by, and how each ended.

    Several processes may share a sweep: each takes the jobs that no other runs, and at the end
    waits for those of the others, so that what a killed process left is done as well.

    Args:
        driver: Hydra's, from `hydra_session`.

    Raises:
        UserError: a launcher lost its processes, and so does not know what they did.
    """
    place = _count(driver, overrides)
    with _readable_losses():
        batches = driver.multirun(
            config_name="config",
            task_function=SweepJob(sweep=True, wait=False, place=place),
            overrides=overrides,
        )
    return place, _finish(driver, [job for batch in batches for job in batch], place)


def _count(driver: Any, overrides: list[str]) -> Place:
    """Count the jobs; refuse none, and more than `MOST_JOBS` before Hydra writes all of them out.

    Raises:
        UserError: says how many there would be.
    """
    from hydra.core.override_parser.types import ChoiceSweep, Glob, RangeSweep
    from hydra.types import RunMode

    config = driver.compose_config("config", overrides, run_mode=RunMode.MULTIRUN)
    params = OmegaConf.select(config, "hydra.sweeper.params") or {}
    parsed = parse_words([f"{key}={value}" for key, value in params.items()] + overrides)
    jobs, keys = 1.0, list[str]()
    # A word of the command line takes the place of the recipe's axis of that key.
    for axis in {axis.key_or_group: axis for axis in parsed}.values():
        value, before = axis.value() if axis.is_sweep_override() else None, jobs
        if isinstance(value, RangeSweep):
            start, stop, step = (
                float(number or 0) for number in (value.start, value.stop, value.step)
            )
            jobs *= max(0.0, math.ceil((stop - start) / step)) if step else 1.0
        elif isinstance(value, ChoiceSweep):
            jobs *= len(value.list)
        elif isinstance(value, Glob):
            axis.config_loader = driver.config_loader
            jobs *= sum(1 for _ in axis.sweep_string_iterator())
        keys += [str(axis.key_or_group)] if jobs != before else []
    if not jobs:
        raise UserError("this sweep has no jobs: give each of its keys one value or more.")
    if jobs > MOST_JOBS:
        raise UserError(
            f"this sweep has {jobs:,.0f} jobs, where {MOST_JOBS:,} are allowed; give fewer values."
        )
    return Place(int(jobs), tuple(keys))


def launch(
    driver: Any,
    jobs: list[list[str]],
    launcher: str,
    settings: list[str],
    show: Shown = "all",
    place: Place | None = None,
) -> list[tuple[list[str], str]]:
    """Give jobs that no sweep could list to a launcher; return the failed (overrides, reason).

    Args:
        driver: Hydra's, from `hydra_session`.
        jobs: the overrides of each.
        settings: the launcher's own overrides, `hydra.launcher.KEY=VALUE`.
        show: of every run, as in `SweepJob`, and so is `place`.

    Raises:
        UserError: as for `sweep`.
    """
    from hydra._internal.callbacks import Callbacks
    from hydra.core.plugins import Plugins
    from hydra.core.utils import setup_globals
    from hydra.types import HydraContext, RunMode

    setup_globals()
    read_words(settings, sweep=True)
    with _readable_losses():
        chosen = driver.compose_config(
            "config", [f"launcher={launcher}", *settings], run_mode=RunMode.MULTIRUN
        )
        carrier = Plugins.instance().instantiate_launcher(
            hydra_context=HydraContext(config_loader=driver.config_loader, callbacks=Callbacks()),
            task_function=SweepJob(sweep=True, wait=False, show=show, place=place),
            config=chosen,
        )
        words = [[f"launcher={launcher}", *job] for job in jobs]
        ended = _finish(driver, carrier.launch(words, initial_job_idx=0), place, show)
    return [(job.words, job.ended) for job in ended if isinstance(job.ended, str)]


def _finish(
    driver: Any, jobs: Iterable[Any], place: Place | None, show: Shown = "all"
) -> list[Job]:
    """Return how each job ended, after waiting for those of other processes."""
    ended = []
    for number, job in enumerate(jobs):
        words, result = list(job.overrides), job.return_value
        if isinstance(result, Busy):
            again = SweepJob(sweep=True, show=show, place=place, number=number)
            result = driver.run(
                config_name="config", task_function=again, overrides=words
            ).return_value
        ended.append(Job(words, str(result) if isinstance(result, UserError) else result))
    return ended


def show_sweep(place: Place, jobs: Sequence[Job]) -> Sheet:
    """Return what ends a sweep: a line a job, with what differs, its metric, its ε and its run."""
    metrics = {job.ended.metric for job in jobs if isinstance(job.ended, Made)}
    rows = []
    for number, job in enumerate(jobs, start=1):
        values, made, shown = place.values(job.words), job.ended, ["failed", "", ""]
        if isinstance(made, Made):
            metric = "" if len(metrics) == 1 else f"{made.metric} "
            shown = [f"{metric}{made.value:.4f}", epsilon(made.epsilon), made.run[:8]]
        rows.append([str(number), *(values.get(key, "") for key in place.keys), *shown])
    metric = metrics.pop() if len(metrics) == 1 else "metric"
    columns = ["#", *names.short(place.keys), f"test {metric}", "tight ε", "run"]
    return Sheet("Sweep", columns, rows)


@contextmanager
def _readable_losses() -> Iterator[None]:
    """Turn a launcher's exceptions into one sentence."""
    try:
        yield
    except Exception as error:
        if "srun" in str(error):
            raise UserError(
                "launcher=slurm: there is no Slurm here (no `srun`). "
                "Try launcher=submitit or joblib."
            ) from None
        if type(error).__name__ not in LOST:
            raise
        raise UserError(
            f"a process of the sweep was lost ({_brief(error)}). "
            "The same command does what is missing."
        ) from None


def _brief(error: Exception) -> str:
    text = str(error).strip() or "no words"
    return f"{type(error).__name__}: {text.splitlines()[0][:200]}"


def run_one(overrides: list[str], runner: Runner | None = None) -> None:
    """Compose and carry out one run, here or by `runner`.

    Raises:
        UserError: an override is wrong or the run cannot be made.
    """
    _carry_out(compose(overrides), overrides, runner=runner)


def _carry_out(
    config: DictConfig,
    overrides: list[str],
    wait: bool = True,
    runner: Runner | None = None,
    show: Shown = "all",
    name: str = "",
) -> Record:
    """Check a composed configuration and run it; print what `SweepJob` says, under its name."""
    from zdp_bench.report.terminal import show_run
    from zdp_bench.training import distributed
    from zdp_bench.training.progress import Live, Reporter, Silent, console
    from zdp_bench.training.run import run

    checked = parse(config, overrides)
    check_claims(checked.claims.table, checked.claims.row)
    if checked.federated.nodes and runner is None:
        runner = lookup("runner", "federated")
    if distributed.rank():  # of several ranks, only the first prints
        return run(checked, Silent(), runner=runner).record
    watch = nullcontext(Silent()) if show == "nothing" else Live(console(), name)
    with watch as live, Reporter(live, checked) as progress:
        outcome = run(checked, progress, wait, runner)
    records.renew_csv(checked.results)
    if show == "all":
        console().print(show_run(outcome.record, outcome.path, outcome.found, name))
    return outcome.record
