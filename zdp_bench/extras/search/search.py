"""A search: Optuna proposes trials, each is a run within one ε, and the ε of all is stated.

That ε composes all runs of the recipe on these data in the results folder, as `budget` counts them:
also those that an earlier call made with other proposals, or whose folder was renamed.

What Optuna proposes depends on the recipe's seed and the trials before. So the same command makes
the same trials again after a kill: those that are finished are found, the one that was open goes
on, and then new ones begin. `search.json` holds every trial before it begins.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import optuna
import torch
from optuna.samplers import RandomSampler, TPESampler
from optuna.trial import TrialState

from zdp_bench import records
from zdp_bench.config import compose, configured
from zdp_bench.config.constraints import require_central
from zdp_bench.config.schema import Run
from zdp_bench.data import Splits
from zdp_bench.errors import UserError, unknown
from zdp_bench.experiments.sweep import Shown, carry_out
from zdp_bench.extras.search.space import Search, grid_of
from zdp_bench.foreign_files import read_json
from zdp_bench.privacy.accounting import tight_epsilon
from zdp_bench.privacy.calibration import calibrate_beside, calibrate_mechanism
from zdp_bench.privacy.composition import Spending, Spent, spent_of_one, together
from zdp_bench.privacy.mechanism import Mechanism
from zdp_bench.privacy.statement import show_epsilon
from zdp_bench.records import Document
from zdp_bench.report.number_format import name_one
from zdp_bench.report.sheet import Sheet
from zdp_bench.tasks.metric import Metric, metric_of
from zdp_bench.training.evaluation import DIVERGED, evaluate
from zdp_bench.training.public_start import digest_of
from zdp_bench.training.setup import ModelSetup, Setup, load_data
from zdp_bench.training.spending import plan_spending, read_recipes_spendings
from zdp_bench.training.validation import DEFAULT, KEY

FOLDER = "searches"  # under the results folder
SHOWN = 10  # trials in a table; CSV and JSON have all
SLACK = 1 + 1e-9  # a cluster's FFT may round an ε to the other side


def search(options: Search, show: Shown = "progress") -> tuple[Document, Path]:
    """Carry a search out, or continue it; return its record and its folder.

    Formal guarantees: every trial is a run with a ledger and counts in full, also one that failed
    or was stopped. `epsilon_all` is the tight ε of all runs of the recipe on these data, in any
    adaptive order, and `epsilon_all_unit` that of the owner of several examples. With
    `options.epsilon`, no trial begins with which it would be larger.
    """
    say = print if show != "nothing" else (lambda line: None)
    config = configured(options.example())
    require_central(config, "search")
    data = load_data(config)
    if data.validation is None:
        word = f"{KEY}={DEFAULT:g}"
        options = hold_out(options, word)
        config = configured(options.example())
        data = load_data(config)
        say(f"{word}: these owners are held out of training to choose by, and are not protected")
    metric = choose_by(options, config, data)
    folder = config.results / FOLDER / f"{config.recipe}-{options.name}"
    study = create_study(options, config, metric)
    known = _read_trials(folder / "search.json")
    earlier = find_earlier(options, config, data, known)
    lines = list[Document]()
    ended_by = ""

    def write_record() -> Document:
        record = describe(options, config, data, metric, lines) | {"ended_by": ended_by}
        records.write(folder / "search.json", record)
        return record

    try:
        for number in range(1, options.trials + 1):
            trial = study.ask(options.searched)
            words = options.words(trial.params)
            before = known.get(number, {})
            if before.get("values") == trial.params:
                noise = before["noise"]  # earlier runs may have more now: the trial stays the same
            else:
                noise = noise_words(options, words, data, earlier)
                if earlier and number == len(known) + 1:
                    say(_describe_earlier(options, config, earlier))
            words += noise
            run = digest_of(configured(words), data.digest)
            ended_by = find_limit(options, configured(words), data, run, number)
            if ended_by and not lines:
                raise UserError(ended_by)
            if ended_by:
                say(ended_by)
                break
            line = {"trial": number, "values": trial.params, "noise": noise, "run": run}
            lines.append(line | {"state": "open", "score": None})
            write_record()
            lines[-1] |= _carry_out(words, number, metric.name, show)
            score = lines[-1]["score"]
            say(_describe_trial(lines[-1], options.trials, metric.name))
            study.tell(trial, score, TrialState.FAIL if score is None else TrialState.COMPLETE)
    finally:  # what was spent is stated, however the search ended
        record = write_record()
    return record, folder


def _read_trials(path: Path) -> dict[int, Document]:
    """Return the trials of a search that is continued, by number."""
    if not path.is_file():
        return {}
    lines: list[Document] = read_json(path).get("trials") or []
    return {line["trial"]: line for line in lines}


def find_earlier(
    options: Search, config: Run, data: Splits, known: Mapping[int, Document]
) -> list[Spending]:
    """Return the runs of the recipe on these data that are no trials of a search within an ε."""
    if options.epsilon is None:
        return []
    trials = {records.folder(config.results, config.recipe, line["run"]) for line in known.values()}
    spendings = read_recipes_spendings(config, data)
    return [spending for spending in spendings if spending.home not in trials]


def _require_rest(options: Search, config: Run, earlier: Sequence[Spending]) -> None:
    """Reject a search whose ε is spent before it begins, or if no ε of earlier runs is known."""
    name = f"--epsilon {options.epsilon:g}"
    try:
        spent = _epsilon_of_earlier(config, earlier)
    except ValueError as error:
        raise UserError(
            f"{name}: no ε is known of {_name_runs(config, earlier)}: {error}. Choose another "
            "paths.results for this search, and add its ε to theirs."
        ) from None
    if options.epsilon is not None and spent >= options.epsilon:
        raise UserError(
            f"{name}: {_name_runs(config, earlier)} have a tight ε of {show_epsilon(spent)} "
            "already, so nothing is left for a search. Give a larger --epsilon, which counts them "
            "too."
        )


def _epsilon_of_earlier(config: Run, earlier: Sequence[Spending]) -> float:
    return together(spent_of_one(earlier, config.privacy.by_patient), config.privacy.delta)


def _name_runs(config: Run, runs: Sequence[Spending]) -> str:
    noun = "run" if len(runs) == 1 else "runs"
    return f"the {len(runs)} {noun} of {config.recipe} on these data in {config.results}"


def _describe_earlier(options: Search, config: Run, earlier: Sequence[Spending]) -> str:
    spent = _epsilon_of_earlier(config, earlier)
    return (
        f"--epsilon {options.epsilon:g}: {_name_runs(config, earlier)} have spent a tight ε of "
        f"{show_epsilon(spent)}; the {options.trials} trials share what is left, so that all "
        f"together stay within {options.epsilon:g}"
    )


def create_study(
    options: Search,
    config: Run,
    metric: Metric,
) -> optuna.Study:
    """Return Optuna's study, whose proposals follow from the recipe's seed."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler = TPESampler if options.sampler == "tpe" else RandomSampler
    study = optuna.create_study(direction=direction(metric), sampler=sampler(seed=config.seed))
    if options.sampler == "grid":
        for values in grid_of(options.searched):
            study.enqueue_trial(values)
    return study


