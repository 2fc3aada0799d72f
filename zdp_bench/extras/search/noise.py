"""What a trial of a search with an ε may spend: its noise, and the last check before it starts.

A new trial gets the noise with which all trials of the search together stay within the search's ε
(`choose_noise`). What other processes spent in the meantime may make the trial exceed it all the
same, so it is checked once more, while no other process can begin a run (`require_within`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from zdp_bench.config import configured
from zdp_bench.config.constraints import EPSILONS
from zdp_bench.config.schema import Run
from zdp_bench.data import Splits
from zdp_bench.errors import UserError
from zdp_bench.extras.search.journal import Journal
from zdp_bench.extras.search.space import SearchOptions
from zdp_bench.privacy.accounting import tight_epsilon
from zdp_bench.privacy.calibration import calibrate_beside
from zdp_bench.privacy.composition import (
    ROUNDING,
    Spending,
    SpentSteps,
    compose_epsilon,
    list_spent_steps,
)
from zdp_bench.privacy.mechanism import Mechanism
from zdp_bench.privacy.statement import show_epsilon
from zdp_bench.records import is_deleted
from zdp_bench.training.setup import Setup
from zdp_bench.training.spending import read_spendings_of_recipe

MAX_SPENT = 0.99  # fraction of a search's ε that earlier runs may have spent
# Factor on a trial's `max_epsilon`, because another machine's FFT may round ε up.
SLACK = 1 + 1e-9
NO_TARGET = tuple(f"{key}=null" for key in EPSILONS)
NO_EPSILON = (*NO_TARGET, "privacy.max_epsilon=null")
AT_MULTIPLIER_1 = (*NO_EPSILON, "algorithm.noise_multiplier=1.0")


def describe_earlier_runs(
    options: SearchOptions, config: Run, earlier_runs: Sequence[Spending]
) -> str:
    """Return the line that states what earlier runs leave for the trials."""
    epsilon = show_epsilon(_total_epsilon(config, earlier_runs))
    return (
        f"--epsilon {options.epsilon:g}: the tight ε of {_name_runs(config, earlier_runs)} is "
        f"{epsilon}; the {options.trials} trials share the rest, so that all runs together stay "
        f"within {options.epsilon:g}"
    )


def choose_noise(
    journal: Journal,
    overrides: Sequence[str],
    data: Splits,
    earlier_runs: Sequence[Spending],
    folders_of_other_trials: Collection[Path],
) -> list[str]:
    """Return the overrides that calibrate a new trial's noise; none for a search without an ε.

    Trials with the same sampling and number of steps have the same noise, which is calibrated for
    all trials of the search together. If another trial differs, this one and those after it share
    what the others leave. It may differ in sampling, in steps, or in noise that was chosen before
    some of the earlier runs had spent anything. Or it may have spent its ε twice: its run was
    deleted and carried out again.

    Args:
        journal: the search's journal.
        overrides: the overrides of the trial.
        data: the trial's data set.
        earlier_runs: the runs that are not trials of the search.
        folders_of_other_trials: the folders of all other trials, also of saved ones that this
            process has not come to yet.

    Raises:
        UserError: see `calibrate_noise`; or the earlier runs leave nothing for the search.
    """
    options, config = journal.options, journal.config
    if options.epsilon is None:
        return []
    if earlier_runs:
        _require_budget_left(options, config, earlier_runs)
    noise_overrides = calibrate_noise(
        options, overrides, data, earlier_runs, num_trials=options.trials
    )
    planned = _plan_steps_of_one_unit(configured([*overrides, *noise_overrides]), data)
    runs = read_spendings_of_recipe(config, journal.data)
    runs_of_trials = [run for run in runs if run.home in folders_of_other_trials]
    num_others = sum(not is_deleted(folder) for folder in folders_of_other_trials)
    each_spent_once = len(runs_of_trials) <= num_others
    if each_spent_once and all(_spends_the_same(run.spent, planned) for run in runs_of_trials):
        return noise_overrides
    runs_before = [*earlier_runs, *runs_of_trials]
    num_left = options.trials - len(journal.trials)
    return calibrate_noise(options, overrides, data, runs_before, num_trials=num_left)


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
        data: the trial's data set.
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
    # z, the effective noise multiplier of all blocks together, is proportional to
    # `algorithm.noise_multiplier`. Steps and sampling do not depend on it. So `calibrate_beside`
    # scales the z of a trial with multiplier 1.
    steps_at_1 = _plan_steps_of_one_unit(configured([*overrides, *AT_MULTIPLIER_1]), data)
    try:
        earlier_steps = list_spent_steps(earlier_runs, config.privacy.by_owner)
        multiplier = calibrate_beside(options.epsilon, earlier_steps, steps_at_1, num_trials, delta)
    except ValueError as error:
        raise UserError(f"--epsilon {options.epsilon:g}: {error}.") from None
    noise_override = f"algorithm.noise_multiplier={multiplier!r}"
    calibrated = _plan_steps_of_one_unit(configured([*without_epsilon, noise_override]), data)
    mechanism = Mechanism.of_z(calibrated.z, calibrated.sampling)
    trial_epsilon = tight_epsilon(mechanism, calibrated.steps, delta)
    return [*NO_TARGET, noise_override, f"privacy.max_epsilon={trial_epsilon * SLACK!r}"]


def _plan_steps_of_one_unit(config: Run, data: Splits) -> SpentSteps:
    """Return those steps of a whole run that count for one given unit; see `_steps_of_one`."""
    setup = Setup.of(config, data, torch.device("cpu"))
    return _steps_of_one(SpentSteps(setup.mechanism.z, setup.plan.sampling, setup.plan.steps))


def _steps_of_one(spent: SpentSteps) -> SpentSteps:
    """Return those steps that count for one given example: those that may draw it.

    With cyclic sampling (`band_mf`), they are one step of each cycle; otherwise, they are all. With
    `privacy.unit=patient`, they are those that may draw one given owner.
    """
    sampling = spent.sampling
    return replace(spent, sampling=sampling.of_one, steps=sampling.steps_of_one(spent.steps))


def _spends_the_same(spent: SpentSteps, planned: SpentSteps) -> bool:
    """Return True if a run has spent what a planned trial will, up to rounding of z."""
    run = _steps_of_one(spent)
    has_same_steps = replace(run, z=planned.z) == planned
    return has_same_steps and math.isclose(run.z, planned.z, rel_tol=ROUNDING)


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


def require_within(
    options: SearchOptions,
    config: Run,
    data: Splits,
    this_run: Spending,
    number: int,
) -> None:
    """Reject a trial that would exceed the search's ε.

    Args:
        options: the search, with an ε.
        config: the trial's configuration.
        data: the data set.
        this_run: what the trial's run may spend.
        number: the trial's number.

    Raises:
        UserError: the trial would exceed the search's ε, or no ε of all runs together is known.
    """
    assert options.epsilon is not None
    runs = read_spendings_of_recipe(config, data)
    other_runs = [run for run in runs if run.home != this_run.home]
    delta = config.privacy.delta
    name_of_others = _name_runs(config, other_runs)
    try:
        spent = list_spent_steps([*other_runs, this_run], this_run.by_owner)
        epsilon_before = compose_epsilon(spent[:-1], delta)  # the last entry is this run's
        epsilon_after = compose_epsilon(spent, delta)
    except ValueError as error:
        raise UserError(
            f"--epsilon {options.epsilon:g}: the ε of trial {number} and {name_of_others} together "
            f"is unknown: {error}."
        ) from None
    if epsilon_after > options.epsilon:
        raise UserError(
            f"--epsilon {options.epsilon:g}: the tight ε of {name_of_others} is "
            f"{show_epsilon(epsilon_before)}, and with trial {number} it would be "
            f"{show_epsilon(epsilon_after)}, so the search ends before this trial."
        )


def _total_epsilon(config: Run, runs: Sequence[Spending]) -> float:
    """Return the tight ε of runs together.

    Raises:
        ValueError: the runs protect different units, so that they have no common ε.
    """
    return compose_epsilon(list_spent_steps(runs, config.privacy.by_owner), config.privacy.delta)


def _name_runs(config: Run, runs: Sequence[Spending]) -> str:
    """Return words for runs: 'the 2 runs of RECIPE on these data in FOLDER'."""
    noun = "run" if len(runs) == 1 else "runs"
    return f"the {len(runs)} {noun} of {config.recipe} on these data in {config.results}"
