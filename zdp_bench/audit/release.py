"""The attack on one release: two neighbouring sums, many releases of each, and the test that tells them apart best.

The adversary learns the noise's covariance and tests along the direction that gets least of it. Nobody tells it what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from zdp_bench.audit.bounds import release_bound

# A Gaussian release with multiplier z claims an ε for EVERY δ. Here its attack sees most: the likeliest outcomes decide.
RELEASE_DELTA = 0.01
LEARNED = 0.25  # share of the trials from which the adversary learns direction and threshold; the rest is the test

# (the record is in?, releases) -> [releases, d] real coordinates, every call with noise of its own
Release = Callable[[bool, int], Tensor]


def attack_release(
    release: Release, trials: int, delta: float, confidence: float, shift: np.ndarray | None = None
) -> tuple[float, str]:
    """A lower bound on ε from `trials` releases of each of two neighbours, and the counts behind it.

    Args:
        shift: by how much the neighbours' sums differ, where the adversary knows it in these coordinates; else it is learned.
    """
    without, with_it = (release(there, trials).double().numpy() for there in (False, True))
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
    """Σ⁻¹Δ: the best linear test for Gaussian noise of covariance Σ (Fisher). Where there is no noise it looks nowhere else."""
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
    """The threshold, and the side of it, whose counts refute most."""
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
