"""Run jobs in this process or with one of Hydra's launchers.

A job is a composed configuration.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from omegaconf import DictConfig

from zdp_bench import records
from zdp_bench.config import compose, parse
from zdp_bench.config.compose import group_options, hydra_session
from zdp_bench.config.words import parse_words, read_words, readable_errors
from zdp_bench.errors import Busy, UserError, unknown
from zdp_bench.foreign_files import exists
from zdp_bench.privacy.statement import show_epsilon
from zdp_bench.registry import find_module
from zdp_bench.report.budget import describe_together
from zdp_bench.report.papers import check_claims
from zdp_bench.report.sheet import Sheet
from zdp_bench.training.interrupts import (
    CONTINUING,
    Stopped,
    explain,
    find_stop,
    stop_on_request,
    stop_workers_first,
)
from zdp_bench.training.spending import read_spending

if TYPE_CHECKING:
    from zdp_bench.training.run import Runner
    from zdp_bench.training.run_folder import Outcome

# What a job prints: its progress and a summary at its end, only progress, or nothing.
Shown = Literal["all", "progress", "nothing"]
# Prefixes of overrides that are not part of a job's name.
UNNAMED = ("recipe=", "launcher=", "hydra", "paths.", "logger", "name=", "tags=", "notes=")


def name_job(overrides: Sequence[str]) -> str:
    """Return a job's name: its overrides, except those that state where and how it runs."""
    return " ".join(word for word in overrides if not word.startswith(UNNAMED))


@dataclass(frozen=True)
class RunSummary:
    """The summary of a finished run, which a worker process returns.

    Attributes:
        metric: name of the headline metric.
        value: its value on the test set.
        epsilon: tight ε.
        home: folder of the run.
    """

    metric: str
    value: float
    epsilon: float
    home: Path


@dataclass(frozen=True)
class Job:
    """A job that has ended.

    Attributes:
        words: its overrides.
        result: summary of its run, or the reason why it failed.
    """

    words: list[str]
    result: RunSummary | str


class SweepJob:
    """The function that Hydra calls with a composed configuration, in this or another process.

    It returns errors instead of raising them, so that one failed job does not end a sweep.
    """

    def __init__(
        self,
        sweep: bool = False,
        wait: bool = True,
        show: Shown = "all",
        stop_request: Path | None = None,
    ) -> None:
        """Create the function.

        Args:
            sweep: print the traceback of an unexpected exception and return it as an error, so
                that the sweep continues. Default: False, which raises the exception.
            wait: wait for another process that runs the same job, instead of returning `Busy`.
                Default: True.
            show: what to print. Default: "all".
            stop_request: file that asks workers to stop. Default: none; the jobs have no workers.
        """
        self.sweep = sweep
        self.wait = wait
        self.show = show
        self.stop_request = stop_request
        self._starter = os.getpid()

    def __call__(self, config: DictConfig) -> UserError | RunSummary | Stopped:
        from hydra.core.hydra_config import HydraConfig

        hydra = HydraConfig.get()
        launcher = hydra.launcher._target_
        is_worker = os.getpid() != self._starter and "joblib" in launcher
        request = self.stop_request if is_worker else None
        try:
            overrides = list(hydra.overrides.task)
            name = name_job(overrides) if self.sweep else ""
            with stop_on_request(request, self._starter) if request else nullcontext():
                outcome = carry_out(config, overrides, wait=self.wait, show=self.show, name=name)
            headline, privacy = outcome.record.headline, outcome.record.privacy
            home = outcome.path.parent
            return RunSummary(headline.name, headline.value, privacy.epsilon_tight, home)
        except (Exception, Stopped) as error:
            if stop := find_stop(error):
                if request:  # an exit would make joblib kill the other workers
                    if os.getppid() != self._starter:
                        os._exit(stop.exit_code)
                    request.touch()  # so that the other workers stop too
                    return stop
                if "submitit" in launcher:  # each job has its own process, so the sweep continues
                    return UserError(f"{stop}; {CONTINUING} from the last save.")
                raise stop from None
            if isinstance(error, UserError):
                return error
            if sentence := explain(error):
                return sentence
            if not self.sweep:
                raise
            traceback.print_exc()
            summary = (str(error).strip() or "no message").splitlines()[0][:200]
            return UserError(f"{type(error).__name__}: {summary} (a bug; its traceback is above)")


