"""Attack one release: draw many releases of two neighbouring sums, and distinguish them.

The adversary does not know what is wrong with the mechanism. It has three views of a release:

    projection   the projection on the direction with the least noise relative to the shift, given
                 the estimated covariance
    distance     the distances from 0, where an update starts, and from the mean release
    atom         how many numbers are exactly equal to those of other releases, and how many occur
                 twice in the release: finds a step that is left out, a constant, noise that is
                 reused

In each view, some of the releases fit a score, a threshold and the guess on each side of it; the
others test them. The confidence's error probability is divided among the three views, so that the
best of the three bounds holds with that confidence.

The counts of guesses give a bound on ε: by Clopper-Pearson for one release, and by Steinke, Nasr &
Jagielski (2023) for a whole run. A bound with confidence c fails with probability 1 − c at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
from scipy.stats import beta, binom, mode
from torch import Tensor


@dataclass(frozen=True)
class Finding:
    """The result of one attack.

    Attributes:
        case: what was attacked, and how.
        claim: the claim in words.
        epsilon_claimed: the claimed ε at `delta`.
        lower_bound: the lower bound on ε at `delta`.
        delta: δ.
        confidence: the confidence of the lower bound.
        evidence: the counts behind the bound, in words.
    """

    case: str
    claim: str
    epsilon_claimed: float
    lower_bound: float
    delta: float
    confidence: float
    evidence: str

    @property
    def verdict(self) -> Literal["passes", "flagged"]:
        return "flagged" if self.lower_bound > self.epsilon_claimed else "passes"


# ----------------------------------------------------------------------------- bounds from counts


def clopper_pearson(
    hits: np.ndarray,
    trials: int,
    alpha: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Return lower and upper bounds on a probability.

    Each bound fails with probability `alpha` at most.
    """
    hits = np.asarray(hits, dtype=float)
    misses = trials - hits
    with np.errstate(invalid="ignore"):
        lower = beta.ppf(alpha, hits, misses + 1)
        upper = beta.ppf(1 - alpha, hits + 1, misses)
    return np.where(hits > 0, lower, 0.0), np.where(misses > 0, upper, 1.0)


def release_bound(
    hits: np.ndarray,
    false_alarms: np.ndarray,
    trials: int,
    delta: float,
    confidence: float,
) -> np.ndarray:
    """Return the lower bound on ε from P[hit] ≤ e^ε P[false alarm] + δ, which (ε, δ)-DP implies.

    Args:
        hits: the number of trials with the example in which the rule made its guess.
        false_alarms: the number of trials without the example in which it did.
        trials: the number of trials of each neighbour.
        delta: δ.
        confidence: the confidence of the bound.
    """
    alpha = (1 - confidence) / 2
    min_hit_rate, _ = clopper_pearson(hits, trials, alpha)
    _, max_alarm_rate = clopper_pearson(false_alarms, trials, alpha)
    ratio = (min_hit_rate - delta) / max_alarm_rate
    return np.log(np.maximum(ratio, 1.0))


def guess_p_value(
    canaries: int,
    guesses: int,
    right: int,
    epsilon: float,
    delta: float,
) -> float:
    """Return a bound on the probability of `right` or more right guesses under (ε, δ)-DP.

    Steinke et al. 2023, Theorem 5.2: P[V ≥ v] ≤ P[W ≥ v] + 2mδ·max_i P[v > W ≥ v − i]/i, with W ~
    Binomial(r, e^ε/(1 + e^ε)) for r guesses on m canaries.
    """
    if right == 0:
        return 1.0
    correct = binom(guesses, 1 / (1 + math.exp(-epsilon)))
    tail = float(correct.sf(right - 1))
    i = np.arange(1, right + 1)
    between = correct.cdf(right - 1) - correct.cdf(right - i - 1)  # P[v > W ≥ v − i]
    return min(1.0, tail + 2 * canaries * delta * float(np.max(between / i)))


