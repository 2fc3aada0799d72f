"""Jobs: one composed configuration each, carried out here or by Hydra's launchers."""

from __future__ import annotations

import os
import shutil
import traceback
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from omegaconf import DictConfig

from zdp_bench import records
from zdp_bench.config import compose, parse
from zdp_bench.config.words import read_words
from zdp_bench.errors import Busy, UserError
from zdp_bench.privacy.statement import show_epsilon
from zdp_bench.registry import find_module
from zdp_bench.report.budget import describe_together
from zdp_bench.report.papers import check_claims
from zdp_bench.report.sheet import Sheet
from zdp_bench.training.interrupts import Stopped, end_with_parent, explain, find_stop
from zdp_bench.training.spending import read_spending

if TYPE_CHECKING:
    from zdp_bench.training.run import Runner
    from zdp_bench.training.run_folder import Outcome

Shown = Literal["all", "progress", "nothing"]
# not in a job's name
UNNAMED = ("recipe=", "launcher=", "hydra", "paths.", "logger", "name=", "tags=", "notes=")


def name_job(overrides: Sequence[str]) -> str:
    """Return a job's name: its overrides, except those on where and how it runs."""
    return " ".join(word for word in overrides if not word.startswith(UNNAMED))


@dataclass(frozen=True)
class Made:
    """A summary of a job's run, as other processes return it."""

    metric: str
    value: float
    epsilon: float
    home: Path


@dataclass(frozen=True)
class Job:
    """A job that has ended: its overrides, and its run or why there is none."""

    words: list[str]
    ended: Made | str


class SweepJob:
    """What Hydra calls with a composed configuration, in this process or a launcher's.

    It returns errors instead of raising them, so that one bad job does not end a sweep.
    """

    def __init__(self, sweep: bool = False, wait: bool = True, show: Shown = "all") -> None:
        self.sweep = sweep  # a bug of ours is returned as well, after its traceback was printed
        self.wait = wait  # for another process at the same job; otherwise return `Busy`
        self.show = show  # of each run: its progress, and all: also its summary at its end
        self._starter = os.getpid()

    def __call__(self, config: DictConfig) -> UserError | Made:
        from hydra.core.hydra_config import HydraConfig

        hydra = HydraConfig.get()
        launcher = hydra.launcher._target_
        worker = os.getpid() != self._starter and "joblib" in launcher
        if worker:
            end_with_parent(self._starter)
        try:
            overrides = list(hydra.overrides.task)
            name = name_job(overrides) if self.sweep else ""
            made = carry_out(config, overrides, wait=self.wait, show=self.show, name=name)
            headline, spent = made.record.headline, made.record.privacy.epsilon_tight
            return Made(headline.name, headline.value, spent, made.path.parent)
        except (Exception, Stopped) as error:
            if stop := find_stop(error):
                if worker:  # it would wait for another job
                    os._exit(stop.exit_code)
                if "submitit" in launcher:  # a process of this job's own: the sweep goes on
                    return UserError(f"{stop}; the same command continues from the last save.")
                raise stop from None
            if isinstance(error, UserError):
                return error
            if sentence := explain(error):
                return sentence
            if not self.sweep:
                raise
            traceback.print_exc()
            brief = (str(error).strip() or "no words").splitlines()[0][:200]
            return UserError(f"{type(error).__name__}: {brief} (a bug; its traceback is above)")


def sweep(driver: Any, overrides: list[str]) -> list[Job]:
    """Carry out every job of a sweep; return how each ended.

    Several processes may share a sweep: each takes the jobs that no other runs, and at the end
    waits for those of the others, so that what a killed process left is done as well.
    """
    _require_slurm(overrides)
    batches = driver.multirun(
        config_name="config", task_function=SweepJob(sweep=True, wait=False), overrides=overrides
    )
    if not (jobs := [job for batch in batches for job in batch]):
        raise UserError("this sweep has no jobs: give each of its keys at least one value.")
    return _finish(driver, jobs)


def _require_slurm(words: Sequence[str]) -> None:
    if "launcher=slurm" in words and not shutil.which("srun"):
        raise UserError(
            "launcher=slurm: there is no Slurm here (no `srun`). Try launcher=submitit or joblib."
        )


