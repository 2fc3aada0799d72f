"""Jobs: one composed configuration each, carried out here or by Hydra's launchers."""

from __future__ import annotations

import math
import os
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

from omegaconf import DictConfig, OmegaConf

from zdp_bench.config import compose, parse
from zdp_bench.config.words import parse_words, read_words
from zdp_bench.errors import Busy, UserError
from zdp_bench.registry import lookup
from zdp_bench.report.papers import check_claims
from zdp_bench.training import distributed
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


class SweepJob:
    """What Hydra calls with a composed configuration, in this process or a launcher's.

    It returns errors instead of raising them, so that one bad job does not end a sweep.

    Args:
        sweep: a bug of ours is returned as well, after its traceback was printed.
        wait: wait for another process that runs the same job; otherwise return `Busy`.
        show: of each run on standard output: its progress, and all: also its summary at its end.
    """

    def __init__(self, sweep: bool = False, wait: bool = True, show: Shown = "all") -> None:
        self.sweep = sweep
        self.wait = wait
        self.show = show
        self._starter = os.getpid()

    def __call__(self, config: DictConfig) -> UserError | None:
        from hydra.core.hydra_config import HydraConfig

        raise_if_asked()
        if os.getpid() != self._starter and "joblib" in HydraConfig.get().launcher._target_:
            end_with_parent(self._starter)
        try:
            overrides = list(HydraConfig.get().overrides.task)
            _carry_out(config, overrides, wait=self.wait, show=self.show)
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
        return None


def sweep(driver: Any, overrides: list[str]) -> tuple[int, list[tuple[list[str], str]]]:
    """Carry out every job of a sweep and return their number and the failed (overrides, reason).

    Several processes may share a sweep: each takes the jobs that no other runs, and at the end
    waits for those of the others, so that what a killed process left is done as well.

    Args:
        driver: Hydra's, from `hydra_session`.

    Raises:
        UserError: a launcher lost its processes, and so does not know what they did.
    """
    _require_countable(driver, overrides)
    with _readable_losses():
        batches = driver.multirun(
            config_name="config",
            task_function=SweepJob(sweep=True, wait=False),
            overrides=overrides,
        )
    jobs = [job for batch in batches for job in batch]
    return len(jobs), _failed(driver, jobs)


def _require_countable(driver: Any, overrides: list[str]) -> None:
    """Refuse a sweep of more than `MOST_JOBS` jobs before Hydra writes all of them out.

    Raises:
        UserError: says how many there would be.
    """
    from hydra.core.override_parser.types import ChoiceSweep, RangeSweep
    from hydra.types import RunMode

    config = driver.compose_config("config", overrides, run_mode=RunMode.MULTIRUN)
    params = OmegaConf.select(config, "hydra.sweeper.params") or {}
    parsed = parse_words([f"{key}={value}" for key, value in params.items()] + overrides)
    jobs = 1.0
    # A word of the command line takes the place of the recipe's axis of that key.
    for axis in {axis.key_or_group: axis for axis in parsed}.values():
        value = axis.value() if axis.is_sweep_override() else None
        if isinstance(value, RangeSweep):
            start, stop, step = (
                float(number or 0) for number in (value.start, value.stop, value.step)
            )
            jobs *= max(1.0, math.ceil((stop - start) / step)) if step else 1.0
        elif isinstance(value, ChoiceSweep):
            jobs *= len(value.list)
    if jobs > MOST_JOBS:
        raise UserError(
            f"this sweep has {jobs:,.0f} jobs, where {MOST_JOBS:,} are allowed; give fewer values."
        )


def launch(
    driver: Any, jobs: list[list[str]], launcher: str, settings: list[str], show: Shown = "all"
) -> list[tuple[list[str], str]]:
    """Give jobs that no sweep could list to a launcher; return the failed (overrides, reason).

    Args:
        driver: Hydra's, from `hydra_session`.
        jobs: the overrides of each.
        settings: the launcher's own overrides, `hydra.launcher.KEY=VALUE`.
        show: of every run, as in `SweepJob`.

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
            task_function=SweepJob(sweep=True, wait=False, show=show),
            config=chosen,
        )
        words = [[f"launcher={launcher}", *job] for job in jobs]
        return _failed(driver, carrier.launch(words, initial_job_idx=0), show)


def _failed(driver: Any, jobs: Iterable[Any], show: Shown = "all") -> list[tuple[list[str], str]]:
    """Return (overrides, reason) of the jobs that failed, after waiting for those of others."""
    failed = []
    for job in jobs:
        words, reason = list(job.overrides), job.return_value
        if isinstance(reason, Busy):
            reason = driver.run(
                config_name="config", task_function=SweepJob(sweep=True, show=show), overrides=words
            ).return_value
        if isinstance(reason, UserError):
            failed.append((words, str(reason)))
    return failed


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
) -> None:
    """Check a composed configuration and run it; print what `SweepJob` says."""
    from zdp_bench.report.terminal import show_run
    from zdp_bench.training.progress import Live, Reporter, Silent, console
    from zdp_bench.training.run import run

    checked = parse(config, overrides)
    check_claims(checked.claims.table, checked.claims.row)
    if checked.federated.nodes and runner is None:
        runner = lookup("runner", "federated")
    if distributed.rank():  # of several ranks, only the first prints
        run(checked, Silent(), runner=runner)
        return
    watch = nullcontext(Silent()) if show == "nothing" else Live(console())
    with watch as live, Reporter(live, checked) as progress:
        outcome = run(checked, progress, wait, runner)
    if show == "all":
        console().print(show_run(outcome.record, outcome.path, outcome.found).as_rich())