def _describe_trial(
    line: Document,
    trials: int,
    metric: str,
) -> str:
    """Return a finished trial in one line for the terminal."""
    values = " ".join(f"{key}={_short(value)}" for key, value in line["values"].items())
    result = "diverged"
    if line["score"] is not None:
        result = f"validation {metric} {line['score']:.4f}"
    return f"trial {line['trial']} of {trials}: {values}: {result}"


def hold_out(options: Search, word: str) -> Search:
    """Return the search with the override that holds out examples to choose by."""
    for fixed in options.fixed:
        if fixed.lstrip("+").startswith(f"{KEY}="):
            raise UserError(
                f"{fixed}: a search chooses by validation examples, and leaves none; give a share "
                "above 0, or remove the key."
            )
    return replace(options, fixed=(*options.fixed, word))


def choose_by(
    options: Search,
    config: Run,
    data: Splits,
) -> Metric:
    """Return the metric of the validation examples that trials are chosen by."""
    assert data.validation is not None
    setup = ModelSetup.of(config, data, torch.device("cpu"))
    metrics = evaluate(setup.model, setup.task, data.validation, setup.device)
    name = options.metric or setup.task.headline
    if name not in metrics:
        raise unknown("metric", name, metrics)
    return metric_of(setup.task, name)


def direction(metric: Metric) -> Literal["minimize", "maximize"]:
    """'minimize' or 'maximize', as Optuna calls it."""
    return "minimize" if metric.less_is_better else "maximize"


def _carry_out(
    words: list[str],
    number: int,
    metric: str,
    show: Shown,
) -> Document:
    """Run a trial; return its state and its score."""
    try:
        record = carry_out(compose(words), words, show=show).record
    except UserError as error:
        if str(error).startswith(DIVERGED):
            return {"state": "failed"}
        raise UserError(f"trial {number}: {error}") from None
    score = record.validation.get(metric, math.nan)
    return {
        "state": "done",
        "score": score if math.isfinite(score) else None,
        "test": record.metrics.get(metric),
        "epsilon_tight": record.privacy.epsilon_tight,
    }


