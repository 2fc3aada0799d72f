"""Search hyper-parameters: Optuna proposes trials, each is a run, and their total ε is reported.

The total ε is composed over all runs of the recipe on this data set in the results folder, as
`zdp-bench budget` counts them. This includes runs of earlier searches, and runs whose folders were
renamed.

Optuna's proposals are determined by the recipe's seed and the scores of earlier trials. The same
command therefore proposes the same trials after a kill: finished runs are found, trials that failed
stay so, the interrupted run is resumed, and then new ones start. `search.json` lists each trial
before it starts.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import optuna
import torch
from optuna.samplers import RandomSampler, TPESampler
from optuna.trial import TrialState

from zdp_bench import records
from zdp_bench.config import compose, configured
from zdp_bench.config.constraints import require_no_federation
from zdp_bench.config.schema import Run
from zdp_bench.config.words import parse_words, split_word
from zdp_bench.data import Splits
from zdp_bench.errors import UserError, unknown
from zdp_bench.experiments.sweep import Shown, carry_out
from zdp_bench.extras.search.space import SearchOptions, grid_of
from zdp_bench.foreign_files import Shape, misfits, read_json
from zdp_bench.privacy.accounting import tight_epsilon
from zdp_bench.privacy.calibration import calibrate_beside
from zdp_bench.privacy.composition import Spending, SpentSteps, compose_epsilon, list_spent_steps
from zdp_bench.privacy.mechanism import Mechanism, Sampling
from zdp_bench.privacy.statement import show_epsilon
from zdp_bench.records import Document
from zdp_bench.report.budget import joint_epsilon
from zdp_bench.report.number_format import name_one
from zdp_bench.report.sheet import Sheet
from zdp_bench.tasks.metric import Metric, metric_of
from zdp_bench.training import validation
from zdp_bench.training.evaluation import DivergedError, UntrainedError, evaluate
from zdp_bench.training.public_start import run_digest_of
from zdp_bench.training.reservation import reserve
from zdp_bench.training.run import epsilon_of
from zdp_bench.training.setup import ModelSetup, Setup, load_data
from zdp_bench.training.spending import read_spendings_of_recipe

FOLDER = "searches"  # in the results folder
MAX_SHOWN = 10  # number of trials in the printed table; CSV and JSON have all of them
_TRIAL: Shape = {
    "trial": int,
    "values": dict,
    "noise": [str],
    "run": str,
    "state": str,
    "score": (float, int, type(None)),
}
# Factor on a trial's `max_epsilon`, because another machine's FFT may round ε up.
SLACK = 1 + 1e-9
NO_TARGET = ("privacy.target_epsilon=null", "privacy.claimed_epsilon=null")
NO_EPSILON = (*NO_TARGET, "privacy.max_epsilon=null")
MAX_SPENT = 0.99  # fraction of a search's ε that earlier runs may have spent


def search(options: SearchOptions, show: Shown = "progress") -> tuple[Document, Path]:
    """Run a search, or continue it.

    Formal guarantees: every trial is a run with a ledger and counts in full, even if it failed or
    was stopped. `epsilon_all` is the tight ε of all runs of the recipe on this data set, in any
    adaptive order. It protects what the record names as `epsilon_of`: an example or, with
    `privacy.unit=patient`, an owner. If it protects an example and owners have several,
    `epsilon_all_unit` is the total ε of an owner. With `options.epsilon`, a trial that would bring
    the total ε above it does not start, even if several searches run at once.

    Args:
        options: the search, as `read_search` returns it.
        show: what to print: "nothing" prints no lines about the trials.

    Returns:
        the search's record, which is also written to `search.json`, and the search's folder.

    Raises:
        UserError: the search cannot be run, or its ε does not allow a first trial.
    """
    print_line = print if show != "nothing" else (lambda line: None)
    config = configured(options.first_overrides())
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
        config = configured(options.first_overrides())
        data = load_data(config)
        print_line(
            f"{override}: this fraction of the owners is held out of training, and the best trial "
            "is chosen on them; no ε protects them"
        )
    metric = find_metric(options, config, data)
    _check_listed_values(options, data)
    folder = config.results / FOLDER / f"{config.recipe}-{options.name}"
    path = folder / "search.json"
    journal = Journal(path, options, config, data, metric, _read_trials(path, data.digest))
    try:
        _run_trials(journal, show, print_line)
    except BaseException:  # record the total ε, however the search ended
        with suppress(UserError):  # which would hide why it ended
            if journal.list_trials():  # a search that was refused leaves no record
                journal.write()
        raise
    return journal.write(), folder


def _check_listed_values(options: SearchOptions, data: Splits) -> None:
    """Raise an error if a value of a searched key is invalid, before any trial spends ε.

    Listed values and the ends of intervals are checked. Configurations, models and noise are
    computed only for the errors that this raises.

    Raises:
        UserError: such a value is invalid, no noise fits into the search's ε with it, or the trials
            have no common ε.
    """
    seen_models, seen_mechanisms, adjacencies = set[str](), set[str](), set[str]()
    for overrides in options.list_overrides_to_check():
        config = configured(overrides)
        model_key = repr(
            (config.model, config.replace_batchnorm, config.complex_as, config.representation)
        )
        if model_key not in seen_models:
            seen_models.add(model_key)
            ModelSetup.of(config, _data_of(options, config, data), torch.device("cpu"))
        mechanism_key = repr((config.algorithm, config.trainer))
        if options.epsilon is not None and mechanism_key not in seen_mechanisms:
            seen_mechanisms.add(mechanism_key)
            trial_data = _data_of(options, config, data)
            noise = calibrate_noise(options, overrides, trial_data, [], options.trials)
            trial = plan_steps(configured([*overrides, *noise]), trial_data)
            adjacencies.add(trial.sampling.adjacency)
    if len(adjacencies) > 1:
        raise UserError(
            f"--epsilon {options.epsilon:g}: trials with Poisson and with fixed-size batches "
            "protect different neighbours, so they have no common ε. Give trainer one value."
        )


def _data_of(options: SearchOptions, config: Run, data: Splits) -> Splits:
    """Return the data of a trial, whose representation may differ from that of `data`."""
    varies_data = any(key.lstrip("+").startswith("representation") for key in options.searched)
    return load_data(config) if varies_data else data


@dataclass
class Journal:
    """The record of a search, which lists each trial before it starts.

    Attributes:
        path: file of the record.
        options: the search.
        config: the configuration of a possible trial. Only what all trials share is read from it.
        data: the data set.
        metric: the metric by which the best trial is chosen.
        saved_trials: the trials in the record that an earlier process wrote, by number.
        trials: the trials that this process has come to, in order.
        ended_by: why no further trial starts; "" as long as one may.
    """

    path: Path
    options: SearchOptions
    config: Run
    data: Splits
    metric: Metric
    saved_trials: Mapping[int, Document]
    trials: list[Document] = field(default_factory=list)
    ended_by: str = ""

    def list_trials(self) -> list[Document]:
        """Return the trials so far, and the saved ones that this process has not come to yet.

        The saved ones stay listed, so that their runs still belong to the search if this process is
        killed before it comes to them.
        """
        saved_numbers = range(len(self.trials) + 1, self.options.trials + 1)
        not_reached = [self.saved_trials[n] for n in saved_numbers if n in self.saved_trials]
        return [*self.trials, *not_reached]

    def write(self) -> Document:
        """Write the record, with the total ε so far, and return it."""
        trials = self.list_trials()
        record = make_record(self.options, self.config, self.data, self.metric, trials)
        record["ended_by"] = self.ended_by
        records.write(self.path, record)
        return record


def _run_trials(journal: Journal, show: Shown, print_line: Callable[[str], None]) -> None:
    """Run the trials of a search, each with the noise that keeps the search within its ε.

    A trial that failed is not repeated: with secure noise, it would spend its ε again. One whose
    values do not fit together fails before it spends any.

    Raises:
        UserError: a trial cannot be run, or the search's ε does not allow a first one.
    """
    options, config = journal.options, journal.config
    metric = journal.metric.name
    study = create_study(options, config, journal.metric)
    earlier_runs = find_earlier_runs(options, config, journal.data, journal.saved_trials)
    has_described_earlier_runs = False
    for number in range(1, options.trials + 1):
        proposal = study.ask(options.searched)
        overrides = options.overrides_of(proposal.params)
        trial: Document = {"trial": number, "values": proposal.params, "noise": [], "run": ""}
        saved_trial = journal.saved_trials.get(number, {})
        is_saved = saved_trial.get("values") == proposal.params
        if is_saved:
            trial = dict(saved_trial)
        if trial.get("state") not in ("failed", "done"):
            try:
                _require_fit(options, overrides, journal.data)
            except UserError as error:
                trial |= {"state": "failed", "score": None, "reason": str(error)}
        if trial.get("state") == "failed":
            journal.trials.append(trial)
            print_line(_describe_trial(trial, options.trials, metric))
            study.tell(proposal, None, TrialState.FAIL)
            continue
        data = _data_of(options, configured(overrides), journal.data)
        try:
            if is_saved:  # it keeps its noise, even if other runs have spent more since
                noise = trial["noise"]
            else:  # a new trial, or one that another version of Optuna proposes otherwise
                noise = _choose_noise(journal, overrides, data, earlier_runs)
                if earlier_runs and not has_described_earlier_runs:
                    print_line(_describe_earlier_runs(options, config, earlier_runs))
                    has_described_earlier_runs = True
            overrides = [*overrides, *noise]
            trial = {"trial": number, "values": proposal.params, "noise": noise}
            _begin_trial(journal, trial, configured(overrides), data)
        except UserError as error:
            if not journal.trials:
                raise
            journal.ended_by = str(error)
            print_line(journal.ended_by)
            return
        trial |= _run_trial(overrides, number, metric, show)  # the journal lists the same dict
        print_line(_describe_trial(trial, options.trials, metric))
        if "warning" in trial:
            print_line(f"trial {number}: {trial['warning']}")
        score = trial["score"]
        study.tell(proposal, score, TrialState.FAIL if score is None else TrialState.COMPLETE)


def _require_fit(options: SearchOptions, overrides: Sequence[str], data: Splits) -> None:
    """Reject values that do not fit together, although each is valid beside the first ones.

    Raises:
        UserError: no run can begin with these values.
    """
    if options.epsilon is not None:  # the noise is chosen later
        overrides = [*overrides, *NO_EPSILON, "algorithm.noise_multiplier=1.0"]
    config = configured(overrides)
    Setup.of(config, _data_of(options, config, data), torch.device("cpu")).check_model()


def _begin_trial(journal: Journal, trial: Document, config: Run, data: Splits) -> None:
    """State the run of a trial in it, list it, and reserve what it may spend.

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
        _require_within(options, config, data, this_run, trial["trial"])
        list_trial()

    if options.epsilon is None or (home / "record.json").exists():  # its ε is spent already
        list_trial()
        return
    setup = Setup.of(config, data, torch.device("cpu"))
    steps = setup.plan.steps
    reserve(
        config,
        data,
        setup.mechanism,
        steps,
        home,
        run=trial["run"],
        begin=check_and_list,
        keep_plan=True,  # an interrupted trial's; the run knows what it takes again
    )