def run_bound(
    canaries: int,
    guesses: int,
    right: int,
    delta: float,
    confidence: float,
) -> float:
    """Return the largest ε under which `right` right guesses have probability ≤ 1 − confidence.

    It is 0 if even ε = 0 is not refuted.
    """

    def is_refuted(epsilon: float) -> bool:
        return guess_p_value(canaries, guesses, right, epsilon, delta) <= 1 - confidence

    if not is_refuted(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while is_refuted(high) and high < 64:
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        if is_refuted(middle):
            low = middle
        else:
            high = middle
    return low


def guess(
    scores: np.ndarray,
    included: np.ndarray,
    delta: float,
    confidence: float,
) -> tuple[float, str]:
    """Guess 'in' for the highest eighth of the scores, and 'out' for the lowest eighth.

    The number of guesses is fixed in advance. To try several would divide the error probability
    among them. This would cost most of the bound, because the theorem's term 2mδ·(…) already takes
    up much of that probability.

    Args:
        scores: the score of each canary, [canaries].
        included: whether each canary was in the training set, [canaries].
        delta: δ.
        confidence: the confidence of the bound.

    Returns:
        the lower bound on ε, and the counts behind it in words.
    """
    canaries = len(scores)
    eighth = max(1, canaries // 8)
    order = np.argsort(scores, kind="stable")
    right_in = included[order[-eighth:]].sum()
    right_out = (~included[order[:eighth]]).sum()
    right = int(right_in + right_out)
    bound = run_bound(canaries, 2 * eighth, right, delta, confidence)
    return bound, f"{right:,} of {2 * eighth:,} guesses right, {canaries:,} canaries"


# ---------------------------------------------------------------------- the attack on one release

# A Gaussian release with multiplier z claims an ε for every δ. The attack is strongest at a large
# δ, where the decision depends on likely outcomes.
RELEASE_DELTA = 0.01
FIT_FRACTION = 0.25  # of the trials fit direction and threshold; the others test
# How the error probability is divided among the views. Small faults show only in the projection,
# which therefore gets the largest part; the other views find mostly large faults.
SHARES = {"projection": 0.5, "distance": 0.25, "atom": 0.25}

# The number that stands for one that is not finite: beyond all of float32, and its square is finite
FAR_OFF = 1e100

# (is the example present?, n) -> real coordinates [n, d] of n releases; each call has new noise
Release = Callable[[bool, int], Tensor]
Views = dict[str, np.ndarray]  # a key of SHARES -> [releases, features]


@dataclass(frozen=True)
class Scores:
    """The scores of each neighbour's releases, [releases]."""

    without: np.ndarray
    with_it: np.ndarray


@dataclass(frozen=True)
class DecisionRule:
    """A rule that guesses whether the example is present, on one side of a threshold.

    Attributes:
        threshold: the threshold of the score.
        above: if True, the rule guesses for scores above the threshold, otherwise for the others.
        present: the guess.
    """

    threshold: float
    above: bool
    present: bool

    def count_guesses(self, scores: np.ndarray) -> int:
        """Return the number of scores for which the rule makes its guess."""
        return int(((scores > self.threshold) == self.above).sum())


def attack_release(
    release: Release,
    trials: int,
    delta: float,
    confidence: float,
    shift: np.ndarray | None = None,
) -> tuple[float, str]:
    """Attack releases of two neighbours.

    Args:
        release: draws releases of either neighbour.
        trials: the number of releases of each neighbour.
        delta: δ.
        confidence: the confidence of the bound.
        shift: the difference of the neighbours' sums, [d], if the adversary knows it. Default: it
            is estimated from the releases.

    Returns:
        the lower bound on ε, and the counts behind it in words.
    """
    without = release(False, trials).double().numpy()
    with_it = release(True, trials).double().numpy()
    num_fit = max(2, round(FIT_FRACTION * trials))
    fit_rows = np.concatenate([without[:num_fit], with_it[:num_fit]])
    mean = fit_rows.mean(axis=0)
    repeated_without = find_repeated(without[:num_fit])
    repeated_with_it = find_repeated(with_it[:num_fit])

    def extract_views(rows: np.ndarray) -> Views:
        distances = [
            np.linalg.norm(rows, axis=1),
            np.linalg.norm(rows - mean, axis=1),
        ]
        atoms = [
            (rows == repeated_without).sum(axis=1),
            (rows == repeated_with_it).sum(axis=1),
            count_repeats(rows),
        ]
        return {
            "projection": rows,
            "distance": np.stack(distances, axis=1),
            "atom": np.stack(atoms, axis=1),
        }

    def choose_rule(scores: Scores, view_confidence: float) -> tuple[float, DecisionRule]:
        bound = partial(
            release_bound,
            trials=len(scores.without),
            delta=delta,
            confidence=view_confidence,
        )
        _, rule = _find_best_rule(scores, bound)
        return delta, rule

    bound, _, evidence = best_bound(
        extract_views(without),
        extract_views(with_it),
        num_fit,
        confidence,
        choose_rule,
        shift=shift,
    )
    return bound, evidence


def make_finite(values: Tensor) -> Tensor:
    """Return values, float64, with those that are not finite replaced by distant ones.

    An adversary can tell NaN and ∞ from every number. NaN itself would lose every comparison. A
    number beyond `FAR_OFF` counts as infinite, because its square may be.
    """
    finite = torch.nan_to_num(values, nan=FAR_OFF, posinf=FAR_OFF, neginf=-FAR_OFF)
    return finite.clamp(-FAR_OFF, FAR_OFF)


def find_repeated(rows: np.ndarray) -> np.ndarray:
    """Return the most frequent value of each coordinate, NaN if none occurs twice: [d]."""
    value, count = mode(rows, axis=0)
    return np.where(count > 1, value, np.nan)


def count_repeats(rows: np.ndarray) -> np.ndarray:
    """Return how many numbers of each row repeat another of its numbers: [n, d] -> [n].

    Numbers are equal if they differ by rounding only.
    """
    rounding = 1e-6 * np.abs(rows).max(axis=1, keepdims=True)
    gaps = np.diff(np.sort(rows, axis=1), axis=1)
    return (gaps <= rounding).sum(axis=1)


def best_bound(
    without: Views,
    with_it: Views,
    num_fit: int,
    confidence: float,
    choose_rule: Callable[[Scores, float], tuple[float, DecisionRule]],
    claimed: Callable[[float], float] = lambda delta: 0.0,
    shift: np.ndarray | None = None,
) -> tuple[float, float, str]:
    """Return the bound on ε that exceeds the claim by most, its δ, and the counts behind it.

    Formal guarantees: the bound holds with the given confidence. Each view's bound fails with
    probability `SHARES[view]`·(1 − confidence) at most, whatever rule was chosen, because the
    rule is chosen by releases that do not test it.

    Args:
        without, with_it: the views of each neighbour's releases.
        num_fit: the number of releases of each neighbour, from the first, that fit the rules.
        confidence: the confidence of the bound.
        choose_rule: (scores of these releases, confidence) -> δ and rule.
        claimed: δ -> the ε that is claimed at this δ.
        shift: the known difference of the neighbours in the projection's features; see
            `attack_release`.
    """
    best = (-math.inf, 0.0, "")
    largest_excess = -math.inf
    for view, share in SHARES.items():
        view_confidence = 1 - share * (1 - confidence)
        known_shift = shift if view == "projection" else None
        fit_scores, test_scores = score(without[view], with_it[view], num_fit, known_shift)
        delta, rule = choose_rule(fit_scores, view_confidence)
        bound, evidence = bound_at(rule, test_scores, delta, view_confidence)
        if view != "projection":
            evidence = f"{evidence}, by {view}"
        if bound - claimed(delta) > largest_excess:
            largest_excess = bound - claimed(delta)
            best = (bound, delta, evidence)
    return best


def score(
    without: np.ndarray,
    with_it: np.ndarray,
    num_fit: int,
    shift: np.ndarray | None = None,
) -> tuple[Scores, Scores]:
    """Return the scores of the first `num_fit` releases, which fit the direction, and the others.

    Args:
        without, with_it: the features of each neighbour's releases, [releases, features].
        num_fit: the number of releases of each neighbour that fit the direction.
        shift: the known difference of the neighbours; see `attack_release`.
    """
    direction = _least_noisy_direction(without[:num_fit], with_it[:num_fit], shift)
    absent = without @ direction
    present = with_it @ direction
    fit_scores = Scores(absent[:num_fit], present[:num_fit])
    test_scores = Scores(absent[num_fit:], present[num_fit:])
    return fit_scores, test_scores


def bound_at(
    rule: DecisionRule,
    scores: Scores,
    delta: float,
    confidence: float,
) -> tuple[float, str]:
    """Return the bound on ε that a rule gives, and the counts behind it in words.

    Args:
        rule: the rule to test.
        scores: scores of releases that were not used to choose the rule.
        delta: δ.
        confidence: the confidence of the bound.
    """
    trials = len(scores.without)
    alarms = rule.count_guesses(scores.without)
    hits = rule.count_guesses(scores.with_it)
    if not rule.present:
        hits, alarms = alarms, hits  # a rule that guesses 'absent' is right without the example
    bound = float(
        release_bound(
            np.array(hits),
            np.array(alarms),
            trials,
            delta,
            confidence,
        )
    )
    if hits == trials and alarms == 0:
        return bound, f"the attack wins {2 * trials:,} of {2 * trials:,}"
    return bound, f"{hits:,} hits and {alarms:,} false alarms in {trials:,} each"


def sharpest_test(scores: Scores, claimed: dict[float, float]) -> tuple[float, DecisionRule]:
    """Return δ and the rule for which these scores contradict a claimed curve most.

    These maximise P[hit] − e^ε P[false alarm] − δ in standard errors. The bound on ε could not
    select them, because with few scores it is 0 for most δ.

    Args:
        scores: the scores that select the rule.
        claimed: the claimed ε at each δ.
    """
    trials = len(scores.without)

    def contradiction(
        hits: np.ndarray,
        alarms: np.ndarray,
        delta: float,
    ) -> np.ndarray:
        weight = np.exp(min(claimed[delta], 50.0))
        hit = (hits + 1) / (trials + 2)
        alarm = (alarms + 1) / (trials + 2)
        variance = hit * (1 - hit) + weight**2 * alarm * (1 - alarm)
        return (hit - weight * alarm - delta) / np.sqrt(variance / trials)

    rules = {
        delta: _find_best_rule(scores, partial(contradiction, delta=delta)) for delta in claimed
    }
    delta = max(rules, key=lambda delta: rules[delta][0])
    return delta, rules[delta][1]


def _find_best_rule(
    scores: Scores, merit: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> tuple[float, DecisionRule]:
    """Return the largest merit of (hits, false alarms), and the rule that attains it.

    Of several thresholds that attain it, the middle one is taken.
    """
    trials = len(scores.without)
    thresholds = _list_thresholds(scores)
    below_without = np.searchsorted(np.sort(scores.without), thresholds, side="right")
    below_with_it = np.searchsorted(np.sort(scores.with_it), thresholds, side="right")
    best_merit, best_rule = -np.inf, DecisionRule(0.0, True, True)
    for above in (True, False):
        guesses_without, guesses_with_it = below_without, below_with_it
        if above:
            guesses_without, guesses_with_it = trials - below_without, trials - below_with_it
        for present in (True, False):
            hits, alarms = guesses_with_it, guesses_without
            if not present:
                hits, alarms = alarms, hits
            merits = merit(hits, alarms)
            ties = np.flatnonzero(merits == merits.max())
            middle = int(ties[len(ties) // 2])
            if merits[middle] > best_merit:
                best_merit = float(merits[middle])
                best_rule = DecisionRule(float(thresholds[middle]), above, present)
    return best_merit, best_rule


def _list_thresholds(scores: Scores) -> np.ndarray:
    """Return quantiles of all scores, and the middle of a gap between the neighbours' scores."""
    all_scores = np.concatenate([scores.without, scores.with_it])
    quantiles = np.quantile(all_scores, np.linspace(0.0005, 0.9995, 1000))
    middle_of_gap = (scores.without.max() + scores.with_it.min()) / 2
    return np.sort(np.append(quantiles, middle_of_gap))


def _least_noisy_direction(
    without: np.ndarray,
    with_it: np.ndarray,
    shift: np.ndarray | None,
) -> np.ndarray:
    """Return the direction Σ⁻¹Δ of the best linear test (Fisher).

    A direction without noise outweighs all others, because its variance is replaced by a tiny
    positive value.
    """
    mean_without = without.mean(axis=0)
    mean_with_it = with_it.mean(axis=0)
    if shift is None:
        shift = mean_with_it - mean_without
    noise = np.concatenate([without - mean_without, with_it - mean_with_it])
    variances, axes = np.linalg.eigh(noise.T @ noise / len(noise))
    scale = max(float(variances.max()), float(shift @ shift))
    regularisation = 1e-12 * (scale or 1.0)
    along_axes = (axes.T @ shift) / (np.maximum(variances, 0.0) + regularisation)
    direction = axes @ along_axes
    return direction / (np.linalg.norm(direction) or 1.0)
