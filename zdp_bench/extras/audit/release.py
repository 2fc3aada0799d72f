"""Attack one release: draw many releases of two neighbouring sums, and test which is which.

The adversary does not know what is wrong with the mechanism, and looks at a release in three ways:

    projection   along the direction with the least noise, for the covariance that was learned
    distance     how far it is from 0, where an update starts, and from the mean release
    atom         how many of its numbers are exactly those of other releases, and how many occur
                 twice in it: a step that is left out, a constant, noise that comes again

A part of the releases teaches each of them how to score a release, a threshold, and what to say on
which side of it; the others test. The errors that the confidence allows are split between the
three, so that the best of the three bounds holds with that confidence.

Counts become a bound on ε by Clopper-Pearson for one release, and by Steinke, Nasr & Jagielski
(2023) for a whole run. Every bound has a confidence, and fails no more often than that says.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Literal

import numpy as np
from scipy.stats import beta, binom, mode
from torch import Tensor


@dataclass(frozen=True)
class Finding:
    """One attack and its result."""

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


def clopper_pearson(hits: np.ndarray, trials: int, alpha: float) -> tuple[np.ndarray, np.ndarray]:
    """Return bounds on a probability; each fails with probability at most `alpha`."""
    hits = np.asarray(hits, dtype=float)
    with np.errstate(invalid="ignore"):
        lower = np.where(hits > 0, beta.ppf(alpha, hits, trials - hits + 1), 0.0)
        upper = np.where(hits < trials, beta.ppf(1 - alpha, hits + 1, trials - hits), 1.0)
    return lower, upper


def release_bound(
    hits: np.ndarray, false_alarms: np.ndarray, trials: int, delta: float, confidence: float
) -> np.ndarray:
    """Return the ε these counts refute: (ε, δ)-DP has P[hit] ≤ e^ε P[false alarm] + δ."""
    alpha = (1 - confidence) / 2
    hit = clopper_pearson(hits, trials, alpha)[0]
    alarm = clopper_pearson(false_alarms, trials, alpha)[1]
    return np.log(np.maximum((hit - delta) / alarm, 1.0))


def guess_p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Bound the probability of `right` or more right guesses if training is (ε, δ)-DP.

    Steinke et al. 2023, Theorem 5.2: P[V ≥ v] ≤ P[W ≥ v] + 2mδ·max_i P[v > W ≥ v − i]/i, with W ~
    Binomial(r, e^ε/(1 + e^ε)) for r guesses on m canaries.
    """
    if right == 0:
        return 1.0
    accuracy = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(right - 1, guesses, accuracy))
    i = np.arange(1, right + 1)
    below = binom.cdf(right - 1, guesses, accuracy) - binom.cdf(right - i - 1, guesses, accuracy)
    return min(1.0, tail + 2 * canaries * delta * float(np.max(below / i)))  # P[v > W ≥ v − i] / i


