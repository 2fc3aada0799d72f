"""The accountants that make a claim: from the numbers a paper states to the ε it would print.

An accountant is a function of a `Claim`, registered under the name that `accountant: {name: ...}`
uses. Its YAML in `conf/accountant/` says in its first line what it is.

    @register("accountant", "my_paper_2027")
    def my_paper_2027(claim: Claim) -> float: ...

Such a function is a convention: it believes the numbers it is given. `zdp-bench epsilon` lists
those that also have an ε for the mechanism that was run (`answer_for_mechanisms`) for every kind of
noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from zdp_bench.privacy import accounting
from zdp_bench.privacy.mechanism import Mechanism
from zdp_bench.registry import lookup, register


@dataclass(frozen=True)
class Claim:
    """The numbers that a paper gives its accountant: the NOMINAL σ, not the mechanism's."""

    noise_multiplier: float  # σ as the paper states it
    sample_rate: float  # probability that an example is drawn, or batch / examples
    steps: int
    delta: float
    records: int  # training examples
    epochs: int
    batch_size: int | None = None  # as stated; None: sample_rate × examples
    # where σ is the noise on the MEAN of a batch (DP-DFA), how far an example moves the SUM
    sensitivity: float | None = None

    @property
    def batch(self) -> int:
        """The stated batch size, or the expected one."""
        return self.batch_size or max(1, round(self.sample_rate * self.records))


Bound = Callable[[Mechanism, int, float], float]  # (mechanism, steps, δ) -> ε


@dataclass(frozen=True)
class ForMechanisms:
    """One accountant's ε for a mechanism that was run."""

    # exact or nearly so; looser; or one that can fall below the truth
    kind: Literal["tight", "bound", "approximation"]
    epsilon: Bound
    at_least: Bound | None = None  # a lower bound on the true ε, where it knows one


def claimed_epsilon(accountant: str, claim: Claim) -> float:
    """The ε that an accountant claims."""
    return float(lookup("accountant", accountant)(claim))


def _gdp_clt_epsilon(
    mechanism: Mechanism,
    steps: int,
    delta: float,
) -> float:
    sampling = mechanism.sampling
    return accounting.gdp_clt(
        mechanism.z * sampling.shift,
        sampling.sample_rate,
        sampling.steps_of_one(steps),
        delta,
        "uniform" if sampling.scheme == "uniform" else "poisson",
    )


def _tight_at_least(
    mechanism: Mechanism,
    steps: int,
    delta: float,
) -> float:
    low, _ = accounting.tight_interval(mechanism, steps, delta)
    return low


def answer_for_mechanisms() -> dict[str, ForMechanisms]:
    """Return each accountant's ε for a mechanism that was run, the tight one first."""
    return {
        "pld": ForMechanisms("tight", accounting.tight_epsilon, _tight_at_least),
        "rdp": ForMechanisms("bound", accounting.rdp_epsilon),
        "gdp_clt": ForMechanisms("approximation", _gdp_clt_epsilon),
    }


@register("accountant", "pld")
def pld(claim: Claim) -> float:
    """The privacy loss distribution of Poisson sampling."""
    return accounting.pld(claim.noise_multiplier, claim.sample_rate, claim.steps, claim.delta)


@register("accountant", "rdp")
@register("accountant", "zeta_dp_2024")
@register("accountant", "gredp_2024")
def rdp(claim: Claim) -> float:
    """Rényi-DP of Poisson sampling, as in Opacus.

    Riess et al. 2024, who built on Opacus, and Wang et al. 2024, for whom z = σ, state targets and
    no σ, which is calibrated to them.
    """
    return accounting.rdp(claim.noise_multiplier, claim.sample_rate, claim.steps, claim.delta)


@register("accountant", "gdp_clt")
def gdp_clt(claim: Claim) -> float:
    """Gaussian DP by the central limit theorem, uniform batches: it can fall below the truth."""
    return accounting.gdp_clt(claim.noise_multiplier, claim.sample_rate, claim.steps, claim.delta)


@register("accountant", "rdp_wor")
def rdp_wor(claim: Claim) -> float:
    """Rényi-DP of fixed-size batches without replacement, with the classic conversion."""
    return accounting.rdp_wor(claim.noise_multiplier, claim.sample_rate, claim.steps, claim.delta)


# ---------------------------------------------------------------------- as the papers print them


@register("accountant", "zeta_dp_2021")
def zeta_dp_2021(claim: Claim) -> float:
    """The 0.53 of Ziller et al. 2021, Table 1: deepee's default, GDP-CLT with uniform lots of 64.

    Not the stated q = 0.01. Its Tables 2, 3 and 5 are reproduced by nothing that was tried.
    """
    lot = 64
    steps = claim.epochs * (claim.records // lot)
    return accounting.gdp_clt(claim.noise_multiplier, lot / claim.records, steps, claim.delta)


@register("accountant", "dp_dfa_2020")
def dp_dfa_2020(claim: Claim) -> float:
    """Lee & Kifer 2020, 23 of 24 captions to the digit (truncated, not rounded).

    z = σ·m/C, with C how far a REPLACED example moves the sum (section 4.2): twice the bound of one
    share, which a run's noise multiplier counts in. ⌊n/m⌋ steps an epoch with n = 60,000 (for
    CIFAR-10's 50,000 records too), and `rdp_wor`: the improved Theorem 27 of Wang et al. 2019, not
    the Lemma 3 that the paper prints.
    """
    records, batch = 60_000, claim.batch
    shifts = batch / claim.sensitivity if claim.sensitivity else 0.5
    z = claim.noise_multiplier * shifts
    steps = claim.epochs * (records // batch)
    return accounting.rdp_wor(z, batch / records, steps, claim.delta)


@register("accountant", "deepee_2021")
def deepee_2021(claim: Claim) -> float:
    """Ziller et al. 2021 (deepee), its GDP column: GDP-CLT, uniform, ⌊n/m⌋ steps an epoch."""
    rate, steps = _rate_and_steps(claim)
    return accounting.gdp_clt(claim.noise_multiplier, rate, steps, claim.delta)


@register("accountant", "deepee_2021_rdp")
def deepee_2021_rdp(claim: Claim) -> float:
    """The RDP column of Ziller et al. 2021 (deepee): Poisson RDP with the classic conversion.

    Orders 1.1 to 10.9 and 12 to 63.
    """
    if claim.noise_multiplier == 0:
        return math.inf
    rate, steps = _rate_and_steps(claim)
    tenths = [1 + number / 10 for number in range(1, 100)]
    orders = (*tenths, *range(12, 64))
    divergences = accounting.poisson_rdp(claim.noise_multiplier, rate, orders)
    return accounting.rdp_classic(orders, [steps * each for each in divergences], claim.delta)


def _rate_and_steps(claim: Claim) -> tuple[float, int]:
    """Return the batch size over the examples, and the whole batches of all epochs."""
    return claim.batch / claim.records, claim.epochs * (claim.records // claim.batch)
