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
from collections.abc import Sequence
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
from zdp_bench.privacy.accounting import tight_epsilon
from zdp_bench.privacy.calibration import calibrate_mechanism
from zdp_bench.privacy.composition import Spending, Spent, spent_of_one, together
from zdp_bench.privacy.mechanism import Mechanism
from zdp_bench.privacy.statement import show_epsilon
from zdp_bench.records import Document
from zdp_bench.report.number_format import epsilon, name_one
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


def search(asked: Search, show: Shown = "progress") -> tuple[Document, Path]:
    """Carry a search out, or continue it; return its record and its folder.

    Formal guarantees: every trial is a run with a ledger and counts in full, also one that failed
    or was stopped. `epsilon_all` is the tight ε of all runs of the recipe on these data, in any
    adaptive order, and `epsilon_all_unit` that of the owner of several examples. With
    `asked.epsilon`, no trial begins with which it would be larger.
    """
    say = print if show != "nothing" else (lambda line: None)
    config = configured(asked.example())
    require_central(config, "search")
    data = load_data(config)
    if data.validation is None:
        word = f"{KEY}={DEFAULT:g}"
        asked = hold_out(asked, word)
        config = configured(asked.example())
        data = load_data(config)
        say(f"{word}: these owners are held out of training to choose by, and are not protected")
    metric = choose_by(asked, config, data)
    folder = config.results / FOLDER / f"{config.recipe}-{asked.name}"
    path = folder / "search.json"
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(
        direction=direction(metric),
        sampler=(TPESampler if asked.sampler == "tpe" else RandomSampler)(seed=config.seed),
    )
    for values in grid_of(asked.searched) if asked.sampler == "grid" else ():
        study.enqueue_trial(values)
    lines = list[Document]()
    ended_by = ""

    def describe_now() -> Document:
        found = describe(asked, config, data, metric, lines) | {"ended_by": ended_by}
        records.write(path, found)
        return found

    try:
        for number in range(asked.trials):
            trial = study.ask(asked.searched)
            words = asked.words(trial.params)
            noise = noise_words(asked, words, data)
            words += noise
            run = digest_of(configured(words), data.digest)
            ended_by = find_limit(asked, configured(words), data, run, number + 1)
            if ended_by and not lines:
                raise UserError(ended_by)
            if ended_by:
                say(ended_by)
                break
            line = {"trial": number + 1, "values": trial.params, "noise": noise, "run": run}
            lines.append(line | {"state": "open", "score": None})
            describe_now()
            lines[-1] |= _carry_out(words, number, metric.name, show)
            score = lines[-1]["score"]
            tried = " ".join(f"{key}={_short(value)}" for key, value in trial.params.items())
            reached = "diverged" if score is None else f"validation {metric.name} {score:.4f}"
            say(f"trial {number + 1} of {asked.trials}: {tried}: {reached}")
            study.tell(trial, score, TrialState.FAIL if score is None else TrialState.COMPLETE)
    finally:  # what was spent is stated, however the search ended
        found = describe_now()
    return found, folder


def hold_out(asked: Search, word: str) -> Search:
    """Return the search with the override that holds out examples to choose by."""
    for fixed in asked.fixed:
        if fixed.lstrip("+").startswith(f"{KEY}="):
            raise UserError(
                f"{fixed}: a search chooses by validation examples, and leaves none; give a share "
                "above 0, or remove the key."
            )
    return replace(asked, fixed=(*asked.fixed, word))


def choose_by(asked: Search, config: Run, data: Splits) -> Metric:
    """Return the metric of the validation examples that trials are chosen by."""
    assert data.validation is not None
    setup = ModelSetup.of(config, data, torch.device("cpu"))
    known = evaluate(setup.model, setup.task, data.validation, setup.device)
    name = asked.metric or setup.task.headline
    if name not in known:
        raise unknown("metric", name, known)
    return metric_of(setup.task, name)


