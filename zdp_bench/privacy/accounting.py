"""Compute ε from (z, sample rate, steps, δ), with dp-accounting wherever it has the arithmetic.

`pld` is tight: the privacy loss distribution of the subsampled Gaussian, an upper bound that is
exact up to its discretisation (`loss_distribution.py`). `rdp` is the looser classic bound.
`gdp_clt` is the central-limit APPROXIMATION that two of the papers used. It can fall below the true
ε, so it is only ever shown as a claim.

`tight_epsilon`, `rdp_epsilon` and `patient_epsilon` take a `Mechanism` and bound the ε of what was
run. The claims of papers are in `accountants.py`.

A mechanism with z = 0 releases something without noise, so its ε is ∞.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import Literal

import numpy as np

from zdp_bench.lazy import LazyModule
from zdp_bench.privacy.loss_distribution import (
    CUT,
    Law,
    Mixture,
    attack_law,
    epsilon,
    epsilon_at_least,
    has_law,
    most_drawn,
    one_example,
    poisson_laws,
    replaced_epsilon,
    several_examples,
    uniform_laws,
)
from zdp_bench.privacy.mechanism import Mechanism, Sampling

dp_accounting = LazyModule("dp_accounting")
special = LazyModule("scipy.special")
stats = LazyModule("scipy.stats")


def gdp_epsilon(mu: float, delta: float) -> float:
    """Return the ε of a μ-GDP mechanism at δ: 0 for μ = 0, and ∞ for μ = ∞ or δ = 0.

    Above μ = 1000, double precision cannot solve the exact equation. The first term of δ(ε) then
    gives an upper bound, which is too high by less than 1 part in 10⁶.
    """
    if mu == 0:
        return 0.0
    if math.isinf(mu):
        return math.inf
    if mu > 1000:
        return max(0.0, mu * mu / 2 - mu * float(stats.norm.ppf(delta)))
    with np.errstate(divide="ignore"):  # far in the tail, it takes the logarithm of a δ of 0
        return float(dp_accounting.get_epsilon_gaussian(1 / mu, delta))


# Below this z, drawing an example once costs an ε above 1000. Sampling is then ignored, which gives
# an upper bound on ε in closed form.
HOPELESS = 0.02
SMALL_DELTA = 1e-10
WOR_ORDERS = tuple(range(2, 65))  # orders of Rényi divergences without replacement
EVERY_STEP = Mixture((-math.inf, 0.0))  # exactly one shift in each step


Epsilon = Callable[[float, float, int, float], float]  # of (z, sample rate, steps, δ)
LawsOf = Callable[..., tuple[Law, ...]]  # `poisson_laws` or `uniform_laws`
Bounds = tuple[float, float]  # a lower and an upper bound on the true ε


def _closed_form(
    z: float,
    sample_rate: float,
    steps: int,
    delta: float,
    hopeless: float = HOPELESS,
) -> float | None:
    """Return ε if it has a closed form, else None.

    It has one without steps, with (almost) no noise, at δ = 0, and at sample rate 1.
    """
    if steps == 0 or sample_rate == 0 or math.isinf(z):
        return 0.0
    if z == 0 or delta <= 0:
        return math.inf
    if sample_rate >= 1 or z < hopeless:
        return gdp_epsilon(math.sqrt(steps) / z, delta)
    return None


def _composed(
    shift: float = 1.0,
    hopeless: float = HOPELESS,
) -> Callable[[Epsilon], Epsilon]:
    """Make a function return a closed form where there is one, and cache its results.

    Composing takes up to a second, and a run needs the same ε three times: as tight, claimed and
    patient's ε.

    Args:
        shift: how far a step moves the sum, in the units of z.
        hopeless: the z below which sampling is ignored.
    """

    def decorate(compose: Epsilon) -> Epsilon:
        @lru_cache(maxsize=1024)
        @wraps(compose)
        def epsilon_of(
            z: float,
            sample_rate: float,
            steps: int,
            delta: float,
        ) -> float:
            known = _closed_form(z / shift, sample_rate, steps, delta, hopeless)
            return compose(z, sample_rate, steps, delta) if known is None else known

        return epsilon_of

    return decorate


@_composed()
def pld(
    z: float,
    sample_rate: float,
    steps: int,
    delta: float,
) -> float:
    """Return the tight ε of the Poisson-subsampled Gaussian mechanism under add-or-remove-one.

    Formal guarantees: an upper bound on the true ε(δ). It is exact at sample rate 1 (Balle & Wang
    2018).

    Compared with a grid of 8 times as many cells (z 0.4 to 20, rates from 1e-5, 1 to 10⁶ steps, δ
    1e-5, ε 1e-4 to 500), it is too high by at most 0.15 % (z 0.6, rate 1e-5, 10⁶ steps), and by
    less than 0.04 % at rates from 1e-4. In that worst case, it is 0.7 % too high at δ 1e-7 and 9 %
    at δ 1e-8, because the rounding of the FFT, which is charged to δ, is no longer much smaller
    than δ.
    """
    laws = poisson_laws(z, one_example(sample_rate), steps, delta)
    return epsilon(laws, steps, delta)


@_composed()
def pld_uniform(
    z: float,
    sample_rate: float,
    steps: int,
    delta: float,
) -> float:
    """Return the tight ε of fixed-size batches drawn without replacement, under replace-one.

    Formal guarantees: an upper bound for any adaptive composition (Zhu, Dong & Wang 2021,
    Proposition 30). The Poisson distribution with a doubled shift would be no bound: its ε is up to
    a third lower (σ = 1.1, q = 0.01, 10⁵ steps).

    Args:
        z: noise multiplier relative to the doubled shift: noise/2C.
        sample_rate: batch size / examples.
        steps: number of composed steps.
        delta: δ at which ε is stated.
    """
    laws = uniform_laws(z, one_example(sample_rate), steps, delta)
    return epsilon(laws, steps, delta)


@_composed(hopeless=0.0)
def pld_uniform_at_least(
    z: float,
    sample_rate: float,
    steps: int,
    delta: float,
) -> float:
    """Return a lower bound on the ε of `pld_uniform`, which two actual data sets reach.

    Formal guarantees: a lower bound on the true ε(δ), whatever the number of examples. It is exact
    at sample rate 1.
    """
    return _at_least(z, one_example(sample_rate), steps, delta)


def _at_least(
    z: float,
    drawn: Mixture,
    steps: int,
    delta: float,
) -> float:
    """Return the ε that the best known attack on fixed-size batches reaches."""
    composed = steps if z >= HOPELESS else 1  # a single step already reveals enough
    law = attack_law(z, drawn, composed, delta)
    return epsilon_at_least(law, composed, delta)


@_composed(shift=2.0)
def pld_replaced(
    z: float,
    sample_rate: float,
    steps: int,
    delta: float,
) -> float:
    """Return the tight ε of the Poisson-subsampled Gaussian mechanism if a share is REPLACED.

    Formal guarantees: an upper bound on the true ε(δ), up to the rounding of the FFT (0.2 % at 10⁶
    steps and z 20, and less at fewer steps). It is exact at sample rate 1.
    """
    return replaced_epsilon(z, sample_rate, steps, delta)


@_composed()
def rdp(
    z: float,
    sample_rate: float,
    steps: int,
    delta: float,
) -> float:
    """Return the Rényi-DP ε of the Poisson-subsampled Gaussian mechanism, by dp-accounting."""
    return rdp_together([(z, sample_rate, steps)], "poisson", delta)


@_composed()
def rdp_uniform(
    z: float,
    sample_rate: float,
    steps: int,
    delta: float,
) -> float:
    """Return the Rényi-DP ε of fixed-size batches drawn without replacement, under replace-one.

    Wang, Balle & Kasiviswanathan 2019, Theorem 27, with the tight conversion. z is relative to the
    doubled shift.
    """
    return rdp_together([(z, sample_rate, steps)], "uniform", delta)


def rdp_together(
    parts: Sequence[tuple[float, float, int]],
    batches: Literal["uniform", "poisson"],
    delta: float,
) -> float:
    """Return the Rényi-DP ε of steps of several kinds, one after the other.

    Args:
        parts: z, sample rate and number of steps of each kind.
        batches: how all kinds draw their batches; `z` is as for `rdp_uniform` or `rdp`.
        delta: δ at which ε is stated.
    """
    if batches == "uniform":
        orders, divergences_of = WOR_ORDERS, _wor_rdp
    else:
        orders = tuple(dp_accounting.rdp.rdp_privacy_accountant.DEFAULT_RDP_ORDERS)
        divergences_of = poisson_rdp
    divergences = np.zeros(len(orders))
    for z, sample_rate, steps in parts:
        divergences += steps * np.array(divergences_of(z, sample_rate, orders))
    with quiet():
        return float(dp_accounting.rdp.compute_epsilon(orders, divergences, delta)[0])


@_composed()
def rdp_wor(
    z: float,
    sample_rate: float,
    steps: int,
    delta: float,
) -> float:
    """Return the Rényi-DP ε without replacement: orders 2 to 64, with the classic conversion.

    Wang, Balle & Kasiviswanathan 2019, Theorem 27.
    """
    divergences = [steps * each for each in _wor_rdp(z, sample_rate, WOR_ORDERS)]
    return rdp_classic(WOR_ORDERS, divergences, delta)


def rdp_classic(
    orders: Sequence[float],
    divergences: Sequence[float],
    delta: float,
) -> float:
    """Convert Rényi divergences to ε as the papers do (Mironov 2017, Proposition 3).

    ε is the minimum over the orders α of rdp(α) + log(1/δ)/(α − 1).
    """
    penalty = math.log(1 / delta)
    pairs = zip(orders, divergences, strict=True)
    return min(float(divergence) + penalty / (order - 1) for order, divergence in pairs)


@lru_cache(maxsize=64)
def _wor_rdp(
    z: float,
    sample_rate: float,
    orders: tuple[int, ...],
) -> tuple[float, ...]:
    """Return the Rényi divergences of one step without replacement, by dp-accounting."""
    # Only the rate matters, so any numbers with this ratio will do. These give it without rounding.
    drawn, examples = sample_rate.as_integer_ratio()
    event = dp_accounting.SampledWithoutReplacementDpEvent(
        examples, drawn, dp_accounting.GaussianDpEvent(z)
    )
    with quiet(), np.errstate(all="ignore"):
        accountant = dp_accounting.rdp.RdpAccountant(
            orders, dp_accounting.NeighboringRelation.REPLACE_ONE
        )
        return tuple(accountant.compose(event).rdp)


@lru_cache(maxsize=64)
def poisson_rdp(
    z: float,
    sample_rate: float,
    orders: tuple[float, ...],
) -> tuple[float, ...]:
    """Return the Rényi divergences of one Poisson-sampled step, by dp-accounting."""
    event = dp_accounting.PoissonSampledDpEvent(sample_rate, dp_accounting.GaussianDpEvent(z))
    with quiet():
        return tuple(dp_accounting.rdp.RdpAccountant(orders).compose(event).rdp)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence dp-accounting's warnings that an order did not converge: other orders bound ε."""
    log = logging.getLogger("absl")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def gdp_clt(
    z: float,
    sample_rate: float,
    steps: int,
    delta: float,
    batches: Literal["uniform", "poisson"] = "uniform",
) -> float:
    """Return ε by the central limit theorem of Gaussian DP (Bu, Dong, Long & Su 2020). NOT a bound.

    uniform: μ = √2·q√T·√(e^{1/z²}Φ(3/2z) + 3Φ(−1/2z) − 2), the default of deepee and TensorFlow
        Privacy.
    poisson: μ = q√T·√(e^{1/z²} − 1).
    """
    if steps == 0:
        return 0.0
    if z < 0.05:  # e^{1/z²} overflows, and the limit is far from the truth anyway
        return math.inf
    grown = math.exp(z**-2)
    variance = grown - 1
    if batches == "uniform":
        variance = float(2 * (grown * special.ndtr(1.5 / z) + 3 * special.ndtr(-0.5 / z) - 2))
    return gdp_epsilon(sample_rate * math.sqrt(steps * variance), delta)


