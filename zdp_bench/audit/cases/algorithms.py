"""Releases of the registered algorithms on a tiny network, sound or broken in one place."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from zdp_bench.algorithms import Algorithm, Problem
from zdp_bench.audit.cases.toy import (
    ONE_STEP,
    add_noise_to,
    build_network,
    neighbouring_sums,
    seeded,
    steep_loss,
)
from zdp_bench.audit.release import Release
from zdp_bench.gradients import reference
from zdp_bench.nn.circulant import CirculantLinear
from zdp_bench.privacy.mechanism import Block, Mechanism
from zdp_bench.registry import lookup

SIGMA = 1.0


def release_zeta(
    seed: int, noise: str = "per_component", spoil: Callable[[Tensor], Tensor] = lambda noise: noise
) -> Release:
    """ζ-DP-SGD as it is registered, on a complex network, at σ = 1."""
    model, batch = build_network(seed)
    algorithm: Algorithm = lookup("algorithm", "zeta_dp_sgd")(
        Problem(model, steep_loss, ONE_STEP), noise_multiplier=SIGMA, max_grad_norm=1.0, noise=noise
    )
    return add_noise_to(neighbouring_sums(algorithm, batch), algorithm.mechanism(), seed, spoil)


def drop_imaginary_part(noise: Tensor) -> Tensor:
    """Return the noise with imaginary parts of 0."""
    return torch.complex(noise.real, torch.zeros_like(noise.imag))


def release_under_measured(seed: int) -> Release:
    """A clipper that takes |Σ g²| for ‖g‖² = Σ|g|²: without the conjugate, parts of a complex
    gradient cancel.
    """
    model, _ = build_network(seed)
    generator = torch.Generator().manual_seed(seed % 2**63)
    inputs = torch.randn(200, 3, dtype=torch.complex64, generator=generator)
    targets = torch.randint(0, 2, (200,), generator=generator)
    gradients = reference.per_sample_gradients(model, steep_loss, (inputs, targets))
    rows = torch.cat([g.flatten(1) for g in gradients.values()], dim=1)  # [200, parameters]
    rows = rows.to(torch.complex128)
    measured = rows.square().sum(dim=1).abs().sqrt()
    shares = rows / measured.clamp(min=1.0).unsqueeze(1)
    ordinary = int(shares.abs().square().sum(dim=1).argsort()[100])  # not the worst example
    rest = shares[:4].sum(dim=0)
    block = Block("gradient", tuple(rest.shape), "complex128", 1.0, SIGMA, "circular")
    sums = {"gradient": rest}, {"gradient": rest + shares[ordinary]}
    return add_noise_to(sums, Mechanism((block,), ONE_STEP), seed)


def release_fourier(
    seed: int, algorithm: str = "gredp", noise: str = "sound", std: float = SIGMA, back: bool = True
) -> Release:
    """GReDP or Spectral-DP as it is registered, on one circulant block of eight numbers.

    Args:
        back: release the gradient, else its spectrum.
    """
    generator = seeded(seed, "fourier")
    layer = CirculantLinear(8, 8, 8, bias=False).double()
    with torch.no_grad():
        layer.weight.copy_(
            torch.randn(layer.weight.shape, dtype=torch.float64, generator=generator)
        )
    inputs = torch.randn(4, 8, dtype=torch.float64, generator=generator)
    targets = torch.randint(0, 8, (4,), generator=generator)
    problem = Problem(nn.Sequential(layer), steep_loss, ONE_STEP, like=inputs[:0])
    made: Algorithm = lookup("algorithm", algorithm)(
        problem, noise_multiplier=std, max_grad_norm=1.0, noise=noise
    )
    sums = neighbouring_sums(made, (inputs, targets))
    (name,) = sums[0]

    def as_gradient(spectra: Tensor) -> Tensor:
        return made.postprocess({name: spectra}, 1.0)[name] if back else spectra

    return add_noise_to(sums, made.mechanism(), seed, post=as_gradient)
