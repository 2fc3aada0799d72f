"""A search from end to end: what it found and spent (`search.json`), and its table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from zdp_bench import records
from zdp_bench.config import configured
from zdp_bench.extras.search.space import Search
from zdp_bench.extras.search.trials import Launch, Study, Trials, Yardstick
from zdp_bench.records import Record, hold_lock
from zdp_bench.report.budget import together_if_known
from zdp_bench.report.number_format import epsilon, name_one
from zdp_bench.report.sheet import Sheet
from zdp_bench.training.spending import FILE, read_spending


def search(asked: Search, by: Launch, say: Callable[[str], None]) -> tuple[Record, Path]:
    """Carry a search out, or go on with it; return its record and its folder, where it is written.

    Formal guarantees: every trial is a run with a ledger and counts in full, also one that failed
    or was stopped; see `describe` for what is stated of all together.

    Raises:
        UserError: the search or one of its runs cannot be made.
    """
    asked = hold_out(asked, say)
    trials = Trials(asked)
    trials.folder.mkdir(parents=True, exist_ok=True)
    with hold_lock(trials.folder / "study.lock"):  # another process waits, and finds it done
        study = Study(asked, trials.folder, trials.by.direction, trials.config.seed)
        try:
            while batch := study.take(by.at_once):
                trials.carry_out(batch, study, by)
                numbers = [one.number for one in batch]
                for trial in study.trials():
                    if trial.number in numbers:
                        say(_told(trial, trials.by, asked.trials))
        finally:  # what was spent is told, however the search ended
            found = describe(asked, trials, study)
            records.write(trials.folder / "search.json", found)
    return found, trials.folder


def hold_out(asked: Search, say: Callable[[str], None]) -> Search:
    """Return the search with validation examples where its data set can hold some out, and say so.

    Only a `dataset.validation_share` that nobody has set is: the search has to choose by something.
    """
    key = "dataset.validation_share"
    if asked.on_test or any(word.startswith(f"{key}=") for word in asked.space.fixed):
        return asked
    if configured(asked.space.example()).dataset.options.get("validation_share", 0) is not None:
        return asked
    word = f"{key}={HELD_OUT:g}"
    say(f"{word}: so much of the training data is held out to choose by, and counts as public")
    return replace(asked, space=replace(asked.space, fixed=(*asked.space.fixed, word)))


def _told(trial: FrozenTrial, by: Yardstick, count: int) -> str:
    """Return a trial in one line."""
    shown = {k: f"{v:.4g}" if isinstance(v, float) else v for k, v in trial.params.items()}
    values = " ".join(f"{key}={value}" for key, value in shown.items())
    failed = trial.state is not TrialState.COMPLETE
    reached = "diverged" if failed else f"{by.part} {by.metric} {trial.value:.4f}"
    return f"trial {trial.number + 1} of {count}: {values}: {reached}"


HELD_OUT = 0.1  # of the training data
STATES = {TrialState.COMPLETE: "done", TrialState.FAIL: "failed"}


def describe(asked: Search, trials: Trials, study: Study) -> Record:
    """Return a search's record: every trial, the best, and what ε covers what.

    Formal guarantees:
        - `epsilon_all` is the tight ε of everything the search made, in any adaptive order, and
          `epsilon_all_unit` that of who owns several examples.
    """
    every = study.trials()
    lines = [_line(trials, trial) for trial in every]
    homes = [trials.job(trial).home for trial in every]
    spendings = {home: read_spending(home) for home in homes if _has_begun(home)}
    spent = [one.spent for one in spendings.values()]
    units = [replace(one.spent, examples=one.examples) for one in spendings.values()]
    delta = trials.config.privacy.delta
    finished = len(every) == asked.trials and all(trial.state.is_finished() for trial in every)
    scored = [line for line in lines if line["score"] is not None]
    sign = -1 if trials.by.direction == "minimize" else 1
    best = max(scored, key=lambda line: (sign * line["score"], -line["trial"]), default=None)
    return {
        "format": 1,
        "recipe": trials.config.recipe,
        "fixed": list(asked.space.fixed),
        "searched": {key: str(values) for key, values in asked.space.searched.items()},
        "sampler": asked.sampler,
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


SHOWN = 10  # trials in a table; CSV and JSON have all


def sheet(found: Record) -> Sheet:
    """Return the trials of a search's record, the best first, and what ε covers what."""
    by = found["chosen_by"]
    sign = -1 if found["direction"] == "minimize" else 1
    ordered = sorted(
        found["trials"],
        key=lambda line: (line["score"] is None, -sign * (line["score"] or 0.0), line["trial"]),
    )
    keys = list(found["searched"])
    columns = ["trial", *keys, f"{by['of']} {by['metric']}"]
    with_test = by["of"] != "test"
    columns += [f"test {by['metric']}"] if with_test else []
    rows = [
        [
            str(line["trial"]),
            *(_short(line["values"][key]) for key in keys),
            line["state"] if line["score"] is None else f"{line['score']:.4f}",
            *([_short(line["test"])] if with_test else []),
            epsilon(line["epsilon_tight"]),
            line["run"][:16],
        ]
        for line in ordered
    ]
    numbers = [
        {
            "trial": line["trial"],
            **line["values"],
            f"{by['of']}_{by['metric']}": line["score"],
            f"test_{by['metric']}": line["test"],
            "epsilon_tight": line["epsilon_tight"],
            "run": line["run"],
        }
        for line in ordered
    ]
    left = [f"{len(rows) - SHOWN} more trials: --format csv."] if len(rows) > SHOWN else []
    title = f"Search of {found['recipe']}: {len(rows)} trials by {found['sampler']}"
    columns = [*columns, "ε of it", "run"]
    return Sheet(title, columns, rows[:SHOWN], [*left, *_notes(found)], numbers=numbers)


def _notes(found: Record) -> list[str]:
    """Return what was spent, in sentences, and what each number covers."""
    privacy, by = found["privacy"], found["chosen_by"]
    delta = f"δ {privacy['delta']:g}"
    every = epsilon(privacy["epsilon_all"]) or "not known: the samplings of its trials differ"
    unit = privacy["epsilon_all_unit"]
    owner = f", of {name_one(privacy['unit'])} {epsilon(unit)}" if unit is not None else ""
    notes = [
        f"ε of the whole search: {every}{owner} ({delta}; tight, of all trials composed). It "
        "covers all records, and every choice made by looking at them. The ε of one trial covers "
        "less."
    ]
    if by["of"] == "test":
        notes.append(
            "Chosen by the test set, so the best trial's test metric is too good to be true of "
            "other records."
        )
    elif found["trials"]:
        notes.append("Chosen by validation records, which count as public: no ε covers them.")
    return notes


def _short(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