# ------------------------------------------------------------------------- ε of a mechanism's steps


def tight_epsilon(
    mechanism: Mechanism,
    steps: int,
    delta: float,
) -> float:
    """Return the tight ε of a mechanism, by the PLD for its sampling and adjacency.

    Below `SMALL_DELTA`, it is the smaller of that and the Rényi-DP ε. Shuffled batches have ε = ∞,
    because no amplification theorem is used for them.

    Args:
        mechanism: mechanism of every step.
        steps: number of composed steps.
        delta: δ at which ε is stated.
    """
    high = _epsilon_of(mechanism, pld, pld_uniform, steps, delta)
    if delta >= SMALL_DELTA:
        return high
    # The grid of a PLD leaves out tails of about this probability. Rényi divergences do not.
    return min(high, rdp_epsilon(mechanism, steps, delta))


def rdp_epsilon(
    mechanism: Mechanism,
    steps: int,
    delta: float,
) -> float:
    """Return the Rényi-DP ε of a mechanism, a looser bound than `tight_epsilon`."""
    return _epsilon_of(mechanism, rdp, rdp_uniform, steps, delta)


def gdp_clt_epsilon(
    mechanism: Mechanism,
    steps: int,
    delta: float,
) -> float:
    """Return the ε of a mechanism by the central limit theorem of Gaussian DP. NOT a bound."""
    sampling = mechanism.sampling
    return gdp_clt(
        mechanism.z * sampling.shift,
        sampling.sample_rate,
        sampling.steps_of_one(steps),
        delta,
        "uniform" if sampling.scheme == "uniform" else "poisson",
    )