def _read_trials(path: Path, data_digest: str) -> dict[int, Document]:
    """Return the trials in a search's record by number, empty for a new search.

    Raises:
        UserError: the record is damaged, or of a search on other data.
    """
    if not path.is_file():
        return {}
    advice = "Delete it, and search again: the runs of its trials are kept, and still count."
    try:
        record = read_json(path)
    except UserError as error:
        raise UserError(f"{error} {advice}") from None
    keys = [*misfits(record, {"trials": [_TRIAL], "data": {"digest": str}})]
    if keys:
        raise UserError(f"{path}: is damaged at {keys[0]}. {advice}")
    if record["data"]["digest"] != data_digest:
        raise UserError(
            f"{path}: is of a search on other data, which have changed since. Search on these in "
            "another results folder: paths.results=FOLDER."
        )
    return {trial["trial"]: trial for trial in record["trials"]}


def find_earlier_runs(
    options: SearchOptions, config: Run, data: Splits, saved_trials: Mapping[int, Document]
) -> list[Spending]:
    """Return the spendings of the recipe's runs on this data set that are not trials of the search.

    Without `options.epsilon`, the search does not depend on them, and the list is empty.

    Args:
        options: the search.
        config: the configuration of a possible trial. Only what all trials share is read from it.
        data: the data set.
        saved_trials: the trials in the search's record, by number.
    """
    if options.epsilon is None:
        return []
    trial_homes = {
        records.folder(config.results, config.recipe, trial["run"])
        for trial in saved_trials.values()
    }
    spendings = read_spendings_of_recipe(config, data)
    return [spending for spending in spendings if spending.home not in trial_homes]


