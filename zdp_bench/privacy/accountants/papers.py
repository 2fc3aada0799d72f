"""The papers' conventions: how each gets the digits it prints from the numbers it states."""

from __future__ import annotations

import math

from zdp_bench.privacy.accountants import Claim
from zdp_bench.privacy.accounting import gdp_clt, poisson_rdp, rdp, rdp_classic, rdp_wor
from zdp_bench.registry import register


@register("accountant", "zeta_dp_2021")
def zeta_dp_2021(claim: Claim) -> float:
    """The 0.53 of Ziller et al. 2021, Table 1: deepee's default, GDP-CLT with uniform lots of 64,
    not the stated q = 0.01.

    Its Tables 2, 3 and 5 are reproduced by nothing that was tried.
    """
    lot = 64
    return gdp_clt(
        claim.noise_multiplier,
        lot / claim.records,
        claim.epochs * (claim.records // lot),
        claim.delta,
    )


@register("accountant", "zeta_dp_2024")
def zeta_dp_2024(claim: Claim) -> float:
    """Riess et al.

    2024 state targets, no σ: Poisson RDP, as in Opacus, which they built on. σ is calibrated to the
    target.
    """
    return rdp(claim.noise_multiplier, claim.sample_rate, claim.steps, claim.delta)


@register("accountant", "dp_dfa_2020")
def dp_dfa_2020(claim: Claim) -> float:
    """Lee & Kifer 2020, 23 of 24 captions to the digit (truncated, not rounded).

    z = σ·m/C, with C how far a REPLACED example moves the sum (section 4.2): twice the bound of one
    share, which a run's noise multiplier counts in. ⌊n/m⌋ steps an epoch with n = 60,000 (for
    CIFAR-10's 50,000 records too), and `rdp_wor`: the improved Theorem 27 of Wang et al. 2019, not
    the Lemma 3 that the paper prints.
    """
    records, batch = 60_000, claim.batch
    z = claim.noise_multiplier * (batch / claim.sensitivity if claim.sensitivity else 0.5)
    return rdp_wor(z, batch / records, claim.epochs * (records // batch), claim.delta)


@register("accountant", "deepee_2021")
def deepee_2021(claim: Claim) -> float:
    """Ziller et al. 2021 (deepee), its GDP column: GDP-CLT, uniform, ⌊n/m⌋ steps an epoch."""
    steps = claim.epochs * (claim.records // claim.batch)
    return gdp_clt(claim.noise_multiplier, claim.batch / claim.records, steps, claim.delta)


@register("accountant", "deepee_2021_rdp")
def deepee_2021_rdp(claim: Claim) -> float:
    """Ziller et al.

    2021 (deepee), its RDP column: Poisson RDP, orders 1.1 to 10.9 and 12 to 63, classic conversion.
    """
    if claim.noise_multiplier == 0:
        return math.inf
    orders = (*(1 + tenths / 10 for tenths in range(1, 100)), *range(12, 64))
    steps = claim.epochs * (claim.records // claim.batch)
    divergences = poisson_rdp(claim.noise_multiplier, claim.batch / claim.records, orders)
    return rdp_classic(orders, [steps * r for r in divergences], claim.delta)


@register("accountant", "gredp_2024")
def gredp_2024(claim: Claim) -> float:
    """Wang et al.

    2024 state targets, no σ: Poisson RDP of σ, which assumes z = σ. σ is calibrated to the target.
    """
    return rdp(claim.noise_multiplier, claim.sample_rate, claim.steps, claim.delta)