def sweep(driver: Any, overrides: list[str]) -> list[Job]:
    """Run all jobs of a sweep, and return how each ended.

    Several processes may share a sweep. Each takes the jobs that no other process is running. At
    the end, it waits for the jobs of the others, and runs those that a killed process left behind.

    Args:
        driver: Hydra's driver; see `hydra_session`.
        overrides: overrides, some of which have several values.

    Raises:
        UserError: the sweep has no jobs, or its launcher is not available.
    """
    _require_slurm(overrides)
    with _stop_request() as request:
        job = SweepJob(sweep=True, wait=False, stop_request=request)
        batches = driver.multirun(config_name="config", task_function=job, overrides=overrides)
    if not (jobs := [job for batch in batches for job in batch]):
        raise UserError("this sweep has no jobs: give each of its keys at least one value.")
    return _finish(driver, jobs)


def _require_slurm(words: Sequence[str]) -> None:
    launchers = [word.value() for word in parse_words(words) if word.key_or_group == "launcher"]
    if "slurm" in launchers and not shutil.which("srun"):
        raise UserError(
            "launcher=slurm: there is no Slurm here (no `srun`). Try launcher=submitit or joblib."
        )


def require_launcher(launcher: str, settings: list[str]) -> None:
    """Reject a launcher that `launch` could not start.

    Args:
        launcher: name of the launcher.
        settings: overrides of the launcher.

    Raises:
        UserError: the launcher is unknown or not available here, or does not have such a setting.
    """
    if launcher not in group_options("launcher"):
        raise unknown("launcher", launcher, group_options("launcher"))
    with readable_errors(settings), hydra_session() as driver:
        _make_launcher(driver, launcher, settings, SweepJob())


def launch(
    driver: Any, jobs: list[list[str]], launcher: str, settings: list[str], show: Shown = "all"
) -> list[tuple[list[str], str]]:
    """Start a list of jobs, which need not be the product of a sweep, with a launcher.

    Args:
        driver: Hydra's driver; see `hydra_session`.
        jobs: overrides of each job.
        launcher: name of the launcher.
        settings: overrides of the launcher.
        show: what to print. Default: "all".

    Returns:
        (overrides, reason) of each job that failed.
    """
    words = [[f"launcher={launcher}", *job] for job in jobs]
    with _stop_request() as request:
        task = SweepJob(sweep=True, wait=False, show=show, stop_request=request)
        hydra_launcher = _make_launcher(driver, launcher, settings, task)
        returned_jobs = hydra_launcher.launch(words, initial_job_idx=0)
    ended_jobs = _finish(driver, returned_jobs, show)
    return [(job.words, job.result) for job in ended_jobs if isinstance(job.result, str)]


def _make_launcher(driver: Any, launcher: str, settings: list[str], task: SweepJob) -> Any:
    """Return one of Hydra's launchers, set up to carry out a task."""
    from hydra._internal.callbacks import Callbacks
    from hydra.core.plugins import Plugins
    from hydra.core.utils import setup_globals
    from hydra.types import HydraContext, RunMode

    setup_globals()
    read_words(settings, sweep=True)
    _require_slurm([f"launcher={launcher}"])
    config = driver.compose_config(
        "config", [f"launcher={launcher}", *settings], run_mode=RunMode.MULTIRUN
    )
    return Plugins.instance().instantiate_launcher(
        hydra_context=HydraContext(config_loader=driver.config_loader, callbacks=Callbacks()),
        task_function=task,
        config=config,
    )