def direction(metric: Metric) -> Literal["minimize", "maximize"]:
    """'minimize' or 'maximize', as Optuna calls it."""
    return "minimize" if metric.less_is_better else "maximize"


def _carry_out(words: list[str], number: int, metric: str, show: Shown) -> Document:
    """Run a trial; return its state and its score."""
    try:
        record = carry_out(compose(words), words, show=show).record
    except UserError as error:
        if str(error).startswith(DIVERGED):
            return {"state": "failed"}
        raise UserError(f"trial {number + 1}: {error}") from None
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


def noise_words(search: Search, words: Sequence[str], data: Splits) -> list[str]:
    """Return the overrides that give a trial its share of the search's ε; [] without one.

    Formal guarantees: as many trials as this one as are planned have together a tight ε of at most
    `search.epsilon`. `max_epsilon` ends a trial that has to repeat steps after a kill.
    """
    if search.epsilon is None:
        return []
    off = [f"privacy.{key}=null" for key in ("target_epsilon", "claimed_epsilon", "max_epsilon")]
    first = configured([*words, *off])
    if "noise_multiplier" not in first.algorithm.options:
        raise UserError(
            f"--epsilon with algorithm={first.algorithm.name}: it has no noise to keep the search "
            "within an ε; choose a private algorithm, or remove --epsilon."
        )
    delta = first.privacy.delta
    unit = spend(configured([*words, *off, "algorithm.noise_multiplier=1.0"]), data)
    try:
        mechanism, steps = Mechanism.of_z(unit.z, unit.sampling), unit.steps * search.trials
        found = calibrate_mechanism(search.epsilon, mechanism, steps, delta)
    except ValueError as error:
        raise UserError(f"--epsilon {search.epsilon:g}: {error}.") from None
    noise = f"algorithm.noise_multiplier={found!r}"
    own = spend(configured([*words, *off, noise]), data)
    most = tight_epsilon(Mechanism.of_z(own.z, own.sampling), own.steps, delta) * SLACK
    return [*off[:2], noise, f"privacy.max_epsilon={most!r}"]


def find_limit(asked: Search, config: Run, data: Splits, run: str, number: int) -> str:
    """Return why a trial would take the search beyond its ε; "" if it does not."""
    home = records.folder(config.results, config.recipe, run)
    if asked.epsilon is None or (home / "record.json").exists():
        return ""
    setup = Setup.of(config, data, torch.device("cpu"))
    own = plan_spending(config, data, setup.mechanism, setup.plan.steps, home)
    others = [one for one in read_recipes_spendings(config, data) if one.home != home]
    delta = config.privacy.delta
    earlier = f"the {len(others)} runs of {config.recipe} on these data in {config.results}"
    try:
        spent = spent_of_one([*others, own], own.by_unit)
        before, after = together(spent[:-1], delta), together(spent, delta)
    except ValueError as error:
        return (
            f"--epsilon {asked.epsilon:g}: no ε is known of trial {number} and {earlier}: {error}."
        )
    if after <= asked.epsilon:
        return ""
    return (
        f"--epsilon {asked.epsilon:g}: {earlier} have a tight ε of {show_epsilon(before)}, and "
        f"with trial {number} it would be {show_epsilon(after)}, so the search ends before it. "
        "Raise --epsilon to make more trials."
    )


def describe(
    asked: Search, config: Run, data: Splits, metric: Metric, lines: list[Document]
) -> Document:
    """Return a search's record: every trial, the best, and what ε covers what."""
    spendings = read_recipes_spendings(config, data)
    has_owners = any(one.examples > 1 for one in spendings)
    delta = config.privacy.delta
    scored = [line for line in lines if line["score"] is not None]
    best = max(
        scored, key=lambda line: (metric.gain(line["score"], 0.0), -line["trial"]), default=None
    )
    return {
        "recipe": config.recipe,
        "fixed": list(asked.fixed),
        "searched": {key: str(values) for key, values in asked.searched.items()},
        "sampler": asked.sampler,
        "asked": asked.trials,
        "finished": len([line for line in lines if line["state"] != "open"]) >= asked.trials,
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
            "epsilon_asked": asked.epsilon,
            "runs": len(spendings),
            "epsilon_all": _find_epsilon(spendings, False, delta),
            "epsilon_all_unit": _find_epsilon(spendings, True, delta) if has_owners else None,
            "unit": data.unit,
        },
    }