def _require_budget_left(
    options: SearchOptions, config: Run, earlier_runs: Sequence[Spending]
) -> None:
    """Reject a search if the ε of earlier runs is unknown, or leaves nothing for the search."""
    assert options.epsilon is not None
    option = f"--epsilon {options.epsilon:g}"
    runs = _name_runs(config, earlier_runs)
    try:
        epsilon = _total_epsilon(config, earlier_runs)
    except ValueError as error:
        raise UserError(
            f"{option}: the ε of {runs} is unknown: {error}. Choose another paths.results for this "
            "search, and add its ε to theirs."
        ) from None
    if epsilon > MAX_SPENT * options.epsilon:
        raise UserError(
            f"{option}: the tight ε of {runs} is {show_epsilon(epsilon)} already, so nothing "
            "useful is left for a search. Give a larger --epsilon, which includes theirs."
        )


def _total_epsilon(config: Run, runs: Sequence[Spending]) -> float:
    """Return the tight ε of runs together.

    Raises:
        ValueError: the runs protect different units, so that they have no common ε.
    """
    return compose_epsilon(list_spent_steps(runs, config.privacy.by_owner), config.privacy.delta)


def _name_runs(config: Run, runs: Sequence[Spending]) -> str:
    noun = "run" if len(runs) == 1 else "runs"
    return f"the {len(runs)} {noun} of {config.recipe} on these data in {config.results}"