def _epsilon_of(
    mechanism: Mechanism,
    poisson: Epsilon,
    uniform: Epsilon,
    steps: int,
    delta: float,
) -> float:
    """Return ε by the accountant for the mechanism's sampling; ∞ for shuffled batches."""
    sampling = mechanism.sampling
    if sampling.scheme == "shuffled":
        return math.inf if steps else 0.0
    accountant = uniform if sampling.scheme == "uniform" else poisson
    own_steps = sampling.steps_of_one(steps)
    return accountant(mechanism.z, sampling.sample_rate, own_steps, delta)


def tight_interval(
    mechanism: Mechanism,
    steps: int,
    delta: float,
) -> Bounds:
    """Return a lower and an upper bound on ε. They differ only for fixed-size batches.

    For those, no distribution is known that is exact under composition. The true ε lies between the
    ε that two actual data sets reach and the ε that is proven. Quote the upper bound.
    """
    high = tight_epsilon(mechanism, steps, delta)
    if mechanism.sampling.scheme != "uniform":
        return high, high
    low = pld_uniform_at_least(mechanism.z, mechanism.sampling.sample_rate, steps, delta)
    return min(low, high), max(low, high)  # if both are exact, rounding can exchange them


def example_epsilon(
    mechanism: Mechanism,
    steps: int,
    delta: float,
) -> float:
    """Return the tight ε of ONE example of an owner who is the unit of privacy.

    Removing the example replaces the owner's share by another, which may move the sum by 2C.
    """
    sampling = mechanism.sampling
    if sampling.adjacency == "replace_one":  # it already covers a replaced share
        return tight_epsilon(mechanism, steps, delta)
    own_steps = sampling.steps_of_one(steps)
    return pld_replaced(mechanism.z, sampling.sample_rate, own_steps, delta)


