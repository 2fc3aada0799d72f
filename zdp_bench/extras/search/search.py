"""A search from end to end: trials are proposed, carried out, and counted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from optuna.trial import FrozenTrial, TrialState

from zdp_bench import records
from zdp_bench.extras.search.outcome import describe
from zdp_bench.extras.search.plan import Search
from zdp_bench.extras.search.score import Yardstick
from zdp_bench.extras.search.study import Study
from zdp_bench.extras.search.trials import Launch, Trials
from zdp_bench.records import Record


def search(asked: Search, by: Launch, say: Callable[[str], None]) -> tuple[Record, Path]:
    """Carry a search out, or go on with it; return its record and its folder, where it is written.

    Formal guarantees: every trial is a run with a ledger and counts in full, also one that failed
    or was stopped; see `describe` for what is stated of all together.

    Raises:
        UserError: the search or one of its runs cannot be made.
    """
    trials = Trials(asked)
    study = Study(asked, trials.folder, trials.by.direction, trials.config.seed)
    try:
        while True:
            with study.take(by.at_once) as batch:
                if not batch:
                    break
                trials.carry_out(batch, study, by)
            for trial in study.trials():
                if trial.number in [one.number for one in batch]:
                    say(_told(trial, trials.by, study.count))
    finally:  # what was spent is told, however the search ended
        # Alone, so that nobody writes what was true before another's trials.
        with study.alone():
            found = describe(asked, trials, study)
            records.write(trials.folder / "search.json", found)
    return found, trials.folder


def _told(trial: FrozenTrial, by: Yardstick, count: int) -> str:
    """Return a trial in one line."""
    shown = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in trial.params.items()}
    values = " ".join(f"{key}={value}" for key, value in shown.items())
    failed = trial.state is not TrialState.COMPLETE
    reached = "diverged" if failed else f"{by.part} {by.metric} {trial.value:.4f}"
    return f"trial {trial.number + 1} of {count}: {values}: {reached}"
