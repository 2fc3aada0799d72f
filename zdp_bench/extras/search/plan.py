"""`Search`, all that was asked of a search, and the name it is kept under."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Literal

from optuna.distributions import IntDistribution, distribution_to_json

from zdp_bench.errors import UserError, require
from zdp_bench.extras.search.space import EPSILONS, Space
from zdp_bench.privacy.composition import Law

SAMPLERS = ("tpe", "random", "grid")
NUMBERS = ("fixed", "poisson", "geometric", "logarithmic")
SEEDS = IntDistribution(0, 2**31 - 1)


@dataclass(frozen=True)
class Search:
    """What was asked of a search.

    Attributes:
        trials: how many; of a random number the mean.
        law: of a random number of trials, which lets the best be published at less ε; None: fixed.
        epsilon: the whole search stays within it, by the noise it gives each trial; None: each
            trial has the noise of its configuration.
        metric: by which the best is chosen; None: the task's headline.
        on_test: choose by the test set where there are no validation examples.
    """

    space: Space
    sampler: Literal["tpe", "random", "grid"]
    trials: int
    law: Law | None = None
    epsilon: float | None = None
    metric: str | None = None
    on_test: bool = False

    @property
    def name(self) -> str:
        """The same for the same search, also if it is to have more trials now.

        With `epsilon` or a random number, how many there are is part of what is promised.
        """
        promised = self.trials if self.law or self.epsilon else None
        asked = [
            self.space.fixed,
            {key: distribution_to_json(values) for key, values in self.space.searched.items()},
            [self.sampler, self.law, self.epsilon, promised, self.metric, self.on_test],
        ]
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:12]


def make_search(
    space: Space,
    sampler: str,
    trials: int | None,
    number: str = "fixed",
    epsilon: float | None = None,
    metric: str | None = None,
    on_test: bool = False,
) -> Search:
    """Return the search that command-line options describe, checked.

    Raises:
        UserError: an option is out of range, or two contradict each other.
    """
    size = len(space.grid()) if sampler == "grid" else None
    if trials is None and size is None:
        raise UserError(
            f"zdp-bench search: --trials N is missing: how many runs --sampler {sampler} makes."
        )
    require(trials is None or trials >= 1, "--trials", trials, "must be 1 or more")
    require(epsilon is None or epsilon > 0, "--epsilon", epsilon, "must be positive")
    asked = min(trials or size, size) if size else trials
    assert asked
    if epsilon is not None:
        _require_free(space)
    if number == "fixed":
        return Search(space, sampler, asked, None, epsilon, metric, on_test)  # type: ignore[arg-type]
    if sampler != "random":
        raise UserError(
            f"--number {number} with --sampler {sampler}: a random number costs less only if no "
            "trial depends on another; add --sampler random, or leave --number out."
        )
    # A trial's own seed: the best must not tell by its seed how many came before it.
    space = Space(space.fixed, {**space.searched, "seed": SEEDS})
    fixed = [word.partition("=")[0] for word in space.fixed]
    if "seed" in fixed:
        raise UserError(
            f"seed with --number {number}: every trial draws a seed of its own, so that nobody can "
            "tell how many there were; leave it out."
        )
    return Search(space, "random", asked, number, epsilon, metric, on_test)  # type: ignore[arg-type]


def _require_free(space: Space) -> None:
    """Refuse words that set the noise, which --epsilon sets.

    Raises:
        UserError: names the first.
    """
    setting = (*EPSILONS, "algorithm.noise_multiplier", "privacy.max_epsilon")
    for word in (*space.fixed, *space.searched):
        key = word.partition("=")[0].lstrip("+")
        if key in setting:
            raise UserError(
                f"{key} with --epsilon: the search gives each trial the noise that keeps all "
                "together within the ε; leave one of them out."
            )
