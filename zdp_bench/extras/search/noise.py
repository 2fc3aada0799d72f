"""What a trial of a search spends, and the noise that keeps the whole search within one ε."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import torch

from zdp_bench.config import configured
from zdp_bench.config.schema import Run
from zdp_bench.data import Splits
from zdp_bench.errors import UserError
from zdp_bench.extras.search.plan import Search
from zdp_bench.privacy.accounting import tight_epsilon
from zdp_bench.privacy.calibration import calibrate_mechanism, solve
from zdp_bench.privacy.composition import Spent, selected_epsilon, together
from zdp_bench.privacy.mechanism import Mechanism
from zdp_bench.privacy.statement import write_epsilon
from zdp_bench.training.setup import Setup

SLACK = 1 + 1e-9  # a cluster's FFT may round an ε to the other side


def spend(config: Run, data: Splits) -> Spent:
    """Return what a run will spend if it takes all its steps.

    Raises:
        UserError: see `Setup.of`.
    """
    setup = Setup.of(config, data, torch.device("cpu"))
    steps = setup.plan.range_test_steps + setup.plan.steps
    return Spent(setup.mechanism.z, setup.plan.sampling, steps)


def noise_words(search: Search, words: Sequence[str], data: Splits) -> list[str]:
    """Return the overrides that give a trial its share of the search's ε; [] without one.

    Formal guarantees: as many trials as this one as are planned have together a tight ε of at most
    `search.epsilon`, or the best of them alone, where their number is random. `max_epsilon` ends
    a trial that has to repeat steps after a kill.

    Raises:
        UserError: no noise reaches the ε.
    """
    if search.epsilon is None:
        return []
    off = [f"privacy.{key}=null" for key in ("target_epsilon", "claimed_epsilon", "max_epsilon")]
    first = configured([*words, *off])
    if "noise_multiplier" not in first.algorithm.options:
        raise UserError(
            f"--epsilon with algorithm={first.algorithm.name}: it has no noise that could keep the "
            "search within an ε; name a private algorithm, or leave --epsilon out."
        )
    delta = first.privacy.delta
    unit = spend(configured([*words, *off, "algorithm.noise_multiplier=1.0"]), data)
    try:
        found = _calibrate(search, unit, delta)
    except ValueError as error:
        raise UserError(f"--epsilon {search.epsilon:g}: {error}.") from None
    noise = f"algorithm.noise_multiplier={found!r}"
    own = spend(configured([*words, *off, noise]), data)
    most = tight_epsilon(Mechanism.of_z(own.z, own.sampling), own.steps, delta) * SLACK
    return [*off[:2], noise, f"privacy.max_epsilon={most!r}"]


def _calibrate(search: Search, unit: Spent, delta: float) -> float:
    """Return the noise multiplier for trials that spend as `unit` does at a multiplier of 1."""
    epsilon, mean, law = search.epsilon, search.trials, search.law
    assert epsilon is not None
    mechanism = Mechanism.of_z(unit.z, unit.sampling)
    if law is None:
        return calibrate_mechanism(epsilon, mechanism, unit.steps * mean, delta)
    question = {
        "accountant": "selection",
        "sampling": asdict(unit.sampling),
        "steps": unit.steps,
        "law": law,
        "mean": mean,
        "delta": delta,
    }

    def epsilon_of(z: float) -> float:
        return selected_epsilon(z, unit.sampling, unit.steps, law, mean, delta)

    return solve(epsilon, epsilon_of, question) / unit.z * (1 + 1e-9)


def require_within(search: Search, spent: Sequence[Spent], delta: float) -> None:
    """Refuse a trial that would take the search past its ε, or out of what was promised of it.

    Args:
        spent: of every trial so far, the new one last.

    Raises:
        UserError: says which key of the search does it.
    """
    if search.law and any(not _as_private(one, spent[0]) for one in spent):
        raise UserError(
            f"--number {search.law}: trials differ in noise, sampling or steps, and the ε of the "
            "best of a random number is known for one mechanism only. Search keys that change "
            "none of these, such as optimizer.lr or algorithm.max_grad_norm, or leave --number out."
        )
    if search.epsilon is None or search.law:
        return
    total = together(spent, delta)
    if total > search.epsilon:
        raise UserError(
            f"--epsilon {search.epsilon:g}: with trial {len(spent)} the search would have a "
            f"tight ε of {write_epsilon(total)}, since its trials differ in sampling or steps. It "
            "ends here; search keys that change neither, or ask for fewer trials."
        )


def _as_private(one: Spent, other: Spent) -> bool:
    """True if two runs are equally private, but for rounding."""
    same = (one.sampling, one.steps) == (other.sampling, other.steps)
    return same and abs(one.z - other.z) <= 1e-9 * other.z