def patient_epsilon(
    mechanism: Mechanism, examples_per_patient: int, steps: int, delta: float
) -> float:
    """Return the tight ε of a PATIENT, all of whose examples come or go together.

    The examples are clipped one by one, so j drawn examples move the sum by at most j bounds. The
    distributions of j, and proofs, are in `loss_distribution.py`. With one example, this is
    `tight_epsilon`. With Poisson sampling, it never exceeds the generic group-privacy bound; with
    fixed-size batches, it may by a few per cent. With cyclic sampling, it is ∞, because steps of
    different subsets do not move the sums in orthogonal directions.

    Args:
        mechanism: mechanism of every step.
        examples_per_patient: largest number of examples of a patient.
        steps: number of composed steps.
        delta: δ at which ε is stated.

    Raises:
        ValueError: the data set has fewer examples than the patient.
    """
    sampling, z, count = mechanism.sampling, mechanism.z, examples_per_patient
    if not 1 <= count <= sampling.cap_examples(count):
        raise ValueError(f"a patient has 1 to {sampling.records} examples, not {count}")
    if count == 1 or sampling.scheme == "shuffled":
        return tight_epsilon(mechanism, steps, delta)
    if sampling.cycle > 1:
        return math.inf if steps else 0.0
    if z < HOPELESS:
        return pld(z / count, 1.0, steps, delta)
    noise, drawn = shifts_of_step(z, sampling, count)
    if drawn == EVERY_STEP:
        return pld(noise, 1.0, steps, delta)
    known = _closed_form(z, sampling.sample_rate, steps, delta)
    if known is not None:
        return known
    return composed_epsilon(laws_of(sampling), z, drawn, steps, delta)