def spend(config: Run, data: Splits) -> Spent:
    """Return what a run will spend if it takes all its steps."""
    setup = Setup.of(config, data, torch.device("cpu"))
    sampling = setup.plan.sampling
    own_steps = sampling.steps_of_one(setup.plan.steps)
    return Spent(setup.mechanism.z, sampling.of_one, own_steps)


def noise_words(
    search: Search,
    words: Sequence[str],
    data: Splits,
    earlier: Sequence[Spending],
) -> list[str]:
    """Return the overrides that give a trial its share of the search's ε; [] without one.

    Formal guarantees: the earlier runs, and as many trials as this one as are planned, have
    together a tight ε of at most `search.epsilon`. `max_epsilon` ends a trial that has to repeat
    steps after a kill.
    """
    if search.epsilon is None:
        return []
    no_target = ["privacy.target_epsilon=null", "privacy.claimed_epsilon=null"]
    words = [*words, *no_target, "privacy.max_epsilon=null"]
    config = configured(words)
    if "noise_multiplier" not in config.algorithm.options:
        raise UserError(
            f"--epsilon with algorithm={config.algorithm.name}: it has no noise to keep the search "
            "within an ε; choose a private algorithm, or remove --epsilon."
        )
    delta = config.privacy.delta
    if earlier:
        _require_rest(search, config, earlier)
    at_1 = spend(configured([*words, "algorithm.noise_multiplier=1.0"]), data)
    try:
        if earlier:
            spent_before = spent_of_one(earlier, config.privacy.by_patient)
            multiplier = calibrate_beside(search.epsilon, spent_before, at_1, search.trials, delta)
        else:
            mechanism = Mechanism.of_z(at_1.z, at_1.sampling)
            steps = at_1.steps * search.trials
            multiplier = calibrate_mechanism(search.epsilon, mechanism, steps, delta)
    except ValueError as error:
        raise UserError(f"--epsilon {search.epsilon:g}: {error}.") from None
    noise = f"algorithm.noise_multiplier={multiplier!r}"
    spent = spend(configured([*words, noise]), data)
    epsilon_of_trial = tight_epsilon(Mechanism.of_z(spent.z, spent.sampling), spent.steps, delta)
    return [*no_target, noise, f"privacy.max_epsilon={epsilon_of_trial * SLACK!r}"]


def find_limit(
    options: Search,
    config: Run,
    data: Splits,
    run: str,
    number: int,
) -> str:
    """Return why a trial would take the search beyond its ε; "" if it does not."""
    home = records.folder(config.results, config.recipe, run)
    if options.epsilon is None or (home / "record.json").exists():
        return ""
    setup = Setup.of(config, data, torch.device("cpu"))
    own = plan_spending(config, data, setup.mechanism, setup.plan.steps, home)
    spendings = read_recipes_spendings(config, data)
    others = [spending for spending in spendings if spending.home != home]
    delta = config.privacy.delta
    earlier = _name_runs(config, others)
    try:
        spent = spent_of_one([*others, own], own.by_unit)
        before = together(spent[:-1], delta)
        after = together(spent, delta)
    except ValueError as error:
        return (
            f"--epsilon {options.epsilon:g}: no ε is known of trial {number} and {earlier}: "
            f"{error}."
        )
    if after <= options.epsilon:
        return ""
    return (
        f"--epsilon {options.epsilon:g}: {earlier} have a tight ε of {show_epsilon(before)}, and "
        f"with trial {number} it would be {show_epsilon(after)}, so the search ends before it. "
        "Raise --epsilon to make more trials."
    )


def describe(
    options: Search,
    config: Run,
    data: Splits,
    metric: Metric,
    lines: list[Document],
) -> Document:
    """Return a search's record: every trial, the best, and what ε covers what."""
    spendings = read_recipes_spendings(config, data)
    has_owners = any(spending.examples > 1 for spending in spendings)
    delta = config.privacy.delta
    best = None  # the first of equal ones
    for line in lines:
        if line["score"] is None:
            continue
        if best is None or metric.gain(line["score"], best["score"]) > 0:
            best = line
    finished = [line for line in lines if line["state"] != "open"]
    return {
        "recipe": config.recipe,
        "fixed": list(options.fixed),
        "recipe_as_typed": options.recipe,
        "searched": {key: str(values) for key, values in options.searched.items()},
        "sampler": options.sampler,
        "asked": options.trials,
        "finished": len(finished) >= options.trials,
        "metric": metric.name,
        "direction": direction(metric),
        "data": {
            "name": config.dataset.name,
            "digest": data.digest,
            "validation": len(data.validation or ()),
        },
        "trials": lines,
        "best": best and best["trial"],
        "privacy": {
            "delta": delta,
            "epsilon_asked": options.epsilon,
            "runs": len(spendings),
            "epsilon_all": _find_epsilon(spendings, False, delta),
            "epsilon_all_unit": _find_epsilon(spendings, True, delta) if has_owners else None,
            "unit": data.unit,
        },
    }


