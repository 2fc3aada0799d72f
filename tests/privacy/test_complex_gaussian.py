"""The complex Gaussian mechanism, run: its privacy loss is what the formulas say, and not what the
2021 theorems say.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.privacy import gaussian_formulas as formulas
from zdp_bench.privacy.complex_gaussian import gdp_epsilon
from zdp_bench.privacy.mechanism import Block


def privacy_losses(covariance: np.ndarray, shift: np.ndarray, draws: int = 400_000) -> np.ndarray:
    """log density ratio of neighbours at outputs of the first, for noise on (re, im) of one complex
    number; from densities.
    """
    rng = np.random.default_rng(7)
    noise = rng.standard_normal((draws, 2)) @ np.linalg.cholesky(covariance).T
    inverse = np.linalg.inv(covariance)

    def log_density(at: np.ndarray) -> np.ndarray:
        return -0.5 * np.einsum("ni,ij,nj->n", at, inverse, at)

    return log_density(noise) - log_density(noise + shift)


@pytest.mark.parametrize(("sigma", "sensitivity"), [(1.0, 1.0), (2.0, 0.5), (0.8, 1.2)])
def test_circular_loss_is_twice_what_the_2021_paper_says(sigma: float, sensitivity: float) -> None:
    angle = 0.9
    shift = sensitivity * np.array([math.cos(angle), math.sin(angle)])
    losses = privacy_losses(np.eye(2) * sigma**2 / 2, shift)  # N_C(0, σ²): σ²/2 on each part
    published_mean = sensitivity**2 / (2 * sigma**2)  # eq. 7
    assert losses.mean() == pytest.approx(2 * published_mean, rel=0.02)
    assert losses.var() == pytest.approx(2 * (2 * published_mean), rel=0.02)
    mu = formulas.circular_mu(sigma, sensitivity)
    assert losses.mean() == pytest.approx(mu**2 / 2, rel=0.02)
    assert losses.var() == pytest.approx(mu**2, rel=0.02)


def test_circular_delta_and_rdp_are_measured() -> None:
    sigma, epsilon, alpha = 1.5, 0.7, 3.0
    losses = privacy_losses(np.eye(2) * sigma**2 / 2, np.array([0.6, 0.8]))
    measured = np.mean(np.maximum(0.0, 1 - np.exp(epsilon - losses)))
    assert formulas.gdp_delta(formulas.circular_mu(sigma), epsilon) == pytest.approx(
        measured, rel=0.02
    )
    assert (
        formulas.published_2021_delta(sigma, epsilon) < 0.6 * measured
    )  # Theorem 1 promises too much
    divergence = math.log(np.mean(np.exp((alpha - 1) * losses))) / (alpha - 1)
    assert formulas.gdp_rdp(formulas.circular_mu(sigma), alpha) == pytest.approx(
        divergence, rel=0.05
    )
    # Theorem 2 is half of it
    assert formulas.published_2021_rdp(sigma, alpha) == pytest.approx(divergence / 2, rel=0.05)


@pytest.mark.parametrize("rho", [0.0, 0.3, -0.6, 0.95])
def test_correlated_mu_is_attained_by_the_worst_shift(rho: float) -> None:
    sigma, sensitivity = 1.3, 0.8
    covariance = sigma**2 * np.array([[1, rho], [rho, 1]])
    inverse = np.linalg.inv(covariance)
    angles = np.linspace(0, np.pi, 2001)
    shifts = sensitivity * np.stack([np.cos(angles), np.sin(angles)], axis=1)
    lengths = np.sqrt(np.einsum("ni,ij,nj->n", shifts, inverse, shifts))
    assert formulas.correlated_mu(sigma, rho, sensitivity) == pytest.approx(lengths.max(), rel=1e-6)
    assert formulas.correlated_mu(sigma, rho, sensitivity) == pytest.approx(
        sensitivity / (sigma * math.sqrt(1 - abs(rho)))
    )
    block = Block("b", (1,), "complex64", sensitivity, sigma, "correlated", rho=rho)
    assert formulas.correlated_mu(sigma, rho, sensitivity) == pytest.approx(
        sensitivity / block.weakest_std
    )
    worst = shifts[lengths.argmax()]
    assert privacy_losses(covariance, worst).mean() == pytest.approx(
        lengths.max() ** 2 / 2, rel=0.02
    )


def test_theorem_1_of_2024_with_known_parts() -> None:
    assert formulas.correlated_mu(1.0, 0.0, 2.0) == formulas.per_component_mu(1.0, 2.0) == 2.0
    assert formulas.correlated_mu(1.0, 0.5, 1.0, real=1.0, imaginary=0.0) == pytest.approx(
        math.sqrt(1 / 0.75)
    )
    # the paper's loose split
    assert formulas.correlated_mu(1.0, 0.5, 1.0, real=1.0, imaginary=1.0) > formulas.correlated_mu(
        1.0, 0.5, 1.0
    )
    assert formulas.correlated_mu(1.0, -1.0) == math.inf


@pytest.mark.parametrize("mu", [1e-3, 0.1, 1.0, 15.0, 900.0])
@pytest.mark.parametrize("delta", [1e-10, 1e-5, 0.1])
def test_epsilon_inverts_delta(mu: float, delta: float) -> None:
    epsilon = gdp_epsilon(mu, delta)
    if epsilon == 0:
        assert formulas.gdp_delta(mu, 0.0) <= delta
    elif epsilon < 600:  # beyond, e^ε is no double
        assert formulas.gdp_delta(mu, epsilon) == pytest.approx(delta, rel=1e-6)


def test_epsilon_at_the_edges() -> None:
    assert gdp_epsilon(0.0, 1e-5) == 0.0
    assert gdp_epsilon(math.inf, 1e-5) == gdp_epsilon(1.0, 0.0) == math.inf
    assert gdp_epsilon(1000.1, 1e-5) == pytest.approx(gdp_epsilon(999.9, 1e-5), rel=1e-3)
    assert gdp_epsilon(1000.1, 1e-5) > gdp_epsilon(999.9, 1e-5)
    assert gdp_epsilon(1e5, 1e-5) == pytest.approx(5e9, rel=1e-3)
