"""Accountants for claims: from the numbers that a paper states to the ε that it would print.

An accountant is a function of a `Claim`, registered under the name that `accountant: {name: ...}`
uses. The first line of its YAML in `conf/accountant/` describes it.

    @register("accountant", "my_paper_2027")
    def my_paper_2027(claim: Claim) -> float: ...

Such a function is a convention: it trusts its inputs. `accounting.py` computes the ε of a mechanism
that was run, for every kind of noise.
"""

from __future__ import annotations

from dataclasses import dataclass

from zdp_bench.privacy import accounting
from zdp_bench.privacy.memory import call_cached
from zdp_bench.registry import lookup, package_of, register


@dataclass(frozen=True)
class Claim:
    """The inputs of a paper's accountant.

    Attributes:
        noise_multiplier: the NOMINAL σ as the paper states it, not the mechanism's.
        sample_rate: probability that an example is drawn, or batch size / examples.
        steps: number of steps.
        delta: δ at which ε is stated.
        records: number of training examples.
        epochs: number of epochs.
        batch_size: the stated batch size. Default: `sample_rate` · `records`.
        sensitivity: if σ is the noise on the MEAN of a batch (DP-DFA), how far an example moves the
            SUM.
    """

    noise_multiplier: float
    sample_rate: float
    steps: int
    delta: float
    records: int
    epochs: int
    batch_size: int | None = None
    sensitivity: float | None = None

    @property
    def batch(self) -> int:
        """The stated batch size, or the expected one."""
        return self.batch_size or max(1, round(self.sample_rate * self.records))


def claimed_epsilon(accountant: str, claim: Claim) -> float:
    """Return the ε that an accountant claims."""
    return float(lookup("accountant", accountant)(claim))


def recall_claimed_epsilon(accountant: str, claim: Claim) -> float:
    """Return the ε that an accountant claims, from the cache if possible.

    The ε of an accountant from another package is not cached, because its code may change.
    """
    if package_of("accountant", accountant) != "zdp_bench":
        return claimed_epsilon(accountant, claim)
    return float(call_cached(claimed_epsilon, accountant, claim))


@register("accountant", "pld")
def pld(claim: Claim) -> float:
    """Return ε by the privacy loss distribution of Poisson sampling."""
    return accounting.pld(claim.noise_multiplier, claim.sample_rate, claim.steps, claim.delta)


@register("accountant", "rdp")
@register("accountant", "zeta_dp_2024")
@register("accountant", "gredp_2024")
def rdp(claim: Claim) -> float:
    """Return ε by Rényi-DP of Poisson sampling, as in Opacus.

    Riess et al. 2024, who built on Opacus, and Wang et al. 2024, for whom z = σ, state target ε but
    no σ. It is calibrated to the targets.
    """
    return accounting.rdp(claim.noise_multiplier, claim.sample_rate, claim.steps, claim.delta)


@register("accountant", "gdp_clt")
def gdp_clt(claim: Claim) -> float:
    """Return ε by the central limit theorem of Gaussian DP. It can fall below the true ε."""
    return accounting.gdp_clt(claim.noise_multiplier, claim.sample_rate, claim.steps, claim.delta)


@register("accountant", "rdp_wor")
def rdp_wor(claim: Claim) -> float:
    """Return ε by Rényi-DP of fixed-size batches, with the classic conversion."""
    return accounting.rdp_wor(claim.noise_multiplier, claim.sample_rate, claim.steps, claim.delta)


# ---------------------------------------------------------------------- as the papers print them


@register("accountant", "zeta_dp_2021")
def zeta_dp_2021(claim: Claim) -> float:
    """Return the 0.53 of Ziller et al. 2021, Table 1.

    It is deepee's default, GDP-CLT with uniform lots of 64, and not at the stated q = 0.01. No
    accountant that was tried reproduces Tables 2, 3 and 5.
    """
    lot = 64
    steps = claim.epochs * (claim.records // lot)
    return accounting.gdp_clt(claim.noise_multiplier, lot / claim.records, steps, claim.delta)


@register("accountant", "dp_dfa_2020")
def dp_dfa_2020(claim: Claim) -> float:
    """Return the ε of Lee & Kifer 2020: 23 of 24 captions to the digit (truncated, not rounded).

    z = σ·m/C, where C is how far a REPLACED example moves the sum (section 4.2). That is twice the
    bound of one share, to which a run's noise multiplier refers. An epoch has ⌊n/m⌋ steps with n =
    60,000, even for CIFAR-10's 50,000 records. The accountant is `rdp_wor`, with the improved
    Theorem 27 of Wang et al. 2019 and not the Lemma 3 that the paper prints.
    """
    records, batch = 60_000, claim.batch
    shifts = batch / claim.sensitivity if claim.sensitivity else 0.5
    z = claim.noise_multiplier * shifts
    steps = claim.epochs * (records // batch)
    return accounting.rdp_wor(z, batch / records, steps, claim.delta)


@register("accountant", "deepee_2021")
def deepee_2021(claim: Claim) -> float:
    """Return the GDP column of Ziller et al. 2021 (deepee): GDP-CLT, ⌊n/m⌋ steps an epoch."""
    rate, steps = _rate_and_steps(claim)
    return accounting.gdp_clt(claim.noise_multiplier, rate, steps, claim.delta)


@register("accountant", "deepee_2021_rdp")
def deepee_2021_rdp(claim: Claim) -> float:
    """Return the RDP column of Ziller et al. 2021 (deepee).

    It is the Rényi-DP of Poisson sampling at orders 1.1 to 10.9 and 12 to 63, with the classic
    conversion.
    """
    rate, steps = _rate_and_steps(claim)
    if steps == 0:
        return 0.0
    tenths = [1 + number / 10 for number in range(1, 100)]
    orders = (*tenths, *range(12, 64))
    divergences = accounting.poisson_rdp(claim.noise_multiplier, rate, orders)
    return accounting.rdp_classic(orders, [steps * each for each in divergences], claim.delta)


def _rate_and_steps(claim: Claim) -> tuple[float, int]:
    """Return batch size / examples, and the number of whole batches in all epochs."""
    return claim.batch / claim.records, claim.epochs * (claim.records // claim.batch)