def run_bound(canaries: int, guesses: int, right: int, delta: float, confidence: float) -> float:
    """Return the largest ε at which so many right guesses are less likely than 1 − confidence."""

    def refuted(epsilon: float) -> bool:
        return guess_p_value(canaries, guesses, right, epsilon, delta) <= 1 - confidence

    if not refuted(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while refuted(high) and high < 64:
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def guess(
    scores: np.ndarray, included: np.ndarray, delta: float, confidence: float
) -> tuple[float, str]:
    """Guess 'in' for the highest eighth of the scores, 'out' for the lowest: (bound, evidence).

    The number of guesses is fixed beforehand. Trying several would cost confidence, and with it
    most of the bound, for the theorem's term 2mδ·(…) leaves little of it.
    """
    canaries = len(scores)
    each = max(1, canaries // 8)
    order = np.argsort(scores, kind="stable")
    right = int(included[order[-each:]].sum() + (~included[order[:each]]).sum())
    evidence = f"{right:,} of {2 * each:,} guesses right, {canaries:,} canaries"
    return run_bound(canaries, 2 * each, right, delta, confidence), evidence


# ---------------------------------------------------------------------- the attack on one release

# A Gaussian release with multiplier z claims an ε for EVERY δ. At this one its attack shows most:
# the likeliest outcomes decide.
RELEASE_DELTA = 0.01
LEARNED = 0.25  # the share of trials that teach direction and threshold; the rest is the test
# Fine faults show in a projection, which gets most; what the others find is mostly coarse.
SHARES = {"projection": 0.5, "distance": 0.25, "atom": 0.25}

# (is the example present?, releases) -> [releases, d] real coordinates, every call with fresh noise
Release = Callable[[bool, int], Tensor]
Views = dict[str, np.ndarray]  # a key of SHARES -> [releases, features]


@dataclass(frozen=True)
class Scores:
    """What an attack sees of each release: one number, for each neighbour's releases."""

    without: np.ndarray
    with_it: np.ndarray


@dataclass(frozen=True)
class DecisionRule:
    """Guesses `present`, or absent, where the score is above the threshold (or not)."""

    threshold: float
    above: bool
    present: bool


def attack_release(
    release: Release, trials: int, delta: float, confidence: float, shift: np.ndarray | None = None
) -> tuple[float, str]:
    """Return a lower bound on ε, and its counts, from `trials` releases of each neighbour.

    `shift` is the difference of the neighbours' sums if the adversary knows it; else it is learned.
    """
    without, with_it = (release(present, trials).double().numpy() for present in (False, True))
    learned = max(2, round(LEARNED * trials))
    both = np.concatenate([without[:learned], with_it[:learned]])
    known = [find_repeated(rows[:learned]) for rows in (without, with_it)]

    def look(rows: np.ndarray) -> Views:
        distances = [np.linalg.norm(rows - start, axis=1) for start in (0.0, both.mean(axis=0))]
        atoms = [*((rows == values).sum(axis=1) for values in known), count_repeats(rows)]
        stacked = np.stack(distances, axis=1), np.stack(atoms, axis=1)
        return dict(zip(SHARES, (rows, *stacked), strict=True))

    def choose(scores: Scores, allowed: float) -> tuple[float, DecisionRule]:
        n = len(scores.without)
        return delta, _loudest(scores, lambda h, a: release_bound(h, a, n, delta, allowed))[1]

    views = look(without), look(with_it)
    bound, _, evidence = best_bound(*views, learned, confidence, choose, shift=shift)
    return bound, evidence


def find_repeated(rows: np.ndarray) -> np.ndarray:
    """Return the value that each coordinate takes most often, NaN if none comes twice: [d]."""
    value, count = mode(rows, axis=0)
    return np.where(count > 1, value, np.nan)


def count_repeats(rows: np.ndarray) -> np.ndarray:
    """Return how many numbers of each row, up to rounding, occur in it before: [n, d] -> [n]."""
    rounding = 1e-6 * np.abs(rows).max(axis=1, keepdims=True)
    return (np.diff(np.sort(rows, axis=1), axis=1) <= rounding).sum(axis=1)


def best_bound(
    without: Views,
    with_it: Views,
    learned: int,
    confidence: float,
    choose: Callable[[Scores, float], tuple[float, DecisionRule]],
    claimed: Callable[[float], float] = lambda delta: 0.0,
    shift: np.ndarray | None = None,
) -> tuple[float, float, str]:
    """Return the bound on ε that goes furthest beyond the claim, its δ, and the counts behind it.

    Formal guarantees: the bound holds with the given confidence, for each of the three bounds
    fails with its share of the errors at most, whatever was learned.

    Args:
        learned: the first so many releases of each neighbour teach.
        choose: (their scores, confidence) -> δ and rule.
        claimed: δ -> the ε claimed for it.
        shift: as in `attack_release`, in the features of the projection.
    """
    found = []
    for view, share in SHARES.items():
        allowed = 1 - share * (1 - confidence)
        known = shift if view == "projection" else None
        taught, tested = score(without[view], with_it[view], learned, known)
        delta, rule = choose(taught, allowed)
        bound, evidence = bound_at(rule, tested, delta, allowed)
        found.append((bound, delta, evidence if view == "projection" else f"{evidence}, by {view}"))
    return max(found, key=lambda each: each[0] - claimed(each[1]))


def score(
    without: np.ndarray, with_it: np.ndarray, learned: int, shift: np.ndarray | None = None
) -> tuple[Scores, Scores]:
    """Return scores of the first `learned` releases, which teach the direction, and the others.

    `without` and `with_it` are [releases, features], `shift` is as in `attack_release`.
    """
    direction = _least_noisy_direction(without[:learned], with_it[:learned], shift)
    one, other = without @ direction, with_it @ direction
    return Scores(one[:learned], other[:learned]), Scores(one[learned:], other[learned:])


def bound_at(
    rule: DecisionRule, scores: Scores, delta: float, confidence: float
) -> tuple[float, str]:
    """Return a rule's bound on scores that did not teach it, and the counts behind it."""
    tested = len(scores.without)
    said = [
        int(((rows > rule.threshold) == rule.above).sum())
        for rows in (scores.without, scores.with_it)
    ]
    hits, alarms = said[rule.present], said[not rule.present]
    bound = float(release_bound(np.array(hits), np.array(alarms), tested, delta, confidence))
    if hits == tested and alarms == 0:
        return bound, f"the attack wins {2 * tested:,} of {2 * tested:,}"
    return bound, f"{hits:,} hits and {alarms:,} false alarms in {tested:,} each"


def sharpest_test(scores: Scores, claimed: dict[float, float]) -> tuple[float, DecisionRule]:
    """Return δ and the rule by which these scores contradict a claimed curve most.

    That is where P[hit] − e^ε P[false alarm] − δ is most standard errors above 0. A bound on ε
    would be 0 for most δ while scores are few, and so could not choose.
    """
    n = len(scores.without)

    def loudness(hits: np.ndarray, alarms: np.ndarray, delta: float) -> np.ndarray:
        weight = np.exp(min(claimed[delta], 50.0))
        hit, alarm = ((count + 1) / (n + 2) for count in (hits, alarms))
        errors = np.sqrt((hit * (1 - hit) + weight**2 * alarm * (1 - alarm)) / n)
        return (hit - weight * alarm - delta) / errors

    found = [(*_loudest(scores, partial(loudness, delta=delta)), delta) for delta in claimed]
    _, rule, delta = max(found, key=lambda each: each[0])
    return delta, rule


def _loudest(
    scores: Scores, loudness: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> tuple[float, DecisionRule]:
    """Return the greatest loudness, of hits and false alarms, and its rule, the middle of ties."""
    sides, n = (scores.without, scores.with_it), len(scores.without)
    thresholds = np.quantile(np.concatenate(sides), np.linspace(0.0005, 0.9995, 1000))
    # the middle of a gap between the two
    thresholds = np.sort(np.append(thresholds, (sides[0].max() + sides[1].min()) / 2))
    below = [np.searchsorted(np.sort(side), thresholds, side="right") for side in sides]
    best = (-np.inf, DecisionRule(0.0, True, True))
    for above, present in product((True, False), (True, False)):
        said = [n - count for count in below] if above else below
        loud = loudness(said[present], said[not present])
        equal = np.flatnonzero(loud == loud.max())
        at = int(equal[len(equal) // 2])
        if loud[at] > best[0]:
            best = float(loud[at]), DecisionRule(float(thresholds[at]), above, present)
    return best


def _least_noisy_direction(
    without: np.ndarray, with_it: np.ndarray, shift: np.ndarray | None
) -> np.ndarray:
    """Σ⁻¹Δ, the best linear test (Fisher); a direction without noise decides alone."""
    if shift is None:
        shift = with_it.mean(axis=0) - without.mean(axis=0)
    noise = np.concatenate([without - without.mean(axis=0), with_it - with_it.mean(axis=0)])
    variances, axes = np.linalg.eigh(noise.T @ noise / len(noise))
    floor = 1e-12 * (max(float(variances.max()), float(shift @ shift)) or 1.0)
    direction = axes @ ((axes.T @ shift) / (np.maximum(variances, 0.0) + floor))
    return direction / (np.linalg.norm(direction) or 1.0)
