"""The closed formulas of the complex Gaussian mechanism, true and as published; see
`zdp_bench.privacy.accounting`.
"""

from __future__ import annotations

import math

from scipy.stats import norm


def gdp_delta(mu: float, epsilon: float) -> float:
    """Return the exact δ(ε) of a μ-GDP mechanism, μ > 0.

    Dong, Roth & Su 2019, Corollary 2.13; Balle & Wang 2018, Theorem 8.
    """
    first = norm.cdf(-epsilon / mu + mu / 2)
    return max(0.0, float(first - math.exp(epsilon + norm.logcdf(-epsilon / mu - mu / 2))))


def gdp_rdp(mu: float, alpha: float) -> float:
    """Return the Rényi divergence of order α of a μ-GDP Gaussian mechanism: αμ²/2 (Mironov 2017,
    Corollary 3).
    """
    return alpha * mu * mu / 2


def circular_mu(sigma: float, sensitivity: float = 1.0) -> float:
    """Return μ under ψ ~ N_C(0, σ²I), total variance σ² (2021, Definition 6): √2·Δ/σ."""
    return math.sqrt(2) * sensitivity / sigma


def correlated_mu(sigma: float, rho: float, sensitivity: float = 1.0) -> float:
    """Return μ with variance σ² on each part and correlation ρ between the two: Δ/(σ√(1−|ρ|)).

    2024, Theorem 1, eq. 3: μ² = (Δ² + 2|ρ|·Δ_re·Δ_im)/(σ²(1−ρ²)), at its worst split of a shift,
    Δ_re = Δ_im = Δ/√2, which is attained.
    """
    parts = sensitivity / math.sqrt(2)
    return math.sqrt((sensitivity**2 + 2 * abs(rho) * parts**2) / (sigma**2 * (1 - rho**2)))


def published_2021_delta(sigma: float, epsilon: float, sensitivity: float = 1.0) -> float:
    """Return δ(ε) as Theorem 1 of Ziller et al. 2021 states it (eq. 5): too small.

    True is `gdp_delta(circular_mu(σ, Δ), ε)`.
    """
    return gdp_delta(sensitivity / sigma, epsilon)


def published_2021_rdp(sigma: float, alpha: float, sensitivity: float = 1.0) -> float:
    """Return ρ(α) as Theorem 2 of Ziller et al. 2021 states it (eq. 8).

    It is half of the true `gdp_rdp(circular_mu(σ, Δ), α)`.
    """
    return gdp_rdp(sensitivity / sigma, alpha)
