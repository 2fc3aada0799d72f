"""The ε of the best of a random number of runs, against the paper's theorems written out."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting.rdp import compute_epsilon
from dp_accounting.rdp.rdp_privacy_accountant import DEFAULT_RDP_ORDERS, compute_delta

from zdp_bench.privacy.accounting import poisson_rdp, rdp, tight_epsilon
from zdp_bench.privacy.mechanism import Mechanism, Sampling
from zdp_bench.privacy.selection import Law, draw_number, selected_epsilon

FULL = Sampling("full", 1.0, 1000, 1000)
POISSON = Sampling("poisson", 0.05, 50, 1000)
UNIFORM = Sampling("uniform", 0.05, 50, 1000)
ORDERS = np.array(DEFAULT_RDP_ORDERS)
DELTA = 1e-5


def theorem_2(rates: np.ndarray, gamma: float, shape: float, mean: float) -> np.ndarray:
    """Papernot & Steinke 2022: the truncated negative binomial, with the best second order."""
    hat = (1 + shape) * ((1 - 1 / ORDERS) * rates + math.log(1 / gamma) / ORDERS)
    return rates + hat.min() + math.log(mean) / (ORDERS - 1)


def theorem_6(rates: np.ndarray, mean: float) -> np.ndarray:
    """Likewise: Poisson, with ε̂ = log(1 + 1/(λ − 1)) and its δ̂."""
    deltas = [compute_delta(ORDERS, rates, math.log1p(1 / (order - 1)))[0] for order in ORDERS]
    return rates + mean * np.array(deltas) + math.log(mean) / (ORDERS - 1)


def logarithmic_mean(gamma: float) -> float:
    return (1 / gamma - 1) / math.log(1 / gamma)


@pytest.mark.parametrize("mean", [1.5, 10, 200])
@pytest.mark.parametrize(("z", "steps"), [(4.0, 1), (8.0, 16)])
def test_gaussian_runs_follow_the_theorems(z: float, steps: int, mean: float) -> None:
    rates = steps * ORDERS / (2 * z**2)  # of the Gaussian mechanism
    geometric = theorem_2(rates, 1 / mean, 1.0, mean)
    expected = compute_epsilon(ORDERS, geometric, DELTA)[0]
    got = selected_epsilon(z, FULL, steps, "geometric", mean, DELTA)
    assert got == pytest.approx(expected, rel=1e-6)
    expected = compute_epsilon(ORDERS, theorem_6(rates, mean), DELTA)[0]
    got = selected_epsilon(z, FULL, steps, "poisson", mean, DELTA)
    assert got == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("gamma", [0.5, 0.05, 0.001])
def test_the_logarithmic_law_is_theorem_2_at_eta_0(gamma: float) -> None:
    mean = logarithmic_mean(gamma)
    rates = ORDERS / (2 * 4.0**2)
    expected = compute_epsilon(ORDERS, theorem_2(rates, gamma, 0.0, mean), DELTA)[0]
    got = selected_epsilon(4.0, FULL, 1, "logarithmic", mean, DELTA)
    assert got == pytest.approx(expected, rel=1e-6)


def test_poisson_batches_enter_by_their_own_divergences() -> None:
    rates = 40 * np.array(poisson_rdp(2.0, 0.05, tuple(ORDERS)))
    expected = compute_epsilon(ORDERS, theorem_2(rates, 0.1, 1.0, 10), DELTA)[0]
    got = selected_epsilon(2.0, POISSON, 40, "geometric", 10, DELTA)
    assert got == pytest.approx(expected, rel=1e-6)


def test_of_one_run_theorem_2_costs_more_than_the_run_and_at_most_twice_its_orders() -> None:
    """E[K] = 1 means one run, always; the theorem's bound is then loose, but never too low."""
    run = rdp(4.0, 1.0, 1, DELTA)
    assert run <= selected_epsilon(4.0, FULL, 1, "logarithmic", 1, DELTA) <= 2.2 * run


@pytest.mark.parametrize("sampling", [FULL, POISSON, UNIFORM], ids=lambda one: one.scheme)
@pytest.mark.parametrize("law", ["poisson", "geometric", "logarithmic"])
def test_the_best_costs_more_than_a_run_and_grows_with_the_mean(
    sampling: Sampling, law: Law
) -> None:
    one = tight_epsilon(Mechanism.of_z(4.0, sampling), 20, DELTA)
    spent = [selected_epsilon(4.0, sampling, 20, law, mean, DELTA) for mean in (2, 20, 200)]
    assert one < spent[0] < spent[1] < spent[2]


def test_many_runs_cost_far_less_than_their_composition() -> None:
    """What the paper is for: its bound grows with the logarithm of the number of runs."""
    together = tight_epsilon(Mechanism.of_z(4.0, POISSON), 100 * 20, DELTA)
    assert selected_epsilon(4.0, POISSON, 20, "poisson", 100, DELTA) < 0.75 * together


def test_without_noise_nothing_is_promised() -> None:
    shuffled = Sampling("shuffled", 0.05, 50, 1000)
    assert selected_epsilon(0.0, POISSON, 20, "poisson", 10, DELTA) == math.inf
    assert selected_epsilon(4.0, shuffled, 20, "poisson", 10, DELTA) == math.inf


@pytest.mark.parametrize("law", ["poisson", "geometric", "logarithmic"])
@pytest.mark.parametrize("mean", [1, 3, 20])
def test_numbers_have_the_mean_that_was_asked_for(law: Law, mean: int) -> None:
    random = np.random.default_rng(0)
    drawn = [draw_number(law, mean, random) for _ in range(4000)]
    assert np.mean(drawn) == pytest.approx(mean, rel=0.15)
    assert min(drawn) >= (0 if law == "poisson" else 1)


def test_a_number_is_drawn_anew_each_time() -> None:
    assert len({draw_number("poisson", 10**6) for _ in range(8)}) > 4
