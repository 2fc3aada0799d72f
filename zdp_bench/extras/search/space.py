"""What is asked of a search: Hydra's sweep grammar as distributions, and its options."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
    distribution_to_json,
)

from zdp_bench.config.digests import enters_digest
from zdp_bench.config.words import parse_words, read_words
from zdp_bench.errors import UserError

EPSILONS = ("privacy.target_epsilon", "privacy.claimed_epsilon")
# What all trials share, with the reason.
SHARED = {
    "recipe": "a search is of one recipe",
    "dataset": "all trials train on one data set, or their ε would not add up",
    "seed": "the best of several seeds is luck, and no hyper-parameter",
    "privacy": "all trials protect one unit at one δ; privacy.target_epsilon may be searched",
    "federated": "a search uses one training set",
}


@dataclass(frozen=True)
class Search:
    """What is asked of a search.

    Attributes:
        fixed: the words that every trial shares; `searched` has the keys and values of the others.
        epsilon: the whole search stays within it, by the noise it gives each trial; None: each
            trial has the noise of its configuration.
        metric: by which the best is chosen; None: the task's headline.
        recipe: the word that names the recipe, as it was typed; `fixed` has a file's by its name.
    """

    fixed: tuple[str, ...]
    searched: dict[str, BaseDistribution]
    sampler: Literal["tpe", "random", "grid"]
    trials: int
    epsilon: float | None = None
    metric: str | None = None
    recipe: str = ""

    @property
    def name(self) -> str:
        """The same for the same search, also if it is to have more trials now.

        With `epsilon`, how many there are is part of what is promised.
        """
        promised = self.trials if self.epsilon else None
        searched = {key: distribution_to_json(values) for key, values in self.searched.items()}
        identity = [self.fixed, searched, [self.sampler, self.epsilon, promised, self.metric]]
        text = json.dumps(identity, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def words(self, values: dict[str, Any]) -> list[str]:
        """Return the overrides of a trial."""
        words = list(self.fixed)
        for key, value in values.items():
            text = value if isinstance(value, str) else repr(value)
            words.append(f"{key}={text}")
        return words

    def example(self) -> list[str]:
        """Return the overrides of one trial, to check the keys with."""
        return self.words({key: _first(values) for key, values in self.searched.items()})


def read_search(
    overrides: Sequence[str],
    sampler: Literal["tpe", "random", "grid"] | None = None,
    trials: int | None = None,
    epsilon: float | None = None,
    metric: str | None = None,
) -> Search:
    """Return the search that command-line words and options describe.

    Args:
        sampler: None: the whole grid if the number of trials is not given and there is a grid,
            otherwise tpe.

    Raises:
        UserError: no key has several values, one cannot be searched, the number of trials is
            missing, or the noise is set twice.
    """
    for override in parse_words(overrides):  # before any file is looked for
        if override.is_sweep_override():
            _require_own(override, _key_of(override).lstrip("+"))
    parsed = read_words(overrides, sweep=True)
    sweeps = [override for override in parsed if override.is_sweep_override()]
    searched = {_key_of(override): _values(override) for override in sweeps}
    if not searched:
        raise UserError(
            "no key has several values. Give one several, such as "
            "'optimizer.lr=tag(log,interval(0.01,1))' or algorithm.max_grad_norm=0.5,1,2."
        )
    fixed = tuple(str(word.input_line) for word in parsed if not word.is_sweep_override())
    settings = (*EPSILONS, "algorithm.noise_multiplier", "privacy.max_epsilon")
    for word in (*fixed, *searched):
        key = word.partition("=")[0].lstrip("+")
        if epsilon is not None and key in settings:
            raise UserError(
                f"{key} with --epsilon: the search chooses each trial's noise so that all "
                "together stay within ε; remove one of them."
            )
    if sampler is None:
        is_grid = all(isinstance(one, CategoricalDistribution) for one in searched.values())
        sampler = "grid" if is_grid and trials is None else "tpe"
    if sampler == "grid":
        size = len(grid_of(searched))
        trials = min(trials or size, size)
    if trials is None:
        raise UserError(f"--trials N is missing: how many runs --sampler {sampler} makes.")
    recipe = next((word for word in overrides if word.startswith("recipe=")), "")
    return Search(fixed, searched, sampler, trials, epsilon, metric, recipe)


def grid_of(searched: dict[str, BaseDistribution]) -> list[dict[str, Any]]:
    """Return every combination of the values, the last key changing first."""
    choices = []
    for key, values in searched.items():
        if not isinstance(values, CategoricalDistribution):
            raise UserError(
                f"--sampler grid: {key} is an interval with infinitely many values; give a "
                "comma list, choice(...) or range(...), or take --sampler tpe."
            )
        choices.append(values.choices)
    return [dict(zip(searched, values, strict=True)) for values in product(*choices)]


def _key_of(override: Override) -> str:
    """Return the key as it was typed."""
    return str(override.input_line).partition("=")[0]


def _require_own(override: Override, key: str) -> None:
    """Reject keys that all trials must share."""
    section = key.partition(".")[0]
    reason = SHARED.get(section)
    if key in EPSILONS:
        reason = None
    elif reason is None and not enters_digest(key):
        reason = "it changes no result"
    if reason:
        raise UserError(f"{override.input_line}: cannot be searched: {reason}. Give it one value.")


def _values(override: Override) -> BaseDistribution:
    """Return the values of a sweep. Those of a list stay words, as Hydra writes them."""
    sweep, line = override.value(), override.input_line
    log = "log" in getattr(sweep, "tags", set())
    if isinstance(sweep, IntervalSweep):
        low, high = sweep.start, sweep.end
        assert low is not None
        assert high is not None
        try:
            if isinstance(low, int) and isinstance(high, int):
                return IntDistribution(low, high, log=log)
            return FloatDistribution(float(low), float(high), log=log)
        except ValueError as error:
            raise UserError(f"{line}: {error}") from None
    if log or not isinstance(sweep, ChoiceSweep | RangeSweep):
        raise UserError(f"{line}: give an interval, or list the values.")
    words = list(dict.fromkeys(override.sweep_string_iterator()))
    if not words:
        raise UserError(f"{line}: is an empty range.")
    return CategoricalDistribution(words)


def _first(values: BaseDistribution) -> Any:
    return values.choices[0] if hasattr(values, "choices") else values.low  # type: ignore[attr-defined]