def laws_of(sampling: Sampling) -> LawsOf:
    """Return the function that computes the laws of a step."""
    return poisson_laws if sampling.adjacency == "add_or_remove_one" else uniform_laws


@lru_cache(maxsize=1024)
def composed_epsilon(
    laws_of_step: LawsOf,
    z: float,
    drawn: Mixture,
    steps: int,
    delta: float,
) -> float:
    """Return the tight ε of steps with the laws of `laws_of_step`.

    It is at most that of steps that all draw the most examples that any of them does, apart from a
    share `CUT` of δ. This is all that is known where doubles do not hold the laws.
    """
    count, more = most_examples(drawn, CUT * delta / steps)
    unsampled = pld(z / max(count, 1), 1.0, steps, delta - steps * more)
    if not has_law(z, drawn, laws_of_step is uniform_laws):
        return unsampled
    return min(unsampled, epsilon(laws_of_step(z, drawn, steps, delta), steps, delta))


def most_examples(drawn: Mixture, probability: float) -> tuple[int, float]:
    """Return a number of examples, and the probability, at most as large as given, of more drawn.

    `excess` counts as more, whatever its probability.
    """
    from_largest = np.logaddexp.accumulate(drawn.log_weights[::-1])
    more = np.exp(from_largest[::-1][1:])  # P(more than j), of j from 0
    number = int(np.searchsorted(-more, -probability))
    return number, drawn.excess + float(more[number:].max(initial=0.0))


def patient_interval(
    mechanism: Mechanism, examples_per_patient: int, steps: int, delta: float
) -> Bounds:
    """Return a lower and an upper bound on a patient's ε; see `tight_interval`."""
    sampling, z, count = mechanism.sampling, mechanism.z, examples_per_patient
    if count == 1:
        return tight_interval(mechanism, steps, delta)
    high = patient_epsilon(mechanism, count, steps, delta)
    if sampling.cycle > 1:
        return tight_epsilon(mechanism, steps, delta), high
    known = _closed_form(z, sampling.sample_rate, steps, delta, hopeless=0.0)
    if sampling.scheme != "uniform" or known is not None:
        return high, high
    low = _at_least(z, patients_share(sampling, count), steps, delta)
    return min(low, high), max(low, high)  # as in `tight_interval`


def shifts_of_step(
    z: float,
    sampling: Sampling,
    count: int,
) -> tuple[float, Mixture]:
    """Return the noise in units of one shift, and the distribution of the shifts of a step.

    Args:
        z: noise standard deviation in units of one example's largest shift.
        sampling: how a step draws its examples.
        count: number of a patient's examples.
    """
    num_sure = _always_drawn(sampling, count)
    if num_sure:
        return z / num_sure, EVERY_STEP
    return z, _draws_of_step(sampling, count)


