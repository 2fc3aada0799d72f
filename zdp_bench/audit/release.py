"""Attack one release: draw many releases of two neighbouring sums, and test which is which.

The adversary learns the noise's covariance and tests along the direction with the least noise. It
does not know what is wrong with the mechanism.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from zdp_bench.audit.bounds import release_bound

# A Gaussian release with multiplier z claims an ε for EVERY δ. At this one its attack shows most:
# the
# likeliest outcomes decide.
RELEASE_DELTA = 0.01
LEARNED = 0.25  # the share of trials that teach direction and threshold; the rest is the test

# (is the example present?, releases) -> [releases, d] real coordinates, every call with fresh noise
Release = Callable[[bool, int], Tensor]


@dataclass(frozen=True)
class Scores:
    """What an attack sees of each release: one number, for each neighbour's releases."""

    without: np.ndarray
    with_it: np.ndarray


def attack_release(
    release: Release, trials: int, delta: float, confidence: float, shift: np.ndarray | None = None
) -> tuple[float, str]:
    """Return a lower bound on ε from `trials` releases of each of two neighbours, and the counts
    behind it.

    Args:
        shift: the difference of the neighbours' sums, if the adversary knows it; else it is
            learned.
    """
    without, with_it = (release(present, trials).double().numpy() for present in (False, True))
    learned = max(2, round(LEARNED * trials))
    taught, tested = score(without, with_it, learned, shift)
    threshold, sign = _best_threshold(taught, delta, confidence)
    return bound_at(threshold, sign, tested, delta, confidence)


def score(
    without: np.ndarray, with_it: np.ndarray, learned: int, shift: np.ndarray | None = None
) -> tuple[Scores, Scores]:
    """Return the scores of the first `learned` releases, which teach the best direction, and of the
    others.

    Args:
        without, with_it: [releases, d].
        shift: as in `attack_release`.
    """
    direction = _least_noisy_direction(without[:learned], with_it[:learned], shift)
    one, other = without @ direction, with_it @ direction
    return Scores(one[:learned], other[:learned]), Scores(one[learned:], other[learned:])


def bound_at(
    threshold: float, sign: int, scores: Scores, delta: float, confidence: float
) -> tuple[float, str]:
    """Return the bound that a threshold gives on scores that did not teach it, and the counts
    behind it.
    """
    tested, both = len(scores.without), (scores.without, scores.with_it)
    if sign > 0:  # 'it is in' above the threshold
        alarms, hits = (int((s > threshold).sum()) for s in both)
    else:  # neighbours are symmetric: 'it is not in' below it
        hits, alarms = (int((s <= threshold).sum()) for s in both)
    bound = float(release_bound(np.array(hits), np.array(alarms), tested, delta, confidence))
    if hits == tested and alarms == 0:
        return bound, f"the attack wins {2 * tested:,} of {2 * tested:,}"
    return bound, f"{hits:,} hits and {alarms:,} false alarms in {tested:,} each"


def sharpest_test(scores: Scores, claimed: dict[float, float]) -> tuple[float, float, int]:
    """Return δ, threshold and side where these scores speak loudest against a claimed curve.

    That is where P[hit] − e^ε P[false alarm] − δ is most standard errors above 0. A bound on ε
    would be 0 for most δ while scores are few, and so could not choose.

    Args:
        claimed: δ -> the ε claimed for it.
    """
    candidates, above = _count_above(scores)
    n = len(scores.without)
    best = (-np.inf, 0.0, 0.0, 1)
    for delta, epsilon in claimed.items():
        weight = np.exp(min(epsilon, 50.0))
        for sign in (1, -1):
            counts = (above[1], above[0]) if sign > 0 else (n - above[0], n - above[1])
            hit, alarm = ((count + 1) / (n + 2) for count in counts)
            errors = np.sqrt((hit * (1 - hit) + weight**2 * alarm * (1 - alarm)) / n)
            loud = (hit - weight * alarm - delta) / errors
            equal = np.flatnonzero(loud == loud.max())
            at = int(equal[len(equal) // 2])  # in the middle of a gap between the two
            best = max(best, (float(loud[at]), delta, float(candidates[at]), sign))
    return best[1:]


def _least_noisy_direction(
    without: np.ndarray, with_it: np.ndarray, shift: np.ndarray | None
) -> np.ndarray:
    """Σ⁻¹Δ, the best linear test for Gaussian noise of covariance Σ (Fisher).

    A direction without noise decides alone.
    """
    if shift is None:
        shift = with_it.mean(axis=0) - without.mean(axis=0)
    noise = np.concatenate([without - without.mean(axis=0), with_it - with_it.mean(axis=0)])
    variances, axes = np.linalg.eigh(noise.T @ noise / len(noise))
    floor = 1e-12 * (max(float(variances.max()), float(shift @ shift)) or 1.0)
    direction = axes @ ((axes.T @ shift) / (np.maximum(variances, 0.0) + floor))
    return direction / (np.linalg.norm(direction) or 1.0)


def _best_threshold(scores: Scores, delta: float, confidence: float) -> tuple[float, int]:
    """Return the threshold, and its side, whose counts refute most."""
    candidates, above = _count_above(scores)
    n = len(scores.without)
    high = release_bound(above[1], above[0], n, delta, confidence)
    low = release_bound(n - above[0], n - above[1], n, delta, confidence)
    at_high, at_low = int(np.argmax(high)), int(np.argmax(low))
    return (
        (float(candidates[at_high]), 1)
        if high[at_high] >= low[at_low]
        else (float(candidates[at_low]), -1)
    )


def _count_above(scores: Scores) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return thresholds to try, and how many scores of each neighbour are above each."""
    without, with_it = scores.without, scores.with_it
    candidates = np.quantile(np.concatenate([without, with_it]), np.linspace(0.0005, 0.9995, 1000))
    candidates = np.append(candidates, (without.max() + with_it.min()) / 2)
    return candidates, [
        (rows[None, :] > candidates[:, None]).sum(axis=1) for rows in (without, with_it)
    ]
