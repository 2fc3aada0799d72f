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
eq. 5, and its eq. 8 must ask for σ² ≥ αΔ²/ρ, twice as much.
"""

from __future__ import annotations

import math

import dp_accounting
import numpy as np
from scipy.stats import norm


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
