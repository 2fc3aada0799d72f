"""The accountants that are no single paper's. They take the claim's own numbers as they stand."""

from __future__ import annotations

from zdp_bench.privacy import accounting
from zdp_bench.privacy.accountants import Claim, for_mechanisms
from zdp_bench.privacy.mechanism import Mechanism
from zdp_bench.registry import register


def _gdp_clt_epsilon(mechanism: Mechanism, steps: int, delta: float) -> float:
    sampling = mechanism.sampling
    return accounting.gdp_clt(
        mechanism.z * sampling.shift,
        sampling.sample_rate,
        steps,
        delta,
        "uniform" if sampling.scheme == "uniform" else "poisson",
    )


def _tight_at_least(mechanism: Mechanism, steps: int, delta: float) -> float:
    return accounting.tight_interval(mechanism, steps, delta)[0]


@register("accountant", "pld")
@for_mechanisms("tight", accounting.tight_epsilon, _tight_at_least)
def pld(claim: Claim) -> float:
    """The privacy loss distribution of Poisson sampling."""
    return accounting.pld(claim.noise_multiplier, claim.sample_rate, claim.steps, claim.delta)


@register("accountant", "rdp")
@for_mechanisms("bound", accounting.rdp_epsilon)
def rdp(claim: Claim) -> float:
    """Rényi-DP of Poisson sampling."""
    return accounting.rdp(claim.noise_multiplier, claim.sample_rate, claim.steps, claim.delta)


@register("accountant", "gdp_clt")
@for_mechanisms("approximation", _gdp_clt_epsilon)
def gdp_clt(claim: Claim) -> float:
    """Gaussian DP by the central limit theorem, uniform batches: an approximation that can fall
    below the truth.
    """
    return accounting.gdp_clt(claim.noise_multiplier, claim.sample_rate, claim.steps, claim.delta)


@register("accountant", "rdp_wor")
def rdp_wor(claim: Claim) -> float:
    """Rényi-DP of fixed-size batches without replacement, with the classic conversion."""
    return accounting.rdp_wor(claim.noise_multiplier, claim.sample_rate, claim.steps, claim.delta)
