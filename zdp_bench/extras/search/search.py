"""Search hyper-parameters: Optuna proposes trials, each is a run, and the journal lists them.

The total ε is composed over all runs of the recipe on this data set in the results folder, as
`zdp-bench budget` counts them. This includes runs of earlier searches, and runs whose folders were
renamed.

Optuna's proposals are determined by the recipe's seed and the scores of earlier trials. The same
command therefore proposes the same trials after a kill. Finished runs are not repeated, nor are
failed ones. The interrupted run is resumed, and then new trials start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import optuna
import torch
from optuna.samplers import RandomSampler, TPESampler
from optuna.trial import TrialState

from zdp_bench import records
from zdp_bench.config import compose, configured
from zdp_bench.config.constraints import require_no_federation
from zdp_bench.config.schema import Run
from zdp_bench.config.words import split_word
from zdp_bench.data import Splits
from zdp_bench.errors import UserError, is_out_of_memory, unknown
from zdp_bench.experiments.sweep import Shown, carry_out
from zdp_bench.extras.search.journal import Journal, direction, read_trials
from zdp_bench.extras.search.noise import (
    AT_MULTIPLIER_1,
    calibrate_noise,
    choose_noise,
    describe_earlier_runs,
    require_within,
)
from zdp_bench.extras.search.report import describe_trial
from zdp_bench.extras.search.space import SearchOptions, grid_of
from zdp_bench.foreign_files import exists
from zdp_bench.privacy.composition import Spending
from zdp_bench.records import Document
from zdp_bench.tasks.metric import Metric, metric_of
from zdp_bench.training import validation
from zdp_bench.training.evaluation import DivergedError, UntrainedError, evaluate
from zdp_bench.training.public_start import run_digest_of
from zdp_bench.training.reservation import reserve
from zdp_bench.training.setup import ModelSetup, Setup, load_data
from zdp_bench.training.spending import read_spendings_of_recipe

FOLDER = "searches"  # in the results folder


def search(options: SearchOptions, show: Shown = "progress") -> tuple[Document, Path]:
    """Run a search, or continue it.

    Formal guarantees:
        - Every trial that begins is a run with a ledger. The run counts in full, even if it failed
          or was stopped.
        - In the record, `privacy.epsilon_all` is the tight ε of all runs of the recipe on this data
          set, in any adaptive order. `privacy.epsilon_of` states what this ε protects: an example
          or, with `privacy.unit=patient`, an owner.
        - If `privacy.epsilon_all` protects an example, and an owner has several examples,
          `privacy.epsilon_all_unit` is the tight ε that protects an owner.
        - With `options.epsilon`, no trial starts that would bring the total ε above this limit,
          even if several searches run at once.

    Args:
        options: the search, as `read_search` returns it.
        show: what to print: "nothing" prints no lines about the trials.

    Returns:
        the search's record, which is also written to `search.json`, and the search's folder.

    Raises:
        UserError: the search cannot be run, or its ε does not allow a first trial.
    """
    print_line = print if show != "nothing" else (lambda line: None)
    # The configuration of one possible trial. Only what all trials share is read from it.
    config = configured(options.overrides_of_first_values())
    require_no_federation(config, "search")
    if config.force:
        raise UserError(
            "force=true: a search keeps its finished trials. Remove it; to search anew, choose "
            "another seed or paths.results=FOLDER."
        )
    data = load_data(config)
    if data.validation is None:
        override = f"{validation.KEY}={validation.DEFAULT:g}"
        options = hold_out(options, override)
        config = configured(options.overrides_of_first_values())
        data = load_data(config)
        print_line(
            f"{override}: this fraction of the owners is held out of training, and the best trial "
            "is chosen on them; no ε protects them"
        )
    metric = find_metric(options, config, data)
    _check_listed_values(options, data)
    folder = config.results / FOLDER / f"{config.recipe}-{options.name}"
    path = folder / "search.json"
    saved_trials = read_trials(path, data.digest)
    journal = Journal(path, options, config, data, metric, saved_trials)
    try:
        _run_trials(journal, show, print_line)
    except BaseException:  # record the total ε, however the search ended
        with suppress(UserError):  # an error of `write` would hide why the search ended
            if journal.list_all_trials():  # a search that was refused leaves no record
                journal.write()
        raise
    return journal.write(), folder


def _check_listed_values(options: SearchOptions, data: Splits) -> None:
    """Raise an error if a value of a searched key is invalid, before any trial spends ε.

    The listed values and the ends of intervals are checked: for each of them, the configuration,
    the model and the noise of a trial are built, and then discarded.

    Raises:
        UserError: such a value is invalid, no noise fits into the search's ε with it, or the trials
            have no common ε.
    """
    checked_models, checked_mechanisms, adjacencies = set[str](), set[str](), set[str]()
    for overrides in options.list_overrides_to_check():
        config = configured(overrides)
        model_key = repr(
            (config.model, config.replace_batchnorm, config.complex_as, config.representation)
        )
        if model_key not in checked_models:
            checked_models.add(model_key)
            ModelSetup.of(config, _data_of(options, config, data), torch.device("cpu"))
        mechanism_key = repr((config.algorithm, config.trainer))
        if options.epsilon is not None and mechanism_key not in checked_mechanisms:
            checked_mechanisms.add(mechanism_key)
            trial_data = _data_of(options, config, data)
            # the noise that `choose_noise` gives a first trial without earlier runs
            noise_overrides = calibrate_noise(
                options, overrides, trial_data, earlier_runs=[], num_trials=options.trials
            )
            trial_config = configured([*overrides, *noise_overrides])
            setup = Setup.of(trial_config, trial_data, torch.device("cpu"))
            adjacencies.add(setup.plan.sampling.adjacency)
    if len(adjacencies) > 1:
        raise UserError(
            f"--epsilon {options.epsilon:g}: trials with Poisson and with fixed-size batches "
            "protect different neighbours, so they have no common ε. Give trainer one value."
        )


def _data_of(options: SearchOptions, config: Run, data: Splits) -> Splits:
    """Return the data of a trial, whose representation may differ from that of `data`."""
    searches_representation = any(
        key.lstrip("+").startswith("representation") for key in options.searched
    )
    return load_data(config) if searches_representation else data


def _run_trials(journal: Journal, show: Shown, print_line: Callable[[str], None]) -> None:
    """Run the trials of a search, each with the noise that keeps the search within its ε.

    A trial whose run failed or was deleted is not repeated: it would spend its ε again. A trial
    whose values do not fit together fails without a run and spends no ε, so it is checked again
    whenever the search continues.

    Raises:
        UserError: a trial cannot be run, or the search's ε does not allow a first trial.
    """
    options, config = journal.options, journal.config
    metric = journal.metric.name
    study = create_study(options, config, journal.metric)
    # What all runs of the recipe had spent when this process began; unused without an ε.
    runs_at_start: list[Spending] = []
    if options.epsilon is not None:
        runs_at_start = read_spendings_of_recipe(config, journal.data)
    has_described_earlier_runs = False
    for number in range(1, options.trials + 1):
        proposal = study.ask(options.searched)
        overrides = options.overrides_of(proposal.params)
        saved_trial = journal.saved_trials.get(number, {})
        # A saved trial without a run could not begin, and is tried again. A saved trial with other
        # values, which another version of Optuna proposed, is replaced by a new trial.
        has_run = bool(saved_trial.get("run")) and saved_trial["values"] == proposal.params
        misfit = None if has_run else _find_misfit(options, overrides, journal.data)
        ended_trial: Document | None = None
        if has_run and saved_trial["state"] == "failed":
            ended_trial = saved_trial
        elif has_run and _is_deleted(journal.home_of(saved_trial)):
            ended_trial = saved_trial | {"state": "deleted"}
        elif misfit is not None:
            ended_trial = {
                "trial": number,
                "values": proposal.params,
                "noise": [],
                "run": "",
                "state": "failed",
                "score": None,
                "reason": misfit,
            }
        if ended_trial is not None:
            journal.trials.append(ended_trial)
            print_line(describe_trial(ended_trial, options.trials, metric))
            _tell(study, proposal, ended_trial["score"])
            continue
        data = _data_of(options, configured(overrides), journal.data)
        try:
            if has_run:  # the run keeps its noise, even if other runs have spent more since
                noise_overrides = saved_trial["noise"]
            else:
                # Earlier runs belong to no trial of this search. If this trial replaces a saved
                # one, the run of the replaced trial is among them.
                folders_of_other_trials = journal.list_folders_except(number)
                earlier_runs = [
                    run for run in runs_at_start if run.home not in folders_of_other_trials
                ]
                noise_overrides = choose_noise(
                    journal, overrides, data, earlier_runs, folders_of_other_trials
                )
                if earlier_runs and not has_described_earlier_runs:
                    print_line(describe_earlier_runs(options, config, earlier_runs))
                    has_described_earlier_runs = True
            trial: Document = {"trial": number, "values": proposal.params, "noise": noise_overrides}
            overrides = [*overrides, *noise_overrides]
            _begin_trial(journal, trial, configured(overrides), data)
        except UserError as error:
            if not journal.list_all_trials():
                raise
            journal.ended_by = str(error)
            print_line(journal.ended_by)
            return
        # The journal lists the same dict.
        trial |= _run_trial(overrides, number, metric, show)
        print_line(describe_trial(trial, options.trials, metric))
        if "warning" in trial:
            print_line(f"trial {number}: {trial['warning']}")
        _tell(study, proposal, trial["score"])


def _is_deleted(home: Path) -> bool:
    """Return True if a run was deleted, and has no record of being carried out again since.

    A run that was refused or interrupted since leaves a folder without a record.
    """
    return not exists(home / "record.json") and bool(records.list_deleted(home))


def _tell(study: optuna.Study, proposal: optuna.Trial, score: float | None) -> None:
    """Report a trial's score to Optuna; without one, the trial failed."""
    study.tell(proposal, score, TrialState.FAIL if score is None else TrialState.COMPLETE)


