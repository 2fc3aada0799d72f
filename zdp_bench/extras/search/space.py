"""Read the options of a search, with Hydra's sweep grammar as Optuna's distributions."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any, Literal

from annotated_types import Gt, Interval
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
    distribution_to_json,
)
from pydantic import FiniteFloat

from zdp_bench.config.constraints import EPSILONS
from zdp_bench.config.digests import enters_digest
from zdp_bench.config.types import check_value
from zdp_bench.config.words import parse_words, read_words, split_word
from zdp_bench.errors import UserError

MAX_TRIALS = 100_000  # each is a run with a folder of its own
MAX_CHECKED = 30  # listed values of a key that are checked before the first trial
Trials = Annotated[int, Interval(ge=1, le=MAX_TRIALS)]
Target = Annotated[FiniteFloat, Gt(0)]  # ε of a whole search
# The sections that all trials share, with the reason.
SHARED = {
    "recipe": "a search has one recipe",
    "dataset": "all trials train on one data set, so that their ε can be composed",
    "seed": "the seed is not a hyper-parameter; the best of several seeds is chance",
    "privacy": "all trials protect one unit at one δ; privacy.target_epsilon can be searched",
    "federated": "a search uses one training set",
}


@dataclass(frozen=True)
class SearchOptions:
    """The options of a search.

    Attributes:
        fixed: the overrides that all trials share.
        searched: the keys to search, with their values.
        sampler: how Optuna proposes values.
        trials: the number of trials.
        epsilon: the ε of the whole search, to which each trial's noise is calibrated. If None,
            trials have the noise of their configuration.
        metric: the metric by which the best trial is chosen. If None, the task's headline.
        recipe: the word that names the recipe, as the user typed it. In `fixed`, a recipe's file is
            replaced by its name.
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
        """A name that identifies the search, even if it is continued with more trials or moved.

        The folder of the data is part of it, because it may decide what the data are. With
        `epsilon`, the number of trials determines their noise, so it is part of the identity.
        """
        trials = self.trials if self.epsilon else None
        fixed = []
        for word in self.fixed:
            key, _ = split_word(word)
            if key == "paths.data" or enters_digest(key):
                fixed.append(word)
        searched = {key: distribution_to_json(values) for key, values in self.searched.items()}
        identity = [fixed, searched, [self.sampler, self.epsilon, trials, self.metric]]
        text = json.dumps(identity, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def overrides_of(self, values: dict[str, Any]) -> list[str]:
        """Return the overrides of a trial with these values of the searched keys."""
        overrides = list(self.fixed)
        for key, value in values.items():
            text = value if isinstance(value, str) else repr(value)
            overrides.append(f"{key}={text}")
        return overrides

    def overrides_of_first_values(self) -> list[str]:
        """Return the overrides of the trial with the first value of each searched key."""
        return self.overrides_of(self._first_values())

    def list_overrides_to_check(self) -> Iterator[list[str]]:
        """Yield overrides of trials in which each listed value and end of an interval occurs.

        Of a long list, only the first `MAX_CHECKED` values and the last one occur.
        """
        first_values = self._first_values()
        for key, values in self.searched.items():
            if isinstance(values, CategoricalDistribution):
                checked = dict.fromkeys([*values.choices[:MAX_CHECKED], values.choices[-1]])
            else:
                checked = dict.fromkeys([values.low, values.high])  # type: ignore[attr-defined]
            for value in checked:
                yield self.overrides_of(first_values | {key: value})

    def _first_values(self) -> dict[str, Any]:
        return {key: _first_of(values) for key, values in self.searched.items()}


def read_search(
    overrides: Sequence[str],
    sampler: Literal["tpe", "random", "grid"] | None = None,
    trials: int | None = None,
    epsilon: float | None = None,
    metric: str | None = None,
) -> SearchOptions:
    """Return the search that command-line words and options describe.

    Args:
        overrides: the command-line words.
        sampler: how Optuna proposes values. Default: 'grid' if all searched values are lists and
            `trials` is not given, otherwise 'tpe'.
        trials: the number of trials. A grid has at most one for each combination. Default: the
            size of the grid.
        epsilon: the ε of the whole search; see `SearchOptions`.
        metric: the metric by which the best trial is chosen; see `SearchOptions`.

    Raises:
        UserError: no key has several values, a key cannot be searched, the noise is set twice, or
            the number of trials or ε is missing or out of range.
    """
    check_value("--trials", Trials | None, trials)
    check_value("--epsilon", Target | None, epsilon)
    for override in parse_words(overrides):  # before any file is read
        if override.is_sweep_override():
            _require_searchable(override, _key_of(override).lstrip("+"))
    parsed = read_words(overrides, sweep=True)
    sweeps = [override for override in parsed if override.is_sweep_override()]
    searched = {_key_of(override): _distribution_of(override) for override in sweeps}
    if not searched:
        raise UserError(
            "no key has several values. Give at least one key several values, such as "
            "'optimizer.lr=tag(log,interval(0.01,1))' or algorithm.max_grad_norm=0.5,1,2."
        )
    fixed = tuple(str(word.input_line) for word in parsed if not word.is_sweep_override())
    keys_of_noise = (*EPSILONS, "algorithm.noise_multiplier", "privacy.max_epsilon")
    for word in (*fixed, *searched):
        key, _ = split_word(word)
        if epsilon is not None and key in keys_of_noise:
            raise UserError(
                f"{key} with --epsilon: the search chooses each trial's noise so that all "
                "together stay within ε; remove one of them."
            )
    if sampler is None:
        has_lists = all(isinstance(values, CategoricalDistribution) for values in searched.values())
        sampler = "grid" if has_lists and trials is None else "tpe"
    if sampler == "grid":
        size = len(grid_of(searched))
        trials = size if trials is None else min(trials, size)
    if trials is None:
        raise UserError(f"--trials N is missing: the number of runs for --sampler {sampler}.")
    recipe = next((word for word in overrides if word.startswith("recipe=")), "")
    return SearchOptions(fixed, searched, sampler, trials, epsilon, metric, recipe)


def grid_of(searched: dict[str, BaseDistribution]) -> list[dict[str, Any]]:
    """Return all combinations of the values; the values of the last key change fastest.

    Raises:
        UserError: the values of a key are an interval, or there are too many combinations.
    """
    choices = []
    for key, values in searched.items():
        if not isinstance(values, CategoricalDistribution):
            raise UserError(
                f"--sampler grid: {key} is an interval with infinitely many values; give a "
                "comma list, choice(...) or range(...), or use --sampler tpe."
            )
        choices.append(values.choices)
    size = math.prod(len(values) for values in choices)
    if size > MAX_TRIALS:
        raise UserError(
            f"--sampler grid: the lists have {size:,} combinations, and a search at most "
            f"{MAX_TRIALS:,} trials; give fewer values, or use --sampler random with --trials."
        )
    return [dict(zip(searched, values, strict=True)) for values in product(*choices)]


def _key_of(override: Override) -> str:
    """Return the key of an override as the user typed it."""
    return str(override.input_line).partition("=")[0]


def _require_searchable(override: Override, key: str) -> None:
    """Reject a key that all trials must share, or that does not change results."""
    section = key.partition(".")[0]
    reason = SHARED.get(section)
    if key in EPSILONS:
        reason = None
    elif reason is None and not enters_digest(key):
        reason = "it does not change results"
    if reason:
        raise UserError(f"{override.input_line}: cannot be searched: {reason}. Give it one value.")


def _distribution_of(override: Override) -> BaseDistribution:
    """Return the values of a sweep as a distribution. Listed values stay text, as Hydra has them.

    Raises:
        UserError: the sweep is neither an interval nor a list of values, or it is empty.
    """
    sweep, line = override.value(), override.input_line
    if getattr(sweep, "shuffle", False):
        raise UserError(
            f"{line}: each call would have another order of the values, and so be another search. "
            "Remove shuffle: --sampler random draws the values in random order."
        )
    log = "log" in getattr(sweep, "tags", set())
    if isinstance(sweep, IntervalSweep):
        low, high = sweep.start, sweep.end
        assert low is not None
        assert high is not None
        if not (math.isfinite(low) and math.isfinite(high)):
            raise UserError(f"{line}: an end of the interval is not finite. Give finite numbers.")
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


def _first_of(values: BaseDistribution) -> Any:
    """Return the first value of a list, or the lower end of an interval."""
    return values.choices[0] if hasattr(values, "choices") else values.low  # type: ignore[attr-defined]
