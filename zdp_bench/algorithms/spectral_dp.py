"""Spectral-DP (Feng et al., S&P 2023): clip the padded spectrum, add noise, filter, and crop.

    Σᵢ clip(F(gᵢ ⋆ xᵢ), C/√L)  + ξ  →  low-pass filter  →  F⁻¹  →  crop to the kernel

Each of the L layers is clipped at C/√L, so the norm of an example's share over all layers is at
most C. The noise on each coordinate has the standard deviation σC.

    noise: sound          ξ = F(white noise), which is hermitian like the spectrum of a real signal,
                          with N(0, σ²C²) in each of its real dimensions, and a symmetric filter.
                          The release is P(Σ clip) + Pξ with an orthogonal projection P: z = σ, with
                          the bias −(I − P)g.
           as_published   N(0, σ²C²/2) on each part of each frequency, and the one-sided filter
                          `[K:-1] = 0` of the public code over the last dimension, which keeps the
                          last frequency: z = σ/√2.

The public code differs: it clips the gradient of the MEAN loss and adds noise to every sample, at
z ≈ σ/(2√N).
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from zdp_bench.algorithms import InSpectra, Problem, mean
from zdp_bench.errors import require
from zdp_bench.gradients.spectra import padded_domain
from zdp_bench.registry import register


@register("algorithm", "spectral_dp")
class SpectralDP(InSpectra):
    """DP-SGD in the padded Fourier domain, followed by a low-pass filter.

    Formal guarantees: the norm of an example's share over all layers is at most `max_grad_norm`.
    Under Poisson sampling, z is noise_multiplier with sound noise and noise_multiplier/√2 as
    published. Filter, inverse transform and crop depend on the examples only through the noisy sum.

    Args:
        problem: model, loss, sampling and `like`.
        noise_multiplier: σ, in units of C.
        max_grad_norm: clipping norm C.
        filter_ratio: fraction of the frequencies that the filter removes. Default: 0.5.
        noise: see the module's docstring.

    Raises:
        UserError: the model is complex, or has a grouped or transposed convolution.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        noise_multiplier: float,
        max_grad_norm: float,
        filter_ratio: float = 0.5,
        noise: Literal["sound", "as_published"] = "sound",
    ) -> None:
        require(0 <= filter_ratio < 1, "algorithm.filter_ratio", filter_ratio, "must lie in [0, 1)")
        super().__init__(problem, noise_multiplier=noise_multiplier)
        self.max_grad_norm = max_grad_norm
        std = noise_multiplier * max_grad_norm
        if noise == "sound":
            self.spectral_noise = "hermitian", std
        else:
            self.spectral_noise = "circular", std / math.sqrt(2)
        self.domain = padded_domain(problem.model, problem.loss, problem.like)
        make_filter = low_pass if noise == "sound" else one_sided
        device = next(problem.model.parameters()).device
        self.filters = {
            name: make_filter(spectrum.sizes, filter_ratio).to(device)
            for name, spectrum in self.domain.spectra.items()
        }

    def postprocess(
        self, noisy: dict[str, Tensor], expected_batch_size: float
    ) -> dict[str, Tensor]:
        filtered = dict(noisy)
        for name, is_kept in self.filters.items():
            filtered[name] = noisy[name] * is_kept
        return mean(self.domain.gradients(filtered), expected_batch_size)


def low_pass(sizes: tuple[int, ...], ratio: float) -> Tensor:
    """Return True for the lowest 1 − ratio of the frequencies; k and −k are kept or cut alike."""
    distance = torch.zeros(sizes)
    for dim, size in enumerate(sizes):
        # Frequencies are squared as whole numbers, so that equal distances are exactly equal.
        squares = (torch.fft.fftfreq(size) * size).square() / size**2
        later_dims = [1] * (len(sizes) - 1 - dim)
        distance = distance + squares.view(-1, *later_dims)
    num_kept = max(1, math.ceil((1 - ratio) * distance.numel()))
    highest, _ = distance.flatten().kthvalue(num_kept)
    return distance <= highest * (1 + 1e-6)


def one_sided(sizes: tuple[int, ...], ratio: float) -> Tensor:
    """Return True for the frequencies that `[K:-1] = 0` keeps: the first ones and the last."""
    is_kept = torch.ones(sizes, dtype=torch.bool)
    first_cut = max(1, round((1 - ratio) * sizes[-1]))
    is_kept[..., first_cut:-1] = False
    return is_kept
