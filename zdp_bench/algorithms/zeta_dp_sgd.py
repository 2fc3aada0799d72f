"""ζ-DP-SGD for complex networks (Ziller et al. 2021 and Riess et al. 2024, Algorithms 1).

The two papers differ in two conventions, and both are here by name:

    gradient: autograd    clip PyTorch's `.grad` = 2 ∂L/∂θ̄ (2024, eq. 5)
              wirtinger   clip ∂L/∂θ̄, half of `.grad`; its bound B is 2B on `.grad` (2021, eq. 13
                          and appendix A.1)
    noise:    per_component   N(0, σ²B²) on the real AND on the imaginary part: z = σ (2024)
              circular        N_C(0, σ²B²), that is σ²B²/2 on each part: z = σ/√2 (2021,
                              Definition 6)

The 2021 paper's Theorems 1 and 2 give the circular mechanism z = σ. They are off by √2: they put
N_C(0, σ²I) into the REAL mechanism's formulas, as if each part had σ². Their proofs (eqs. 7 and 10)
take the complex covariance σ²I for the real one; the density of N_C(0, σ²) at w is
exp(−|w|²/σ²)/(πσ²), without the 2 of the real exponent. So the privacy loss of neighbours at
distance Δ has mean Δ²/σ² and variance 2Δ²/σ², where eq. 7 says Δ²/(2σ²) and Δ²/σ²; a Monte-Carlo
run of the mechanism shows it (`tests/privacy/test_accounting.py`). Δ/σ must read √2·Δ/σ in its
eq. 5, and its eq. 8 must ask for σ² ≥ αΔ²/ρ, twice as much.
"""

from __future__ import annotations

import math
from typing import Literal

from torch import Tensor

from zdp_bench.algorithms import Problem, mean, parameter_block
from zdp_bench.gradients import Batch, Engine, Shares, clipped_sum, reference
from zdp_bench.gradients.clipping import groups, trainable
from zdp_bench.privacy.mechanism import Block, Mechanism
from zdp_bench.registry import register


@register("algorithm", "zeta_dp_sgd")
class ZetaDPSGD:
    """DP-SGD on complex, real or mixed parameters, clipped jointly, or (`per_layer`) each of the L
    layers at B/√L; with `gamma`, automatically (Bu et al. 2022).

    Formal guarantees: an example's share is at most `max_grad_norm` in the chosen gradient
    convention; z = noise_multiplier for `per_component` noise and noise_multiplier/√2 for
    `circular` (under Poisson sampling). Real parameters of a mixed network get N(0, σ²B²) under
    both.
    """

    private = True
    plain_gradients = True
    takes_shares = True
    sums_in_float32 = True  # even if the forward pass runs in bfloat16

    def __init__(
        self,
        problem: Problem,
        *,
        noise_multiplier: float,
        max_grad_norm: float,
        noise: Literal["per_component", "circular"] = "per_component",
        gradient: Literal["autograd", "wirtinger"] = "autograd",
        per_layer: bool = False,
        gamma: float | None = None,
        gradients: Engine = "auto",
    ) -> None:
        self.problem = problem
        self.noise_multiplier = noise_multiplier
        self.max_grad_norm = max_grad_norm
        self.noise = noise
        self.per_layer = per_layer
        self.gamma = gamma
        self.complex_scale = 0.5 if gradient == "wirtinger" else 1.0
        self.gradients: Engine = gradients

    def mechanism(self) -> Mechanism:
        std = self.noise_multiplier * self.max_grad_norm
        complex_std = std / math.sqrt(2) if self.noise == "circular" else std

        def block(name: str) -> Block:
            parameter = parameters[name]
            if parameter.is_complex():
                return parameter_block(name, parameter, self.max_grad_norm, complex_std, "circular")
            return parameter_block(name, parameter, self.max_grad_norm, std, "real")

        parameters = trainable(self.problem.model)
        return Mechanism(tuple(block(name) for name in parameters), self.problem.sampling)

    def accumulate(
        self, total: dict[str, Tensor], batch: Batch, shares: Shares | None = None
    ) -> None:
        clipped_sum(
            self.problem.model,
            self.problem.loss,
            batch,
            self.max_grad_norm,
            per_layer=self.per_layer,
            gamma=self.gamma,
            complex_scale=self.complex_scale,
            engine=self.gradients,
            shares=shares,
            into=total,
        )

    def contributions(self, batch: Batch, shares: Shares | None = None) -> dict[str, Tensor]:
        gradients = reference.share_gradients(
            self.problem.model, self.problem.loss, batch, shares, complex_scale=self.complex_scale
        )
        together = groups(self.problem.model, self.max_grad_norm, self.per_layer)
        return reference.clip(gradients, together, self.gamma)[0]

    postprocess = staticmethod(mean)