def shifts_at_worst(
    z: float,
    samplings: Sequence[Sampling],
    count: int,
) -> tuple[float, Mixture]:
    """Return `shifts_of_step` of a step whose ε is at least that of each of some samplings.

    Args:
        z, count: as for `shifts_of_step`. A training set may be too small for so many examples.
        samplings: the samplings.
    """
    if len(samplings) == 1:
        (sampling,) = samplings
        return shifts_of_step(z, sampling, sampling.cap_examples(count))
    nums_sure = [_always_drawn(each, each.cap_examples(count)) for each in samplings]
    if all(nums_sure):
        return z / max(nums_sure), EVERY_STEP
    laws = []
    for sampling, num_sure in zip(samplings, nums_sure, strict=True):
        sure_law = Mixture((-math.inf,) * num_sure + (0.0,))
        held = sampling.cap_examples(count)
        laws.append(sure_law if num_sure else _draws_of_step(sampling, held))
    return z, most_drawn(laws)


def _always_drawn(sampling: Sampling, count: int) -> int:
    """Return how many examples each step is taken to draw; 0 if sampling hides how many."""
    if sampling.sample_rate >= 1:
        return count
    if sampling.scheme == "poisson" or count == 1:
        return 0
    batch = sampling.batch_size
    # Every batch then holds some of the patient's examples, so sampling hides nothing.
    return min(count, batch) if count + batch > sampling.records else 0


def _draws_of_step(sampling: Sampling, count: int) -> Mixture:
    """Return the distribution of the number of `count` examples that a step draws."""
    if count == 1:
        return one_example(sampling.sample_rate)
    if sampling.scheme == "poisson":
        return patients_draws(sampling.sample_rate, count)
    return patients_share(sampling, count)


def patients_draws(rate: float, count: int) -> Mixture:
    """Return the distribution of the number of a patient's examples in a Poisson batch."""
    drawn = np.arange(count)
    log_odds = math.log(rate) - math.log1p(-rate)
    log_ratios = np.log(count - drawn) - np.log(drawn + 1) + log_odds
    return several_examples(_log_chances(log_ratios))


def patients_share(sampling: Sampling, count: int) -> Mixture:
    """Return the distribution of the number of a patient's examples in a fixed-size batch."""
    batch = sampling.batch_size
    fewest = max(0, count + batch - sampling.records)
    drawn = np.arange(fewest, min(count, batch))
    log_pairs = np.log(count - drawn) + np.log(batch - drawn)
    others_left = sampling.records - count - batch + drawn + 1
    log_chances = _log_chances(log_pairs - np.log(drawn + 1) - np.log(others_left))
    return several_examples(np.append(np.full(fewest, -math.inf), log_chances))


def _log_chances(log_ratios: np.ndarray) -> np.ndarray:
    """Return the log-probabilities of 0, 1, ..., of which `log_ratios` are the differences.

    The probability of 0 keeps its digits, however close to 1 it is. Differences of log-gamma
    functions, as in scipy, lose them all where the data set has 10⁹ examples.
    """
    log_weights = np.append(0.0, np.cumsum(log_ratios))
    largest = int(np.argmax(log_weights))
    log_weights -= log_weights[largest]
    others = np.exp(np.delete(log_weights, largest))
    return log_weights - math.log1p(others.sum())


def affordable_steps(
    mechanism: Mechanism,
    delta: float,
    max_epsilon: float,
    limit: int,
) -> int:
    """Return the largest number of steps up to `limit` whose tight ε is within `max_epsilon`."""
    if tight_epsilon(mechanism, limit, delta) <= max_epsilon:
        return limit
    low, high = 0, limit  # ε grows with steps; invariant: ε(low) ≤ max_epsilon < ε(high)
    while high - low > 1:
        middle = (low + high) // 2
        if tight_epsilon(mechanism, middle, delta) <= max_epsilon:
            low = middle
        else:
            high = middle
    return low
