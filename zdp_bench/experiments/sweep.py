"""Run jobs in this process or with one of Hydra's launchers.

A job is a composed configuration.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from omegaconf import DictConfig

from zdp_bench import records
from zdp_bench.config import compose, parse
from zdp_bench.config.compose import group_options, hydra_session
from zdp_bench.config.words import is_raised_in, parse_words, read_words, readable_errors
from zdp_bench.errors import Busy, UserError, in_one_line, unknown
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
    take_jobs,
)
from zdp_bench.training.spending import read_spending

if TYPE_CHECKING:
    from zdp_bench.training.run import Runner
    from zdp_bench.training.run_folder import Outcome

# What a job prints: its progress and a summary at its end, only progress, or nothing.
Shown = Literal["all", "progress", "nothing"]
# Prefixes of overrides that are not part of a job's name.
UNNAMED = ("recipe=", "launcher=", "hydra", "paths.", "logger", "name=", "tags=", "notes=")
MAX_STARTS = 5  # of workers, if those that die had no job

log = logging.getLogger(__name__)


def name_job(overrides: Sequence[str]) -> str:
    """Return a job's name: its overrides, except those that state where and how it runs."""
    return " ".join(word for word in overrides if not word.startswith(UNNAMED))


def digest_job(overrides: Sequence[str]) -> str:
    """Return a job's digest, which names its files in the folder of a sweep."""
    return sha256(os.fsencode("\n".join(overrides))).hexdigest()


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


class Interrupted(UserError):  # noqa: N818 - a state of a job, not a fault
    """A job ended with its worker, and is to run again when no other worker is at work."""


class WorkersDied(Exception):  # noqa: N818 - a state of a sweep, which goes on
    """A worker that had a job died, and joblib ended the others.

    Attributes:
        jobs: digests of the jobs that ended with them.
    """

    def __init__(self, jobs: set[str]) -> None:
        super().__init__(jobs)
        self.jobs = jobs


@dataclass(frozen=True)
class Shared:
    """The folder that a sweep shares with its workers on this machine.

    A job is named by its digest; see `digest_job`.
    """

    folder: Path

    @property
    def request(self) -> Path:
        """The file that asks workers to stop, beside the files of their jobs."""
        return self.folder / "jobs" / "stop"

    def read_result(self, job: str) -> UserError | RunSummary | None:
        """Return how a job ended; None if it has not."""
        path = self._path_of(job)
        if not path.exists():
            return None
        result = json.loads(path.read_text())
        if "error" in result:
            return UserError(result["error"])
        return RunSummary(**result | {"home": Path(result["home"])})

    def write_result(self, job: str, result: UserError | RunSummary) -> None:
        """Keep how a job ended, because joblib forgets all results if one worker is killed.

        If it cannot be kept, because the disk is full for example, the job is merely repeated.
        """
        if isinstance(result, UserError):
            kept = {"error": str(result)}
        else:
            kept = asdict(result) | {"home": str(result.home)}
        with suppress(OSError):
            records.write_text(self._path_of(job), json.dumps(kept))

    def _path_of(self, job: str) -> Path:
        return self.folder / "results" / job


class SweepJob:
    """The function that Hydra calls with a composed configuration, in this or another process.

    It returns errors instead of raising them, so that one failed job does not end a sweep.
    """

    def __init__(
        self,
        sweep: bool = False,
        wait: bool = True,
        show: Shown = "all",
        shared: Shared | None = None,
    ) -> None:
        """Create the function.

        Args:
            sweep: print the traceback of an unexpected exception and return it as an error, so
                that the sweep continues. Default: False, which raises the exception.
            wait: wait for another process that runs the same job, instead of returning `Busy`.
                Default: True.
            show: what to print. Default: "all".
            shared: the folder shared with workers. Default: none; the jobs have no workers.
        """
        self.sweep = sweep
        self.wait = wait
        self.show = show
        self.shared = shared
        self.interrupted: set[str] = set()  # digests of jobs that a worker does not carry out
        self._starter = os.getpid()

    def __call__(self, config: DictConfig) -> UserError | RunSummary | Stopped:
        from hydra.core.hydra_config import HydraConfig

        hydra = HydraConfig.get()
        launcher = hydra.launcher._target_
        overrides = list(hydra.overrides.task)
        is_worker = os.getpid() != self._starter and "joblib" in launcher
        if not (is_worker and self.shared):
            return self._carry_out(config, overrides, launcher)
        job = digest_job(overrides)
        if ended := self.shared.read_result(job):
            return ended
        if job in self.interrupted:
            return Interrupted()
        result = self._carry_out(config, overrides, launcher, self.shared.request)
        if not isinstance(result, Busy | Stopped):
            self.shared.write_result(job, result)
        return result

    def _carry_out(
        self,
        config: DictConfig,
        overrides: list[str],
        launcher: str,
        request: Path | None = None,
    ) -> UserError | RunSummary | Stopped:
        try:
            name = name_job(overrides) if self.sweep else ""
            job = digest_job(overrides)
            with stop_on_request(request, self._starter, job) if request else nullcontext():
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
            with suppress(OSError):  # the output of a sweep may be lost, but not its jobs
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
    settings = [word for word in overrides if word.startswith(("launcher=", "hydra", "paths."))]

    def start(task: SweepJob) -> list[Any]:
        batches = driver.multirun(config_name="config", task_function=task, overrides=overrides)
        return [job for batch in batches for job in batch]

    if not (jobs := _carry_out_all(driver, start, settings)):
        raise UserError("this sweep has no jobs: give each of its keys at least one value.")
    return jobs


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
        _make_launcher(driver, [f"launcher={launcher}", *settings], SweepJob())


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
    settings = [f"launcher={launcher}", *settings]

    def start(task: SweepJob) -> Sequence[Any]:
        return _make_launcher(driver, settings, task).launch(words, initial_job_idx=0)

    ended_jobs = _carry_out_all(driver, start, settings, show)
    return [(job.words, job.result) for job in ended_jobs if isinstance(job.result, str)]


