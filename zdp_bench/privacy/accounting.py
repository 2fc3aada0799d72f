"""ε from (z, sample rate, steps, δ): the accountants. Arithmetic by dp-accounting wherever it has it.

`pld` is the tight one: the privacy loss distribution of the subsampled Gaussian, an upper bound that is exact to the
discretisation. `rdp` is the looser classic bound. `gdp_clt` is what two of the papers used: a central-limit APPROXIMATION
that can fall below the truth, so it is only ever shown as claimed, never as ε.

A mechanism with z = 0 releases something noise-free: every accountant answers ∞.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

import dp_accounting
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.rdp import RdpAccountant
from scipy.optimize import brentq
from scipy.stats import norm

from zdp_bench.privacy.mechanism import Mechanism


@cache
def _step_pld(z: float, sample_rate: float) -> privacy_loss_distribution.PrivacyLossDistribution:
    """The loss distribution of one step, pessimistic (an upper bound), for records added or removed."""
    return privacy_loss_distribution.from_gaussian_mechanism(z, sampling_prob=sample_rate)


def pld(z: float, sample_rate: float, steps: int, delta: float) -> float:
    """Tight ε: the composed privacy loss distribution of the Poisson-subsampled Gaussian mechanism.

    A fixed-size batch drawn without replacement is covered by the same expression, with the doubled shift of a replaced
    record already inside z (Zhu, Dong & Wang 2021, Proposition 30: the dominating pair is the same mixture).
    """
    if steps == 0:
        return 0.0
    if z == 0:
        return math.inf
    return float(_step_pld(z, sample_rate).self_compose(steps).get_epsilon_for_delta(delta))


def rdp(z: float, sample_rate: float, steps: int, delta: float) -> float:
    """Rényi-DP of the Poisson-subsampled Gaussian, dp-accounting's default orders and its tight conversion."""
    if steps == 0:
        return 0.0
    if z == 0:
        return math.inf
    step = dp_accounting.PoissonSampledDpEvent(sample_rate, dp_accounting.GaussianDpEvent(z))
    return float(RdpAccountant().compose(dp_accounting.SelfComposedDpEvent(step, steps)).get_epsilon(delta))


def gdp_delta(mu: float, epsilon: float) -> float:
    """δ(ε) of a μ-GDP mechanism (Dong, Roth & Su 2019, Corollary 2.13)."""
    return float(norm.cdf(-epsilon / mu + mu / 2) - math.exp(epsilon + norm.logcdf(-epsilon / mu - mu / 2)))


def gdp_epsilon(mu: float, delta: float) -> float:
    """The ε at which a μ-GDP mechanism has this δ."""
    if gdp_delta(mu, 0.0) <= delta:
        return 0.0
    upper = mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta)) + 1  # Gaussian tail: δ(upper) < δ
    return float(brentq(lambda epsilon: gdp_delta(mu, epsilon) - delta, 0.0, upper))


def gdp_clt(z: float, sample_rate: float, steps: int, delta: float, batches: Literal["uniform", "poisson"] = "uniform") -> float:
    """The central-limit approximation of Gaussian DP (Bu, Dong, Long & Su 2020). NOT a bound: claimed columns only.

    uniform: μ = √2·q√T·√(e^{1/z²}Φ(3/2z) + 3Φ(−1/2z) − 2), the default of deepee and of TensorFlow Privacy.
    poisson: μ = q√T·√(e^{1/z²} − 1).
    """
    if steps == 0:
        return 0.0
    if z == 0:
        return math.inf
    grown = math.exp(z**-2)
    spread = 2 * (grown * norm.cdf(1.5 / z) + 3 * norm.cdf(-0.5 / z) - 2) if batches == "uniform" else grown - 1
    return gdp_epsilon(sample_rate * math.sqrt(steps * spread), delta)


@dataclass(frozen=True)
class Claim:
    """What a paper tells its accountant: the NOMINAL noise multiplier σ, whatever the mechanism really gives."""

    noise_multiplier: float
    sample_rate: float
    steps: int
    delta: float
    records: int
    epochs: int


def zeta_dp_2021(claim: Claim) -> float:
    """The 0.53 of Ziller et al. 2021, Table 1: deepee's default, GDP-CLT with uniform lots of 64, not the stated q = 0.01."""
    lot = 64
    return gdp_clt(claim.noise_multiplier, lot / claim.records, claim.epochs * (claim.records // lot), claim.delta)


Accountant = Callable[[Claim], float]


def _plain(epsilon: Callable[[float, float, int, float], float]) -> Accountant:
    """An accountant that takes the claim's own numbers as they stand."""
    return lambda claim: epsilon(claim.noise_multiplier, claim.sample_rate, claim.steps, claim.delta)


# Who can make a claim, by name: three accountants, and the conventions that reproduce a paper's printed digits.
ACCOUNTANTS: dict[str, Accountant] = {
    "pld": _plain(pld),
    "rdp": _plain(rdp),
    "gdp_clt": _plain(gdp_clt),
    "zeta_dp_2021": zeta_dp_2021,
}


def tight_epsilon(mechanism: Mechanism, steps: int, delta: float) -> float:
    """The headline ε: PLD of the mechanism that was run, in its own sampling and adjacency.

    Shuffled batches have no amplification theorem used here, so their ε is ∞ unless nothing was released.
    """
    if mechanism.sampling.scheme == "shuffled":
        return math.inf if steps else 0.0
    return pld(mechanism.z, mechanism.sampling.sample_rate, steps, delta)


def affordable_steps(mechanism: Mechanism, delta: float, max_epsilon: float, limit: int) -> int:
    """The largest number of steps, at most `limit`, whose tight ε does not exceed `max_epsilon`; ε grows with steps."""
    if tight_epsilon(mechanism, limit, delta) <= max_epsilon:
        return limit
    low, high = 0, limit  # invariant: ε(low) ≤ max_epsilon < ε(high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if tight_epsilon(mechanism, middle, delta) <= max_epsilon else (low, middle)
    return low