def _find_epsilon(
    spendings: list[Spending],
    of_unit: bool,
    delta: float,
) -> float | None:
    """Return the tight ε of all for one example, or one unit; None where none is known."""
    try:
        return together(spent_of_one(spendings, of_unit), delta)
    except ValueError:
        return None


def sheet(record: Document) -> Sheet:
    """Return the trials of a search's record, the best first, and what ε covers what."""
    metric = record["metric"]
    sign = -1 if record["direction"] == "minimize" else 1

    def rank(line: Document) -> tuple[bool, float, int]:
        has_none = line["score"] is None
        return has_none, 0.0 if has_none else -sign * line["score"], line["trial"]

    numbers = []
    for line in sorted(record["trials"], key=rank):
        numbers.append(
            {
                "trial": line["trial"],
                **line["values"],
                "state": line["state"],
                f"validation_{metric}": line["score"],
                f"test_{metric}": line.get("test"),
                "epsilon_tight": line.get("epsilon_tight"),
                "run": line.get("run"),
            }
        )
    cells = []
    for row in numbers[:SHOWN]:
        shown = {key: _short(value)[:16] for key, value in row.items()}
        shown["epsilon_tight"] = show_epsilon(row["epsilon_tight"])
        cells.append(list(shown.values()))
    notes = _notes(record)
    if len(numbers) > SHOWN:
        notes.insert(0, f"{len(numbers) - SHOWN} more trials: --format csv.")
    title = f"Search of {record['recipe']}: {len(numbers)} trials by {record['sampler']}"
    columns = [key.replace("_", " ") for key in numbers[0]] if numbers else []
    important = ("trial", f"validation {metric}", "run", "epsilon tight", *record["searched"])
    return Sheet(title, columns, cells, notes, numbers=numbers, important=important)


def _notes(record: Document) -> list[str]:
    """Return what was spent, in sentences, and what each number covers."""
    privacy = record["privacy"]
    every = show_epsilon(privacy["epsilon_all"]) or "not known: its runs differ in sampling or unit"
    of_owner = privacy["epsilon_all_unit"]
    owner = ""
    if of_owner is not None:
        owner = f", of {name_one(privacy['unit'])} {show_epsilon(of_owner)}"
    notes = [record["ended_by"]] if record["ended_by"] else []
    return [
        *notes,
        f"ε of the whole search: {every}{owner} (δ {privacy['delta']:g}; tight, of the "
        f"{privacy['runs']} runs of {record['recipe']} on these data in the results folder, "
        "composed). It covers every choice made by looking at the training examples. The ε of one "
        "trial covers less.",
        f"Chosen by {record['data']['validation']:,} validation examples, which are not protected: "
        "no ε covers them.",
        *_commands(record),
    ]


def _commands(record: Document) -> list[str]:
    """Return the best run, and the commands that export it and run it with other seeds."""
    if record["best"] is None:
        return []
    best = next(line for line in record["trials"] if line["trial"] == record["best"])
    name = f"{record['recipe']}/{best['run'][:8]}"
    metric = record["metric"].replace("_", " ")
    export = ["zdp-bench", "export", name, "--to", f"{record['recipe']}_best"]
    for word in record["fixed"]:
        if word.startswith("paths.results="):
            export += ["--results", word.partition("=")[2]]
    fixed = [word for word in record["fixed"] if not word.startswith(("seed=", "recipe="))]
    fixed.insert(0, record["recipe_as_typed"])
    values = [f"{key}={value}" for key, value in best["values"].items()]
    again = ["zdp-bench", "run", "-m", *fixed, *values, *best["noise"], "seed=1,2,3"]
    return [
        f"Best: trial {best['trial']}, run {name}, validation {metric} {best['score']:.4f}.",
        f"Export it: {shlex.join(export)}",
        f"Run it with other seeds, which spend ε beyond the search's: {shlex.join(again)}",
    ]


def _short(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