@contextmanager
def _stop_request() -> Iterator[Path]:
    """Yield the file that asks the workers which are started in this block to stop."""
    with tempfile.TemporaryDirectory(prefix="zdp-bench-") as folder:
        request = Path(folder) / "stop"
        with stop_workers_first(request):
            yield request


def _finish(driver: Any, jobs: Iterable[Any], show: Shown = "all") -> list[Job]:
    """Return how each job ended. Jobs that other processes run are waited for."""
    ended_jobs = []
    for job in jobs:
        words, result = list(job.overrides), job.return_value
        if isinstance(result, Stopped):
            raise result
        if isinstance(result, Busy):
            waiting_job = SweepJob(sweep=True, show=show)
            result = driver.run(
                config_name="config", task_function=waiting_job, overrides=words
            ).return_value
        ended_jobs.append(Job(words, str(result) if isinstance(result, UserError) else result))
    return ended_jobs


def show_sweep(jobs: Sequence[Job]) -> Sheet:
    """Return a table with the metric, ε and run of each job. A note states their joint ε."""
    rows = []
    for job in jobs:
        cells = ["failed", "", ""]
        run = job.result
        if isinstance(run, RunSummary):
            cells = [f"{run.metric} {run.value:.4f}", show_epsilon(run.epsilon), run.home.name[:8]]
        rows.append([name_job(job.words), *cells])
    homes = {job.result.home for job in jobs if isinstance(job.result, RunSummary)}
    notes = describe_together([read_spending(home) for home in homes if exists(home)])
    return Sheet("Sweep", ["job", "test", "tight ε", "run"], rows, notes)


def run_one(overrides: list[str], runner: Runner | None = None) -> None:
    """Compose and carry out one run.

    Args:
        overrides: overrides of the run.
        runner: function that carries out the run elsewhere. Default: the run is carried out in this
            process.
    """
    carry_out(compose(overrides), overrides, runner=runner)


def carry_out(
    config: DictConfig,
    overrides: list[str],
    wait: bool = True,
    runner: Runner | None = None,
    show: Shown = "all",
    name: str = "",
) -> Outcome:
    """Check a composed configuration and carry out its run.

    Args:
        config: the composed configuration.
        overrides: overrides that it was composed with.
        wait: see `SweepJob`. Default: True.
        runner: function that carries out the run elsewhere. Default: none.
        show: what to print. Default: "all".
        name: name of the job in a sweep, for one line instead of a summary. Default: none.
    """
    from zdp_bench.report.console import console
    from zdp_bench.report.terminal import show_run
    from zdp_bench.training import distributed
    from zdp_bench.training.labels import relabel
    from zdp_bench.training.progress import Live, Reporter, Watcher
    from zdp_bench.training.run import execute

    checked = parse(config, overrides)
    check_claims(checked.claims.table, checked.claims.row)
    if checked.federated.nodes and runner is None:
        runner = find_module("runner", "federated").carry_out
    if distributed.rank():  # only the first rank prints
        return execute(checked, Watcher(), runner=runner)
    watch = nullcontext(Watcher()) if show == "nothing" else Live(console(), name)
    with watch as live, Reporter(live, checked) as reporter:
        outcome = execute(checked, reporter, wait, runner)
        reporter.finished(outcome.record)
    is_replaced = checked.force
    if outcome.was_recorded:
        labelled = relabel(outcome, checked)
        is_replaced = labelled is not outcome
        outcome = labelled
    records.renew_csv(checked.results, None if is_replaced else outcome.record)
    if show == "all" and not name:
        console().print(show_run(outcome.record, outcome.path, outcome.was_recorded))
    elif show == "all":
        headline, privacy = outcome.record.headline, outcome.record.privacy
        epsilon = show_epsilon(privacy.epsilon_tight)
        print(f"{name}: {headline.name} {headline.value:.4f}, tight ε {epsilon}")
        if outcome.record.warning:
            print(f"{name}: {outcome.record.warning}")
    return outcome
