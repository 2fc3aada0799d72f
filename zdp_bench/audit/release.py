"""Attack one release: draw many releases of two neighbouring sums, and test which is which.

The adversary learns the noise's covariance and tests along the direction with the least noise. It
does not know what is wrong with the mechanism.
"""

from __future__ import annotations

from collections.abc import Callable

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
    direction = _least_noisy_direction(without[:learned], with_it[:learned], shift)
    scores = [rows @ direction for rows in (without, with_it)]
    threshold, sign = _best_threshold(scores[0][:learned], scores[1][:learned], delta, confidence)
    tested = trials - learned
    if sign > 0:  # 'it is in' above the threshold
        alarms, hits = (int((s[learned:] > threshold).sum()) for s in scores)
    else:  # neighbours are symmetric: 'it is not in' below it
        hits, alarms = (int((s[learned:] <= threshold).sum()) for s in scores)
    bound = float(release_bound(np.array(hits), np.array(alarms), tested, delta, confidence))
    if hits == tested and alarms == 0:
        return bound, f"the attack wins {2 * tested:,} of {2 * tested:,}"
    return bound, f"{hits:,} hits and {alarms:,} false alarms in {tested:,} each"


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


def _best_threshold(
    without: np.ndarray, with_it: np.ndarray, delta: float, confidence: float
) -> tuple[float, int]:
    """Return the threshold, and its side, whose counts refute most."""
    candidates = np.quantile(np.concatenate([without, with_it]), np.linspace(0.0005, 0.9995, 1000))
    candidates = np.append(candidates, (without.max() + with_it.min()) / 2)
    above = [(rows[None, :] > candidates[:, None]).sum(axis=1) for rows in (without, with_it)]
    n = len(without)
    high = release_bound(above[1], above[0], n, delta, confidence)
    low = release_bound(n - above[0], n - above[1], n, delta, confidence)
    at_high, at_low = int(np.argmax(high)), int(np.argmax(low))
    return (
        (float(candidates[at_high]), 1)
        if high[at_high] >= low[at_low]
        else (float(candidates[at_low]), -1)
    )