def _find_epsilon(spendings: list[Spending], of_unit: bool, delta: float) -> float | None:
    """Return the tight ε of all for one example, or one unit; None where none is known."""
    try:
        return together(spent_of_one(spendings, of_unit), delta)
    except ValueError:
        return None


def sheet(found: Document) -> Sheet:
    """Return the trials of a search's record, the best first, and what ε covers what."""
    metric = found["metric"]
    sign = -1 if found["direction"] == "minimize" else 1
    ordered = sorted(
        found["trials"],
        key=lambda line: (line["score"] is None, -sign * (line["score"] or 0.0), line["trial"]),
    )
    numbers = [
        {
            "trial": line["trial"],
            **line["values"],
            "state": line["state"],
            f"validation_{metric}": line["score"],
            f"test_{metric}": line.get("test"),
            **{key: line.get(key) for key in ("epsilon_tight", "run")},
        }
        for line in ordered
    ]
    cells = [
        [epsilon(v) if k == "epsilon_tight" else _short(v)[:16] for k, v in line.items()]
        for line in numbers[:SHOWN]
    ]
    left = [f"{len(numbers) - SHOWN} more trials: --format csv."] if len(numbers) > SHOWN else []
    title = f"Search of {found['recipe']}: {len(numbers)} trials by {found['sampler']}"
    columns = [key.replace("_", " ") for key in numbers[0]] if numbers else []
    important = ("trial", f"validation {metric}", "run", "epsilon tight", *found["searched"])
    notes = [*left, *_notes(found)]
    return Sheet(title, columns, cells, notes, numbers=numbers, important=important)


def _notes(found: Document) -> list[str]:
    """Return what was spent, in sentences, and what each number covers."""
    privacy = found["privacy"]
    every = epsilon(privacy["epsilon_all"]) or "not known: its runs differ in sampling or unit"
    unit = privacy["epsilon_all_unit"]
    owner = f", of {name_one(privacy['unit'])} {epsilon(unit)}" if unit is not None else ""
    return [
        *([found["ended_by"]] if found["ended_by"] else []),
        f"ε of the whole search: {every}{owner} (δ {privacy['delta']:g}; tight, of the "
        f"{privacy['runs']} runs of {found['recipe']} on these data in the results folder, "
        "composed). It covers every choice made by looking at the training examples. The ε of one "
        "trial covers less.",
        f"Chosen by {found['data']['validation']:,} validation examples, which are not protected: "
        "no ε covers them.",
        *_commands(found),
    ]


def _commands(found: Document) -> list[str]:
    """Return the best run, and the commands that export it and run it with other seeds."""
    if found["best"] is None:
        return []
    (best,) = (line for line in found["trials"] if line["trial"] == found["best"])
    name, metric = f"{found['recipe']}/{best['run'][:8]}", found["metric"].replace("_", " ")
    results = [word for word in found["fixed"] if word.startswith("paths.results=")]
    place = ["--results", results[-1].partition("=")[2]] if results else []
    values = [f"{key}={value}" for key, value in best["values"].items()]
    fixed = [word for word in found["fixed"] if not word.startswith("seed=")]
    again = ["zdp-bench", "run", "-m", *fixed, *values, *best["noise"], "seed=1,2,3"]
    export = ["zdp-bench", "export", name, "--to", f"{found['recipe']}_best", *place]
    return [
        f"Best: trial {best['trial']}, run {name}, validation {metric} {best['score']:.4f}.",
        f"Export it: {shlex.join(export)}",
        f"Run it with other seeds, which spend ε beyond the search's: {shlex.join(again)}",
    ]


def _short(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
