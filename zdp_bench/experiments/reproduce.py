"""Runs what tables lack, and writes them: one table, or every table of every paper.

    smoke   each recipe with few steps on generated or embedded data, a job on every core; of its
            sweep, as many jobs as it takes for every setting to occur. Shows that everything
            runs. Runs, tables and page go to a folder of their own and fill no paper's cell.
    here    as published, wherever the data root holds the data and the weights
    paper   as published, fetching what may be fetched

`planning` says what there is to do, in which order, and how long it takes. A run that has a record,
under any recipe, is not repeated, so the command can be stopped and given again.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import closing
from dataclasses import dataclass
from multiprocessing import active_children, get_context
from pathlib import Path

from zdp_bench.config.compose import hydra_session
from zdp_bench.config.schema import Run
from zdp_bench.errors import UserError
from zdp_bench.experiments.planning import Job, Plan, show_duration
from zdp_bench.experiments.sweep import launch
from zdp_bench.registry import find
from zdp_bench.report import curves, papers, tables
from zdp_bench.report.cells import Verdict
from zdp_bench.training.interrupts import Stopped, end_with_parent
from zdp_bench.training.progress import Silent
from zdp_bench.training.run import run

PROFILES = ("smoke", "here", "paper")
SMOKE_FOLDER = "smoke"  # under the results folder
SMOKE_NOTE = (
    "SMOKE: generated or embedded data and a few steps. These rows show that the recipes run; "
    "they reproduce nothing. Of a sweep there are as many rows as it takes for every setting to "
    "occur."
)

Say = Callable[[str], None]
Failures = list[tuple[str, str]]  # (job, reason)


@dataclass(frozen=True)
class Outcome:
    """The verdict on every cell, and the pages written."""

    verdicts: list[Verdict]
    pages: list[Path]


def run_jobs(jobs: Sequence[Job], workers: int, say: Say) -> Failures:
    """Run the jobs; return those that failed, and why.

    Args:
        say: takes the progress, one line at a time.
    """
    failed = []
    started = time.monotonic()
    total = len(jobs)
    with closing(_each(jobs, workers)) as ended:
        for number, (job, state, error) in enumerate(ended, start=1):
            if error:
                failed.append((str(job), error))
            left = show_duration((time.monotonic() - started) / number * (total - number))
            say(f"[{number:>{len(str(total))}}/{total}] {job.table}  {job}: {state}; {left} left")
    return failed


def launch_jobs(
    jobs: Sequence[Job], results: Path, extra: list[str], launcher: str, settings: list[str]
) -> Failures:
    """Give the jobs to one of Hydra's launchers; return those that failed, and why.

    Raises:
        UserError: the launcher cannot work here, or lost its processes.
    """
    words = [[*job.overrides, f"paths.results={results}", *extra] for job in jobs]
    with hydra_session() as driver:
        failed = launch(driver, words, launcher, settings)
    return [(" ".join(overrides), reason) for overrides, reason in failed]


def _each(jobs: Sequence[Job], workers: int) -> Generator[tuple[Job, str, str], None, None]:
    """Yield every job as it ends, with how it ended and, if it failed, why."""
    if workers == 1:
        yield from (_run_job(job, job.config) for job in jobs)
        return
    # Spawned, for torch's threads would be missing in a fork.
    spawn, parent = get_context("spawn"), (os.getpid(),)
    with ProcessPoolExecutor(workers, spawn, end_with_parent, parent) as pool:
        try:
            for done in as_completed([pool.submit(_work, job, job.config) for job in jobs]):
                yield done.result()
        except BaseException:  # asked to stop: so are the workers, which save their runs
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in active_children():
                worker.terminate()
            raise


def _work(job: Job, config: Run) -> tuple[Job, str, str]:
    """Call `_run_job` in a worker; one that is asked to stop takes no further job."""
    try:
        return _run_job(job, config)
    except Stopped as stop:
        os._exit(stop.exit_code)


def _run_job(job: Job, config: Run) -> tuple[Job, str, str]:
    try:
        outcome = run(config, Silent())
    except UserError as error:
        return job, f"failed: {error}", str(error)
    headline = outcome.record["headline"]
    before = " (done before)" if outcome.found else ""
    return job, f"{headline['name']} {headline['value']:.4g}{before}", ""


def write_all(plan: Plan, failed: Failures, profile: str, folder: Path, say: Say) -> Outcome:
    """Write every table of the plan and the page, and judge every cell."""
    reasons = dict(failed)
    missing = dict(plan.missing)
    for job in plan.jobs:
        if reason := reasons.get(str(job)):
            missing.setdefault(job.filling.digest, reason)
    notes = [SMOKE_NOTE] if profile == "smoke" else []
    made, drawn = [], []
    for name, fillings in plan.fillings.items():
        if papers.is_figure(name):
            figure = curves.build(name, folder, fillings)
            drawn.append(dataclasses.replace(figure, notes=[*notes, *figure.notes]))
            drawn[-1].write(folder)
        else:
            table = tables.build(name, folder, fillings)
            made.append(dataclasses.replace(table, remarks=notes))
            made[-1].write(folder)
    if measure := find("function", "measure"):
        measure(folder, plan.fillings, profile != "paper", say)
    write_page = find("function", "write_page")
    pages = [write_page(made, folder, folder / "report.html")] if write_page else []
    found = [verdict for table in made for verdict in table.verdicts(missing)]
    for figure in drawn:
        found += figure.verdicts(missing)
    return Outcome(found, pages)
