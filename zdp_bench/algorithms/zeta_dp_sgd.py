"""ζ-DP-SGD for complex networks (Ziller et al. 2021 and Riess et al. 2024, Algorithms 1).

The two papers differ in two conventions. Options select them:

    gradient: autograd    clip PyTorch's `.grad` = 2 ∂L/∂θ̄ (2024, eq. 5)
              wirtinger   clip ∂L/∂θ̄, half of `.grad`; a bound B on it is 2B on `.grad` (2021,
                          eq. 13 and appendix A.1)
    noise:    per_component   N(0, σ²B²) on the real AND on the imaginary part: z = σ (2024)
              circular        N_C(0, σ²B²), that is, variance σ²B²/2 on each part: z = σ/√2 (2021,
                              Definition 6)

According to the 2021 paper's Theorems 1 and 2, z = σ for the circular mechanism. This is off by √2,
because they use N_C(0, σ²I) in the REAL mechanism's formulas, as if each part had variance σ². The
proofs (eqs. 7 and 10) mistake the complex covariance σ²I for the real one. The density of
N_C(0, σ²) at w is exp(−|w|²/σ²)/(πσ²), without the 2 of the real exponent. The privacy loss of
neighbours at distance Δ therefore has mean Δ²/σ² and variance 2Δ²/σ², instead of Δ²/(2σ²) and Δ²/σ²
as in eq. 7. A Monte-Carlo simulation of the mechanism confirms this
(`tests/privacy/test_accounting.py`). In eq. 5, Δ/σ should read √2·Δ/σ, and eq. 8 should require
σ² ≥ αΔ²/ρ, twice as much.
"""

from __future__ import annotations

import math
from typing import Literal

from zdp_bench.algorithms import Problem
from zdp_bench.algorithms.dp_sgd import DPSGD
from zdp_bench.gradients import Engine
from zdp_bench.registry import register


@register("algorithm", "zeta_dp_sgd")
class ZetaDPSGD(DPSGD):
    """DP-SGD on complex, real or mixed parameters.

    Formal guarantees: the norm of a share is at most `max_grad_norm` in the chosen gradient
    convention. Under Poisson sampling, z is noise_multiplier for `per_component` noise and
    noise_multiplier/√2 for `circular` noise. Real parameters of a mixed network get N(0, σ²B²) in
    both cases.

    Args:
        noise, gradient: see the module's docstring. Other arguments are those of `DPSGD`.
    """

    takes_complex = True

    def __init__(
        self,
        problem: Problem,
        *,
        noise_multiplier: float,
        max_grad_norm: float,
        clip_quantile: float | None = None,
        start_steps: int | None = None,
        noise: Literal["per_component", "circular"] = "per_component",
        gradient: Literal["autograd", "wirtinger"] = "autograd",
        per_layer: bool = False,
        gamma: float | None = None,
        gradients: Engine = "auto",
    ) -> None:
        self.complex_divisor = math.sqrt(2) if noise == "circular" else 1.0
        self.complex_scale = 0.5 if gradient == "wirtinger" else 1.0
        super().__init__(
            problem,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            clip_quantile=clip_quantile,
            start_steps=start_steps,
            per_layer=per_layer,
            gamma=gamma,
            gradients=gradients,
        )
