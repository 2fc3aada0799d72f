"""A search from end to end: trials are proposed, carried out, and counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from zdp_bench import records
from zdp_bench.extras.search.space import Search
from zdp_bench.extras.search.study import Study
from zdp_bench.extras.search.trials import Launch, Trials, Yardstick
from zdp_bench.privacy.composition import Spent, selected_epsilon
from zdp_bench.records import Record
from zdp_bench.report.budget import together_if_known
from zdp_bench.training.spending import FILE, read_spending


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


MOST_POINTS = 24  # of the curve of ε: each takes a composition
STATES = {TrialState.COMPLETE: "done", TrialState.FAIL: "failed"}


def describe(asked: Search, trials: Trials, study: Study) -> Record:
    """Return a search's record: every trial, the best, and what ε covers what.

    Formal guarantees:
        - `epsilon_all` is the tight ε of everything the search made, in any adaptive order, and
          `epsilon_all_unit` that of who owns several examples;
        - `epsilon_best` is that of the best trial's output alone, if nothing else leaves: see
          `privacy/selection.py`; None where their number was fixed or not all are done.
    """
    every = study.trials()
    lines = [_line(trials, trial) for trial in every]
    homes = [trials.job(trial).home for trial in every]
    spendings = {home: read_spending(home) for home in homes if _has_begun(home)}
    spent = [one.spent for one in spendings.values()]
    units = [replace(one.spent, examples=one.examples) for one in spendings.values()]
    delta = trials.config.privacy.delta
    finished = len(every) == study.count and all(trial.state.is_finished() for trial in every)
    scored = [line for line in lines if line["score"] is not None]
    sign = -1 if trials.by.direction == "minimize" else 1
    best = max(scored, key=lambda line: (sign * line["score"], -line["trial"]), default=None)
    return {
        "format": 1,
        "recipe": trials.config.recipe,
        "fixed": list(asked.space.fixed),
        "searched": {key: str(values) for key, values in asked.space.searched.items()},
        "sampler": asked.sampler,
        "number": asked.law or "fixed",
        "asked": asked.trials,
        "finished": finished,
        "chosen_by": {"metric": trials.by.metric, "of": trials.by.part},
        "direction": trials.by.direction,
        "data": {"name": trials.config.dataset.name, "digest": trials.data.digest},
        "trials": lines,
        "best": best and best["trial"],
        "privacy": {
            "delta": delta,
            "epsilon_asked": asked.epsilon,
            "epsilon_all": together_if_known(spent, delta),
            "epsilon_all_unit": together_if_known(units, delta) if units != spent else None,
            "unit": trials.data.unit,
            "epsilon_best": _of_best(asked, spent, delta) if finished else None,
            "epsilon_so_far": _curve(homes, {h: s.spent for h, s in spendings.items()}, delta),
        },
    }


def _line(trials: Trials, trial: FrozenTrial) -> dict[str, Any]:
    """Return what a search's record says of a trial."""
    job = trials.job(trial)
    record = records.read(job.home / "record.json")
    return {
        "trial": trial.number + 1,
        "state": STATES.get(trial.state, "open"),
        "values": dict(trial.params),
        "score": trial.value if trial.state is TrialState.COMPLETE else None,
        "test": record and record["metrics"].get(trials.by.metric),
        "epsilon_tight": record and record["privacy"]["epsilon_tight"],
        "run": job.run,
    }


def _has_begun(home: Path) -> bool:
    return any((home / name).exists() for name in (FILE, "record.json"))


def _of_best(asked: Search, spent: Sequence[Spent], delta: float) -> float | None:
    """Return the ε of the best alone; None if the number was fixed, or drawn to be 0."""
    if not asked.law or not spent:
        return None
    z, steps = min(one.z for one in spent), max(one.steps for one in spent)
    return selected_epsilon(z, spent[0].sampling, steps, asked.law, asked.trials, delta)


def _curve(
    homes: Sequence[Path], spent: dict[Path, Spent], delta: float
) -> list[list[float | None]]:
    """Return (number, ε together) of the first trials, at most `MOST_POINTS` of them.

    Trials of equal values are one run, and have spent once.
    """
    stride = -(-len(homes) // MOST_POINTS) or 1
    counts = [*range(len(homes), 0, -stride)][::-1]
    firsts = [(count, dict.fromkeys(homes[:count])) for count in counts]
    return [
        [count, together_if_known([spent[home] for home in first if home in spent], delta)]
        for count, first in firsts
    ]
