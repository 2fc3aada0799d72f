"""GReDP (Wang et al. 2024): clip the gradient's spectrum, add noise, and keep the real part.

    Σᵢ clip(F(gᵢ), C/√L)  + ξ  →  F⁻¹  →  real part

Each of the L layers is clipped at C/√L. (The paper's Algorithm 2, read literally, clips each layer
at c and draws noise per sample. Here, noise is drawn once per batch.) The result is V + noise for
any ξ, so variants differ only in the noise:

    noise: sound     ξ = F(white noise), N(0, σ²C²) in each real dimension: z = σ, as in per-layer
                     DP-SGD.
           complex   as in Theorem 1: N(0, σ²C²/2) on each part. The real part is V + N(0, σ²C²/2),
                     which is DP-SGD at z = σ/√2. The paper describes it as DP-SGD at z = σ with
                     half the variance.
           real      as in Corollary 1 and Algorithm 2: N(0, σ²C²) on real parts only. F⁻¹ of this
                     noise has covariance σ²C²/2·(I + R), where R reverses the index: the odd part
                     of the gradient is released without noise. z = 0, ε = ∞.
           as_published   the same as real. In each algorithm, this name is its paper's text.

    spectrum: kernel   spectrum of the gradient itself, over a kernel or circulant block, which is
                       F(V) in Theorem 1. Norms are those of gradients.
              padded   spectrum of the whole correlation, as in Spectral-DP: eq. 15 taken literally.
                       Norms are larger.
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

_NOISE: dict[str, tuple[NoiseKind, float]] = {  # kind, and standard deviation in units of σC
    "sound": ("hermitian", 1.0),
    "complex": ("circular", 1 / math.sqrt(2)),
    "real": ("real_on_complex", 1.0),
    "as_published": ("real_on_complex", 1.0),
}


@register("algorithm", "gredp")
class GReDP(InSpectra):
    """DP-SGD in the Fourier domain. The gradient is the real part of the inverse transform.

    Formal guarantees: the norm of an example's share over all layers is at most `max_grad_norm`.
    Under Poisson sampling, z is noise_multiplier with sound noise, noise_multiplier/√2 with complex
    noise, and 0 as published.

    Args:
        problem: model, loss, sampling and, for padded spectra, `like`.
        noise_multiplier: σ, in units of C.
        max_grad_norm: clipping norm C.
        noise, spectrum: see the module's docstring.
        gradients: engine that computes clipped sums.

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
        kind, std = _NOISE[noise]
        self.spectral_noise = kind, noise_multiplier * max_grad_norm * std
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