def launch(
    driver: Any, jobs: list[list[str]], launcher: str, settings: list[str], show: Shown = "all"
) -> list[tuple[list[str], str]]:
    """Start jobs that no sweep can list with a launcher; return the failed (overrides, reason)."""
    from hydra._internal.callbacks import Callbacks
    from hydra.core.plugins import Plugins
    from hydra.core.utils import setup_globals
    from hydra.types import HydraContext, RunMode

    setup_globals()
    read_words(settings, sweep=True)
    _require_slurm([f"launcher={launcher}"])
    chosen = driver.compose_config(
        "config", [f"launcher={launcher}", *settings], run_mode=RunMode.MULTIRUN
    )
    carrier = Plugins.instance().instantiate_launcher(
        hydra_context=HydraContext(config_loader=driver.config_loader, callbacks=Callbacks()),
        task_function=SweepJob(sweep=True, wait=False, show=show),
        config=chosen,
    )
    words = [[f"launcher={launcher}", *job] for job in jobs]
    ended = _finish(driver, carrier.launch(words, initial_job_idx=0), show)
    return [(job.words, job.ended) for job in ended if isinstance(job.ended, str)]


def _finish(driver: Any, jobs: Iterable[Any], show: Shown = "all") -> list[Job]:
    """Return how each job ended, after waiting for those of other processes."""
    ended = []
    for job in jobs:
        words, result = list(job.overrides), job.return_value
        if isinstance(result, Busy):
            again = SweepJob(sweep=True, show=show)
            result = driver.run(
                config_name="config", task_function=again, overrides=words
            ).return_value
        ended.append(Job(words, str(result) if isinstance(result, UserError) else result))
    return ended


def show_sweep(jobs: Sequence[Job]) -> Sheet:
    """Return a sweep's summary: one line per job, with metric, ε and run, and the ε of all."""
    rows = []
    for job in jobs:
        made, shown = job.ended, ["failed", "", ""]
        if isinstance(made, Made):
            shown = [
                f"{made.metric} {made.value:.4f}",
                show_epsilon(made.epsilon),
                made.home.name[:8],
            ]
        rows.append([name_job(job.words), *shown])
    homes = {job.ended.home for job in jobs if isinstance(job.ended, Made)}
    notes = describe_together([read_spending(home) for home in homes if home.is_dir()])
    return Sheet("Sweep", ["job", "test", "tight ε", "run"], rows, notes)


def run_one(overrides: list[str], runner: Runner | None = None) -> None:
    """Compose and carry out one run, here or by `runner`."""
    carry_out(compose(overrides), overrides, runner=runner)


def carry_out(
    config: DictConfig,
    overrides: list[str],
    wait: bool = True,
    runner: Runner | None = None,
    show: Shown = "all",
    name: str = "",
) -> Outcome:
    """Check a composed configuration and run it; print what `SweepJob` says, under its name."""
    from zdp_bench.report.console import console
    from zdp_bench.report.terminal import show_run
    from zdp_bench.training import distributed
    from zdp_bench.training.labels import relabel
    from zdp_bench.training.progress import Live, Reporter, Watcher
    from zdp_bench.training.run import run

    checked = parse(config, overrides)
    check_claims(checked.claims.table, checked.claims.row)
    if checked.federated.nodes and runner is None:
        runner = find_module("runner", "federated").carry_out
    if distributed.rank():  # of several ranks, only the first prints
        return run(checked, Watcher(), runner=runner)
    watch = nullcontext(Watcher()) if show == "nothing" else Live(console(), name)
    with watch as live, Reporter(live, checked) as reporter:
        outcome = run(checked, reporter, wait, runner)
        reporter.finished(outcome.record)
    is_replaced = checked.force
    if outcome.found:
        labelled = relabel(outcome, checked)
        is_replaced = labelled is not outcome
        outcome = labelled
    records.renew_csv(checked.results, None if is_replaced else outcome.record)
    if show == "all" and not name:
        console().print(show_run(outcome.record, outcome.path, outcome.found))
    elif show == "all":
        headline, spent = outcome.record.headline, outcome.record.privacy.epsilon_tight
        print(f"{name}: {headline.name} {headline.value:.4f}, tight ε {show_epsilon(spent)}")
    return outcome
