"""GReDP (Wang et al. 2024): clip and noise the gradient's spectrum, and keep the real part.

    Σᵢ clip(F(gᵢ), C/√L)  + ξ  →  F⁻¹  →  real part

Each of the L layers is clipped at C/√L. (The paper's Algorithm 2, read literally, clips every layer
at c and draws noise per sample; here it is drawn once per batch.) The result is V + noise, whatever
ξ is, so the noise alone distinguishes the algorithms:

    noise: sound     ξ = F(white noise), N(0, σ²C²) in every real dimension: z = σ, as per-layer
                     DP-SGD.
           complex   its Theorem 1: N(0, σ²C²/2) on each part. The real part is V + N(0, σ²C²/2):
                     DP-SGD at z = σ/√2, not DP-SGD with half the variance for free, as the paper
                     has it.
           real      its Corollary 1 and Algorithm 2: N(0, σ²C²) on real parts only. F⁻¹ of it has
                     covariance σ²C²/2·(I + R), R the reversal of the index: the odd part of the
                     gradient is released without noise. z = 0, ε = ∞.
           as_published   the same as real, under every algorithm's name for its paper's text.

    spectrum: kernel   of the gradient itself, over a kernel or circulant block: Theorem 1's F(V).
                       Norms are those of gradients.
              padded   of the whole correlation, eq. 15 taken literally, as in Spectral-DP. Norms
                       are larger.
"""

from __future__ import annotations

import math
from typing import Literal

from torch import Tensor

from zdp_bench.algorithms import InSpectra, Problem, mean
from zdp_bench.gradients import Engine
from zdp_bench.gradients.spectra import kernel_domain, padded_domain
from zdp_bench.privacy.mechanism import NoiseKind
from zdp_bench.registry import register

_NOISE: dict[str, tuple[NoiseKind, float]] = {  # kind, and its std over σC
    "sound": ("hermitian", 1.0),
    "complex": ("circular", 1 / math.sqrt(2)),
    "real": ("real_on_complex", 1.0),
    "as_published": ("real_on_complex", 1.0),
}


@register("algorithm", "gredp")
class GReDP(InSpectra):
    """DP-SGD in the Fourier domain, with the real part kept.

    Formal guarantees: an example's share is at most `max_grad_norm`, over all layers; z =
    noise_multiplier with sound noise, noise_multiplier/√2 with complex, 0 as published (under
    Poisson sampling).

    Raises:
        UserError: the model is complex, or the spectra are padded and a convolution is grouped or
            transposed.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        noise_multiplier: float,
        max_grad_norm: float,
        noise: Literal["sound", "complex", "real", "as_published"] = "sound",
        spectrum: Literal["kernel", "padded"] = "kernel",
        gradients: Engine = "auto",
    ) -> None:
        super().__init__(problem, noise_multiplier=noise_multiplier)
        self.max_grad_norm = max_grad_norm
        kind, share = _NOISE[noise]
        self.spectral_noise = kind, noise_multiplier * max_grad_norm * share
        self.engine = gradients
        model, loss = problem.model, problem.loss
        self.domain = (
            kernel_domain(model, loss)
            if spectrum == "kernel"
            else padded_domain(model, loss, problem.like)
        )

    def postprocess(
        self, noisy: dict[str, Tensor], expected_batch_size: float
    ) -> dict[str, Tensor]:
        return mean(self.domain.gradients(noisy), expected_batch_size)