def _find_misfit(options: SearchOptions, overrides: Sequence[str], data: Splits) -> str | None:
    """Return why no run can begin with the values of a trial; None if a run can begin.

    Each value is valid beside the first values of the other keys (`_check_listed_values`). But the
    values of a trial may not fit together.

    Raises:
        UserError: memory ran out, which says nothing about the values.
    """
    if options.epsilon is not None:  # the noise is chosen later
        overrides = [*overrides, *AT_MULTIPLIER_1]
    try:
        config = configured(overrides)
        Setup.of(config, _data_of(options, config, data), torch.device("cpu")).check_model()
    except UserError as error:
        if is_out_of_memory(error):
            raise
        return str(error)
    return None


def _begin_trial(journal: Journal, trial: Document, config: Run, data: Splits) -> None:
    """Add the digest of its run to a trial, list the trial, and reserve what its run may spend.

    No other process reserves at the same time, so two searches cannot both spend the rest of an ε.

    Raises:
        UserError: the trial would exceed the search's ε, so it is neither listed nor reserved.
    """
    options = journal.options
    trial |= {"run": run_digest_of(config, data.digest), "state": "open", "score": None}
    home = records.folder(config.results, config.recipe, trial["run"])

    def list_trial() -> None:
        journal.trials.append(trial)
        journal.write()

    def check_and_list(this_run: Spending) -> None:
        require_within(options, config, data, this_run, trial["trial"])
        list_trial()

    # A search without an ε has no limit to keep. A run with a record has spent its ε already.
    if options.epsilon is None or exists(home / "record.json"):
        list_trial()
        return
    setup = Setup.of(config, data, torch.device("cpu"))
    reserve(
        config,
        data,
        setup.mechanism,
        setup.plan.steps,
        home,
        run=trial["run"],
        begin=check_and_list,  # called under the lock of `reserve`, before anything is reserved
        # If the run was interrupted, what it reserved stays as it is (`spending.json`): only the
        # run itself knows which steps it must repeat, and it reserves anew when it resumes.
        keep_plan=True,
    )