def _carry_out_all(
    driver: Any,
    start: Callable[[SweepJob], Sequence[Any]],
    settings: list[str],
    show: Shown = "all",
) -> list[Job]:
    """Carry out jobs, also those that end because a worker dies.

    joblib then kills the other workers, and it is not known which one died first. So the jobs that
    ended with them run again at the end, one at a time: if a job's process dies again, that job
    fails.

    Args:
        driver: Hydra's driver.
        start: function that starts all jobs, and returns Hydra's `JobReturn` of each.
        settings: overrides of the launcher.
        show: what to print. Default: "all".
    """
    with _share_folder() as shared:
        task = SweepJob(sweep=True, wait=False, show=show, shared=shared)
        jobs = None
        while jobs is None:
            try:
                jobs = _start(lambda: start(task), settings, shared)
            except WorkersDied as death:
                task.interrupted.update(death.jobs)
                log.warning(
                    "A worker died, usually because memory ran out, and joblib ended the others. "
                    "Their jobs continue after all others, one at a time."
                )
        _raise_stop(jobs)
        task.interrupted.clear()
        interrupted = [job for job in jobs if isinstance(job.return_value, Interrupted)]
        if interrupted:
            names = "; ".join(name_job(job.overrides) for job in interrupted)
            log.warning("These jobs of workers that died continue, one at a time: %s.", names)
        for job in interrupted:
            job.return_value = _run_alone(driver, list(job.overrides), settings, task, shared)
        _raise_stop(jobs)
    return _finish(driver, jobs, show)


def _start(
    start: Callable[[], Sequence[Any]], settings: list[str], shared: Shared
) -> Sequence[Any]:
    """Start jobs, again if a worker dies that had none: it was starting, or its job had ended.

    Returns:
        How each job ended.

    Raises:
        WorkersDied: jobs ended because a worker died.
        UserError: too many workers without a job died, or the launcher failed.
    """
    for _ in range(MAX_STARTS):
        try:
            return start()
        except Exception as error:  # not of a job, whose exceptions are returned
            if stop := find_stop(error):
                raise stop from None
            if not isinstance(error, BrokenProcessPool):
                if isinstance(error, OSError) or not is_raised_in(error, "joblib", "submitit"):
                    raise
                raise UserError(
                    f"'{' '.join(settings)}' cannot be carried out: {in_one_line(error)}."
                ) from None
        if jobs := take_jobs(shared.request):
            raise WorkersDied(jobs)
        log.warning(
            "A worker without a job died, usually because memory ran out, and joblib ended the "
            "others. The sweep starts new ones."
        )
    raise UserError(
        f"{MAX_STARTS} workers without a job died one after the other, usually because memory ran "
        f"out. Reduce hydra.launcher.n_jobs; {CONTINUING} from the last save."
    )


def _run_alone(
    driver: Any, words: list[str], settings: list[str], task: SweepJob, shared: Shared
) -> UserError | RunSummary | Stopped:
    """Carry out a job in a new worker when no other is at work, and return how it ended.

    What ends its worker or keeps it from starting fails this job only.
    """
    from joblib.externals.loky import get_reusable_executor

    def start() -> Sequence[Any]:
        get_reusable_executor().shutdown()  # idle workers keep the memory of their last jobs
        launched: Sequence[Any] = _make_launcher(driver, settings, task).launch(
            [words], initial_job_idx=0
        )
        return launched

    try:
        result: UserError | RunSummary | Stopped = _start(start, settings, shared)[0].return_value
        return result
    except WorkersDied:
        return UserError(
            "its process died, usually because memory ran out. Reduce trainer.micro_batch; "
            f"{CONTINUING} from the last save."
        )
    except Exception as error:
        if isinstance(error, UserError):
            return error
        if sentence := explain(error):
            return sentence
        raise


def _raise_stop(jobs: Iterable[Any]) -> None:
    """Raise the signal that stopped a job, if any."""
    for job in jobs:
        if isinstance(job.return_value, Stopped):
            raise job.return_value


def _make_launcher(driver: Any, settings: list[str], task: SweepJob) -> Any:
    """Return the launcher that overrides choose, set up to carry out a task."""
    from hydra._internal.callbacks import Callbacks
    from hydra.core.plugins import Plugins
    from hydra.core.utils import setup_globals
    from hydra.types import HydraContext, RunMode

    setup_globals()
    read_words(settings, sweep=True)
    _require_slurm(settings)
    config = driver.compose_config("config", settings, run_mode=RunMode.MULTIRUN)
    return Plugins.instance().instantiate_launcher(
        hydra_context=HydraContext(config_loader=driver.config_loader, callbacks=Callbacks()),
        task_function=task,
        config=config,
    )


@contextmanager
def _share_folder() -> Iterator[Shared]:
    """Yield the folder of the workers that are started in this block."""
    with tempfile.TemporaryDirectory(prefix="zdp-bench-") as folder:
        shared = Shared(Path(folder))
        shared.request.parent.mkdir()
        with stop_workers_first(shared.request):
            yield shared


def _finish(driver: Any, jobs: Iterable[Any], show: Shown = "all") -> list[Job]:
    """Return how each job ended. Jobs that other processes run are waited for."""
    ended_jobs = []
    for job in jobs:
        words, result = list(job.overrides), job.return_value
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