def _describe_earlier_runs(
    options: SearchOptions, config: Run, earlier_runs: Sequence[Spending]
) -> str:
    epsilon = show_epsilon(_total_epsilon(config, earlier_runs))
    return (
        f"--epsilon {options.epsilon:g}: the tight ε of {_name_runs(config, earlier_runs)} is "
        f"{epsilon}; the {options.trials} trials share the rest, so that all runs together stay "
        f"within {options.epsilon:g}"
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


def _describe_trial(trial: Document, num_trials: int, metric: str) -> str:
    """Return a finished trial as one line for the terminal."""
    values = " ".join(f"{key}={_short(value)}" for key, value in trial["values"].items())
    if trial["state"] == "failed":
        result = trial.get("reason", "diverged")  # earlier versions saved no reason
    elif trial["score"] is None:
        result = f"validation {metric} is not finite"
    else:
        result = f"validation {metric} {trial['score']:.4f}"
    return f"trial {trial['trial']} of {num_trials}: {values}: {result}"


def hold_out(options: SearchOptions, override: str) -> SearchOptions:
    """Return a search with the override that holds out validation examples.

    Raises:
        UserError: the search sets this key already.
    """
    for fixed in options.fixed:
        key, _ = split_word(fixed)
        if key == validation.KEY:
            raise UserError(
                f"{fixed}: a search chooses the best trial on validation examples, so the share "
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


def direction(metric: Metric) -> Literal["minimize", "maximize"]:
    """Return the direction of a metric in Optuna's terms."""
    return "minimize" if metric.less_is_better else "maximize"


def _run_trial(
    overrides: list[str],
    number: int,
    metric: str,
    show: Shown,
) -> Document:
    """Run a trial, and return the outcome that the record states.

    It is state, score, test metric, ε and, if there is one, warning. If the run diverged, or was
    killed and has no ε left for a first step, it is state, score and reason.
    """
    try:
        record = carry_out(compose(overrides), overrides, show=show).record
    except DivergedError:
        return {"state": "failed", "score": None, "reason": "diverged"}
    except UntrainedError:
        return {"state": "failed", "score": None, "reason": "no ε left for a first step"}
    except UserError as error:
        raise UserError(f"trial {number}: {error}") from None
    score = record.validation.get(metric, math.nan)
    return {
        "state": "done",
        "score": score if math.isfinite(score) else None,
        "test": record.metrics.get(metric),
        "epsilon_tight": record.privacy.epsilon_tight,
        **({"warning": record.warning} if record.warning else {}),
    }


def plan_steps(config: Run, data: Splits) -> SpentSteps:
    """Return those steps of a whole run that may draw one given example.

    With `privacy.unit=patient`, return those that may draw one given owner.
    """
    setup = Setup.of(config, data, torch.device("cpu"))
    return SpentSteps(setup.mechanism.z, *_steps_of_one(setup.plan.sampling, setup.plan.steps))


def _steps_of_one(sampling: Sampling, steps: int) -> tuple[Sampling, int]:
    """Return sampling and number of those steps that may draw one given example.

    With cyclic sampling (`band_mf`), they are one step of each cycle; otherwise, they are all.
    """
    return sampling.of_one, sampling.steps_of_one(steps)


def _choose_noise(
    journal: Journal,
    overrides: Sequence[str],
    data: Splits,
    earlier_runs: Sequence[Spending],
) -> list[str]:
    """Return the overrides that calibrate a new trial's noise; see `calibrate_noise`.

    Trials with the same sampling and number of steps have the same noise, which is calibrated for
    all trials of the search together. If an earlier one differs, this trial and those after it
    share what the trials before have left.
    """
    options, config = journal.options, journal.config
    if options.epsilon is None:
        return []
    if earlier_runs:
        _require_budget_left(options, config, earlier_runs)
    noise = calibrate_noise(options, overrides, data, earlier_runs, options.trials)
    own = plan_steps(configured([*overrides, *noise]), data)
    homes = {
        records.folder(config.results, config.recipe, trial["run"])
        for trial in journal.list_trials()
    }
    spendings = read_spendings_of_recipe(config, journal.data)
    trials_before = [spending for spending in spendings if spending.home in homes]
    if all(
        _steps_of_one(spending.spent.sampling, spending.spent.steps) == (own.sampling, own.steps)
        for spending in trials_before
    ):
        return noise
    num_left = options.trials - len(journal.trials)
    return calibrate_noise(options, overrides, data, [*earlier_runs, *trials_before], num_left)


def calibrate_noise(
    options: SearchOptions,
    overrides: Sequence[str],
    data: Splits,
    earlier_runs: Sequence[Spending],
    num_trials: int,
) -> list[str]:
    """Return the overrides that calibrate a trial's noise to the search's ε.

    Formal guarantees: the earlier runs and `num_trials` trials like this one together have a tight
    ε of at most `options.epsilon`. A trial that has to repeat steps after a kill is stopped by its
    `max_epsilon`.

    Args:
        options: the search, with an ε.
        overrides: the overrides of the trial.
        data: the data set.
        earlier_runs: the runs before.
        num_trials: the number of trials that share what the earlier runs leave.

    Raises:
        UserError: the algorithm has no noise, or no noise keeps the search within its ε.
    """
    assert options.epsilon is not None
    without_epsilon = [*overrides, *NO_EPSILON]
    config = configured(without_epsilon)
    if "noise_multiplier" not in config.algorithm.options:
        raise UserError(
            f"--epsilon with algorithm={config.algorithm.name}: this algorithm adds no noise, so "
            "a search cannot stay within an ε; choose a private algorithm, or remove --epsilon."
        )
    delta = config.privacy.delta
    # z is proportional to the noise multiplier; steps and sampling do not depend on it. So
    # `calibrate_beside` scales the z of a trial with multiplier 1.
    at_multiplier_1 = configured([*without_epsilon, "algorithm.noise_multiplier=1.0"])
    steps_at_1 = plan_steps(at_multiplier_1, data)
    try:
        earlier_steps = list_spent_steps(earlier_runs, config.privacy.by_owner)
        multiplier = calibrate_beside(options.epsilon, earlier_steps, steps_at_1, num_trials, delta)
    except ValueError as error:
        raise UserError(f"--epsilon {options.epsilon:g}: {error}.") from None
    noise = f"algorithm.noise_multiplier={multiplier!r}"
    calibrated = plan_steps(configured([*without_epsilon, noise]), data)
    mechanism = Mechanism.of_z(calibrated.z, calibrated.sampling)
    trial_epsilon = tight_epsilon(mechanism, calibrated.steps, delta)
    return [*NO_TARGET, noise, f"privacy.max_epsilon={trial_epsilon * SLACK!r}"]


def _require_within(
    options: SearchOptions,
    config: Run,
    data: Splits,
    trial: Spending,
    number: int,
) -> None:
    """Reject a trial that would exceed the search's ε.

    Args:
        options: the search, with an ε.
        config: the trial's configuration.
        data: the data set.
        trial: what the trial may spend.
        number: the trial's number.

    Raises:
        UserError: the trial would exceed the search's ε, or no ε of all runs together is known.
    """
    assert options.epsilon is not None
    spendings = read_spendings_of_recipe(config, data)
    other_runs = [spending for spending in spendings if spending.home != trial.home]
    delta = config.privacy.delta
    runs = _name_runs(config, other_runs)
    try:
        spent = list_spent_steps([*other_runs, trial], trial.by_owner)
        epsilon_before = compose_epsilon(spent[:-1], delta)  # the last entry is the trial's
        epsilon_after = compose_epsilon(spent, delta)
    except ValueError as error:
        raise UserError(
            f"--epsilon {options.epsilon:g}: the ε of trial {number} and {runs} together is "
            f"unknown: {error}."
        ) from None
    if epsilon_after > options.epsilon:
        raise UserError(
            f"--epsilon {options.epsilon:g}: the tight ε of {runs} is "
            f"{show_epsilon(epsilon_before)}, and with trial {number} it would be "
            f"{show_epsilon(epsilon_after)}, so the search ends before this trial."
        )


def make_record(
    options: SearchOptions,
    config: Run,
    data: Splits,
    metric: Metric,
    trials: list[Document],
) -> Document:
    """Return a search's record: its options, all trials, the best trial and the total ε.

    The total ε is composed anew, from all runs in the results folder.
    """
    spendings = read_spendings_of_recipe(config, data)
    delta = config.privacy.delta
    epsilon_of_owner = None
    owners_have_several_shares = any(spending.shares_per_owner > 1 for spending in spendings)
    if owners_have_several_shares:
        epsilon_of_owner = joint_epsilon(spendings, by_owner=True, delta=delta)
    finished = [trial for trial in trials if trial["state"] != "open"]
    best = _find_best(trials, metric)
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
        "trials": trials,
        "best": None if best is None else best["trial"],
        "privacy": {
            "delta": delta,
            "epsilon_asked": options.epsilon,
            "runs": len(spendings),
            "epsilon_of": epsilon_of(config, data.unit),
            # of what the runs protect: an example or an owner
            "epsilon_all": joint_epsilon(spendings, by_owner=False, delta=delta),
            "epsilon_all_unit": epsilon_of_owner,
            "unit": data.unit,
        },
    }


def _find_best(trials: Sequence[Document], metric: Metric) -> Document | None:
    """Return the trial with the best score, the first if there are several; None without scores."""
    best = None
    for trial in trials:
        if trial["score"] is None:
            continue
        if best is None or metric.gain(trial["score"], best["score"]) > 0:
            best = trial
    return best


def sheet(record: Document) -> Sheet:
    """Return a search's record as a sheet: trials from best to worst, and notes on ε."""
    metric = record["metric"]
    sort_sign = 1 if record["direction"] == "minimize" else -1  # the best score comes first

    def rank(trial: Document) -> tuple[bool, float, int]:
        """Return the sort key of a trial; trials without a score come last."""
        if trial["score"] is None:
            return True, 0.0, trial["trial"]
        return False, sort_sign * trial["score"], trial["trial"]

    rows = []
    for trial in sorted(record["trials"], key=rank):
        rows.append(
            {
                "trial": trial["trial"],
                **trial["values"],
                "state": trial["state"],
                f"validation_{metric}": trial["score"],
                f"test_{metric}": trial.get("test"),
                "epsilon_tight": trial.get("epsilon_tight"),
                "run": trial.get("run"),
            }
        )
    printed_rows = []
    for row in rows[:MAX_SHOWN]:
        cells = {key: _short(value)[:16] for key, value in row.items()}
        cells["epsilon_tight"] = show_epsilon(row["epsilon_tight"])
        printed_rows.append(list(cells.values()))
    notes = _notes(record)
    if len(rows) > MAX_SHOWN:
        notes.insert(0, f"{len(rows) - MAX_SHOWN} more trials: --format csv.")
    title = f"Search of {record['recipe']}: {len(rows)} trials by {record['sampler']}"
    keys = list(rows[0]) if rows else []
    important_keys = ("trial", f"validation_{metric}", "run", "epsilon_tight", *record["searched"])
    return Sheet(
        title,
        [_heading(key) for key in keys],
        printed_rows,
        notes,
        numbers=rows,
        important=[_heading(key) for key in important_keys],
    )


def _heading(key: str) -> str:
    return key.replace("_", " ")


def _notes(record: Document) -> list[str]:
    """Return sentences on the total ε, the validation examples and the best trial."""
    privacy = record["privacy"]
    total = "unknown: its runs differ in sampling, unit or owners"
    if privacy["epsilon_all"] is not None:
        total = f"{show_epsilon(privacy['epsilon_all'])} for {name_one(privacy['epsilon_of'])}"
    if privacy["epsilon_all_unit"] is not None:
        total += f", {show_epsilon(privacy['epsilon_all_unit'])} for {name_one(privacy['unit'])}"
    notes = [record["ended_by"]] if record["ended_by"] else []
    return [
        *notes,
        f"ε of the whole search: {total} (δ {privacy['delta']:g}; tight, composed over "
        f"the {privacy['runs']} runs of {record['recipe']} on these data in the results folder). "
        "It covers every choice made by looking at the training examples. The ε of one trial "
        "covers less.",
        f"Chosen on {record['data']['validation']:,} validation examples, which no ε protects.",
        *_commands(record),
    ]


def _commands(record: Document) -> list[str]:
    """Return the best trial, and the commands that export it and repeat it with other seeds."""
    if record["best"] is None:
        return []
    best = next(trial for trial in record["trials"] if trial["trial"] == record["best"])
    name = f"{record['recipe']}/{best['run'][:8]}"
    metric = record["metric"].replace("_", " ")
    export = ["zdp-bench", "export", name, "--to", f"{record['recipe']}_best"]
    fixed = [record["recipe_as_typed"]]
    for override in record["fixed"]:
        key, _ = split_word(override)
        if key == "paths.results":
            export += ["--results", str(parse_words([override])[0].value())]
        if key not in ("seed", "recipe"):
            fixed.append(override)
    values = [f"{key}={value}" for key, value in best["values"].items()]
    repeat = ["zdp-bench", "run", "-m", *fixed, *values, *best["noise"], "seed=1,2,3"]
    return [
        f"Best: trial {best['trial']}, run {name}, validation {metric} {best['score']:.4f}.",
        f"Export it: {shlex.join(export)}",
        f"Run it with other seeds, which spend ε beyond the search's: {shlex.join(repeat)}",
    ]


def _short(value: Any) -> str:
    """Return a value as a short text for a table's cell."""
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