def create_study(options: SearchOptions, config: Run, metric: Metric) -> optuna.Study:
    """Create Optuna's study, whose proposals are determined by the recipe's seed."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    # For a grid, any sampler will do: `ask` returns the queued combinations in order.
    sampler = TPESampler if options.sampler == "tpe" else RandomSampler
    seed = config.seed % 2**32  # Optuna takes 32 bits, a recipe's seed may have 64
    study = optuna.create_study(direction=direction(metric), sampler=sampler(seed=seed))
    if options.sampler == "grid":
        for values in grid_of(options.searched):
            study.enqueue_trial(values)
    return study


def hold_out(options: SearchOptions, override: str) -> SearchOptions:
    """Return a search, which holds out nothing yet, with the override that holds out examples.

    Raises:
        UserError: the search sets this key itself, and so sets it to 0.
    """
    for word in options.fixed:
        key, _ = split_word(word)
        if key == validation.KEY:
            raise UserError(
                f"{word}: a search chooses the best trial on validation examples, so the share "
                "must be above 0; or remove the key."
            )
    return replace(options, fixed=(*options.fixed, override))


def find_metric(options: SearchOptions, config: Run, data: Splits) -> Metric:
    """Return the metric on validation examples by which the best trial is chosen.

    Raises:
        UserError: the task has no metric named `options.metric`.
    """
    assert data.validation is not None
    setup = ModelSetup.of(config, data, torch.device("cpu"))
    # The model is untrained: this is only to learn the names of the task's metrics.
    metrics = evaluate(setup.model, setup.task, data.validation, setup.device)
    name = options.metric or setup.task.headline
    if name not in metrics:
        raise unknown("metric", name, metrics)
    return metric_of(setup.task, name)


def _run_trial(overrides: list[str], number: int, metric: str, show: Shown) -> Document:
    """Run a trial, or read the record of a finished one, and return its outcome for `search.json`.

    The outcome is state, score, test metric, ε and, if there is one, warning. If the run diverged,
    or was killed and has no ε left for a first step, the outcome is state, score and reason.
    """
    try:
        config = compose(overrides)  # unchecked, because `carry_out` checks it
        run_record = carry_out(config, overrides, show=show).record
    except DivergedError:
        return {"state": "failed", "score": None, "reason": "diverged"}
    except UntrainedError:
        return {"state": "failed", "score": None, "reason": "no ε left for a first step"}
    except UserError as error:
        raise UserError(f"trial {number}: {error}") from None
    score = run_record.validation.get(metric, math.nan)
    outcome = {
        "state": "done",
        "score": score if math.isfinite(score) else None,
        "test": run_record.metrics.get(metric),
        "epsilon_tight": run_record.privacy.epsilon_tight,
    }
    if run_record.warning:
        outcome["warning"] = run_record.warning
    return outcome
