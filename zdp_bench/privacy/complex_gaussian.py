"""The complex Gaussian mechanism: what both ζ papers prove, and what is true.

    release  q(D) + ψ,  q(D) ∈ ℂⁿ,  ‖q(D) − q(D′)‖₂ ≤ Δ

Everything follows from one number, μ = the Mahalanobis length of the largest shift (Dong, Roth & Su
2019, Theorem 2.7): the mechanism is exactly μ-GDP, with privacy loss N(μ²/2, μ²). The papers differ
in what they call σ:

    2021 (Ziller et al., Definition 6)   ψ ~ N_C(0, σ²I): σ²/2 on each part        μ = √2·Δ/σ
    2024 (Riess et al., section 3)       ψ with σ² on each part, correlation ρ     μ = Δ/σ at ρ = 0

Where the 2021 paper is off. Its Theorems 1 and 2 put N_C(0, σ²I) into the REAL mechanism's
formulas, as if each part had σ². Their proofs (eqs. 7 and 10) take the complex covariance σ²I for
the real one; the density of N_C(0, σ²) at w is exp(−|w|²/σ²)/(πσ²), without the 2 of the real
exponent. So the privacy loss of neighbours at distance Δ has mean Δ²/σ² and variance 2Δ²/σ², where
eq. 7 says Δ²/(2σ²) and Δ²/σ²; a Monte-Carlo run of the mechanism shows it (Δ = σ = 1: mean 1.00,
variance 2.00, not 0.5 and 1; `tests/privacy/test_complex_gaussian.py`). Δ/σ must read √2·Δ/σ in its
eq. 5, and its eq. 8 must ask for σ² ≥ αΔ²/ρ, twice as much. The `published_2021_*` functions below
are therefore claims, not bounds.
"""

from __future__ import annotations

import math

import dp_accounting
import numpy as np
from scipy.stats import norm

# ------------------------------------------------------------------------------------- from μ alone


def gdp_delta(mu: float, epsilon: float) -> float:
    """Return the exact δ(ε) of a μ-GDP mechanism, μ > 0.

    Dong, Roth & Su 2019, Corollary 2.13; Balle & Wang 2018, Theorem 8.
    """
    first = norm.cdf(-epsilon / mu + mu / 2)
    return max(0.0, float(first - math.exp(epsilon + norm.logcdf(-epsilon / mu - mu / 2))))


def gdp_epsilon(mu: float, delta: float) -> float:
    """Return the ε at which a μ-GDP mechanism has this δ; ∞ for μ = ∞ or δ = 0, and 0 for μ = 0.

    Above μ = 1000 double precision no longer solves the exact equation; there the first term of
    δ(ε) alone gives an upper bound, too high by less than 1 part in 10⁶.
    """
    if mu == 0:
        return 0.0
    if math.isinf(mu) or delta <= 0:
        return math.inf
    if mu > 1000:
        return max(0.0, mu * mu / 2 - mu * float(norm.ppf(delta)))
    with np.errstate(divide="ignore"):  # it takes the logarithm of a δ that is 0 far in the tail
        return float(dp_accounting.get_epsilon_gaussian(1 / mu, delta))


def gdp_rdp(mu: float, alpha: float) -> float:
    """Return the Rényi divergence of order α of a μ-GDP Gaussian mechanism: αμ²/2 (Mironov 2017,
    Corollary 3).
    """
    return alpha * mu * mu / 2


# ------------------------------------------------------------------------------ μ of the mechanisms


def circular_mu(sigma: float, sensitivity: float = 1.0) -> float:
    """Return μ under ψ ~ N_C(0, σ²I), total variance σ² (2021, Definition 6): √2·Δ/σ."""
    return math.sqrt(2) * sensitivity / sigma


def per_component_mu(sigma: float, sensitivity: float = 1.0) -> float:
    """Return μ with variance σ² on the real and on the imaginary part (2024, Corollary 1): Δ/σ."""
    return sensitivity / sigma


def correlated_mu(
    sigma: float,
    rho: float,
    sensitivity: float = 1.0,
    real: float | None = None,
    imaginary: float | None = None,
) -> float:
    """Return μ with variance σ² on each part and correlation ρ between the two (2024, Theorem 1,
    eq. 3).

        μ² = Δ²/(σ²(1−ρ²)) + 2|ρ|·Δ_re·Δ_im/(σ²(1−ρ²))

    Args:
        real, imaginary: the sensitivities Δ_re and Δ_im of the two parts. By default those of the
            worst split of one shift of length Δ, Δ_re = Δ_im = Δ/√2; then μ = Δ/(σ√(1−|ρ|)), which
            is attained.

    Returns:
        ∞ at |ρ| = 1: a direction gets no noise.
    """
    if abs(rho) >= 1:
        return math.inf
    real = sensitivity / math.sqrt(2) if real is None else real
    imaginary = sensitivity / math.sqrt(2) if imaginary is None else imaginary
    return math.sqrt((sensitivity**2 + 2 * abs(rho) * real * imaginary) / (sigma**2 * (1 - rho**2)))


# -------------------------------------------------------------------------- the 2021 paper's claims


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
