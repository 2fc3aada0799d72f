"""Find σ for a target ε, by inverting an accountant. Results are cached: each can take seconds."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from zdp_bench.lazy import LazyModule
from zdp_bench.privacy.accountants import Claim
from zdp_bench.privacy.accounting import tight_epsilon
from zdp_bench.privacy.composition import SpentSteps, compose_epsilon
from zdp_bench.privacy.mechanism import Mechanism, Sampling
from zdp_bench.privacy.memory import call_cached
from zdp_bench.registry import lookup, package_of

optimize = LazyModule("scipy.optimize")

TOLERANCE = 1e-4  # relative, of σ; the result is rounded up, to more noise
MIN_SIGMA, MAX_SIGMA = 2.0**-6, 2.0**14


def calibrate(
    target: float,
    accountant: str,
    claim: Claim,
) -> float:
    """Return the smallest σ at which an accountant claims at most `target`.

    Args:
        target: the ε.
        accountant: name of the accountant.
        claim: inputs of the accountant. Their σ is ignored.

    Raises:
        ValueError: no σ between 1/64 and 16384 reaches the target, or it is not positive.
    """
    claim = dataclasses.replace(claim, noise_multiplier=0.0)
    function = lookup("accountant", accountant)
    if package_of("accountant", accountant) != "zdp_bench":  # its code may change unnoticed
        return solve(target, _claimed, function, claim)
    return float(call_cached(solve, target, _claimed, function, claim))


def _claimed(
    sigma: float,
    accountant: Callable[[Claim], float],
    claim: Claim,
) -> float:
    return float(accountant(dataclasses.replace(claim, noise_multiplier=sigma)))


def calibrate_mechanism(
    target: float,
    unit: Mechanism,
    steps: int,
    delta: float,
) -> float:
    """Return the smallest noise multiplier whose TIGHT ε after `steps` is at most `target`.

    Args:
        target: the ε.
        unit: the mechanism at noise multiplier 1. z is proportional to the multiplier.
        steps: number of composed steps.
        delta: δ at which ε is stated.

    Raises:
        ValueError: see `calibrate`; or some direction gets no noise.
    """
    return _multiplier(unit.z, target, _tight, unit.sampling, steps, delta)


def calibrate_beside(
    target: float,
    earlier: Sequence[SpentSteps],
    own: SpentSteps,
    runs: int,
    delta: float,
) -> float:
    """Return the smallest noise multiplier for runs after others on the same examples.

    Formal guarantees: the earlier runs and all the new ones together have a tight ε of at most
    `target`.

    Args:
        target: the ε.
        earlier: what earlier runs have spent.
        own: what one new run will spend at noise multiplier 1.
        runs: number of new runs.
        delta: δ at which ε is stated.

    Raises:
        ValueError: see `calibrate_mechanism`; or no ε is known for all runs together.
    """
    return _multiplier(own.z, target, _beside, list(earlier), own, runs, delta)


def _multiplier(
    z_of_one: float,
    target: float,
    epsilon_of: Callable[..., float],
    *arguments: Any,
) -> float:
    """Return the smallest noise multiplier whose z has an ε of at most `target`; see `solve`.

    Args:
        z_of_one: z at noise multiplier 1.
    """
    if z_of_one == 0:
        raise ValueError("some direction gets no noise, so its ε is ∞ at every noise multiplier")
    z = call_cached(solve, target, epsilon_of, *arguments)
    return float(z / z_of_one * (1 + 1e-12))  # rounding must not make the resulting z smaller


def _beside(
    z: float,
    earlier: Sequence[SpentSteps],
    own: SpentSteps,
    runs: int,
    delta: float,
) -> float:
    return compose_epsilon([*earlier, *[dataclasses.replace(own, z=z)] * runs], delta)


def _tight(
    z: float,
    sampling: Sampling,
    steps: int,
    delta: float,
) -> float:
    return tight_epsilon(Mechanism.of_z(z, sampling), steps, delta)


def solve(
    target: float,
    epsilon_of: Callable[..., float],
    *arguments: Any,
) -> float:
    """Return the smallest σ whose ε is at most `target`, up to a relative error of 1e-4.

    Formal guarantees: epsilon_of(result, *arguments) ≤ target. For a target of ∞, σ is 0.

    Args:
        target: the ε.
        epsilon_of: a function of σ and `arguments`, decreasing in σ.
        arguments: further arguments of `epsilon_of`.

    Raises:
        ValueError: no σ between 1/64 and 16384 reaches the target, or it is not positive.
    """
    if target == math.inf:
        return 0.0
    if not target > 0:
        raise ValueError(f"a target ε must be positive, not {target:g}")
    low = high = 1.0  # after the loops: ε(low) > target ≥ ε(high)
    while epsilon_of(high, *arguments) > target:
        low = high
        high *= 2
        if high > MAX_SIGMA:
            raise ValueError(f"no noise multiplier up to {MAX_SIGMA:,.0f} reaches ε = {target:g}")
    while low == high or epsilon_of(low, *arguments) <= target:
        low /= 2
        if low < MIN_SIGMA:
            raise ValueError(
                f"ε = {target:g} is reached even by a noise multiplier of {MIN_SIGMA:g}: there is "
                "nothing to calibrate"
            )

    def distance(log_sigma: float) -> float:
        epsilon = epsilon_of(math.exp(log_sigma), *arguments)
        # On its side of the target, also if ε is 0 or infinite
        finite = min(max(epsilon, 1e-3 * target), max(1e12, 10 * target))
        return math.log(finite / target)

    root = math.exp(optimize.brentq(distance, math.log(low), math.log(high), xtol=TOLERANCE / 4))
    while epsilon_of(root, *arguments) > target:
        root *= 1 + TOLERANCE / 2
    return root
