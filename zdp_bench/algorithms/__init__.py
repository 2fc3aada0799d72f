"""The algorithms, one file each. Each is one line: y = Post( Σᵢ Boundᵢ(xᵢ) + ξ ).

An algorithm bounds one example's share and turns the noisy sum into a gradient. Sampling, noise,
ledger and optimiser are in `training/step.py`, once for all. No algorithm computes or prints an ε.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from zdp_bench.gradients import Batch, Loss, per_example
from zdp_bench.gradients.spectra import Spectrum
from zdp_bench.privacy.mechanism import Block, Mechanism, NoiseKind, Sampling


@dataclass(frozen=True)
class Problem:
    """What an algorithm trains: a model, a loss per example, and how examples are sampled.

    Attributes:
        loss: given any loss, it becomes one that sees an example at a time (`PerExample`).
        seed: the run's seed, for what an algorithm draws before it sees an example (feedback
            matrices).
        like: inputs [n, ...] of the shape and dtype to come; n may be 0, and no value is read.
    """

    model: nn.Module
    loss: Loss
    sampling: Sampling
    seed: int = 0
    like: Tensor | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "loss", per_example(self.loss))


class Algorithm(Protocol):
    """The methods of every algorithm; the module docstrings have the formulas."""

    noise_multiplier: float  # σ as the paper states it; 0 without noise
    # An algorithm may also have `carried`, a dictionary of numbers that follow from what it has
    # released and that its next step needs. They are saved with the weights.

    def mechanism(self) -> Mechanism:
        """Return what a step releases, fixed before the first example is read."""

    def accumulate(self, total: dict[str, Tensor], batch: Batch) -> None:
        """Add Σᵢ uᵢ with ‖uᵢ‖₂ ≤ bound to `total`, so that micro-batches and ranks add up.

        An empty batch adds nothing. The model's parameters do not change.
        """

    def contributions(self, batch: Batch) -> dict[str, Tensor]:
        """Return the uᵢ themselves, block name -> [B, *shape]: for tests and audits only."""

    def postprocess(
        self, noisy: dict[str, Tensor], expected_batch_size: float
    ) -> dict[str, Tensor]:
        """Return the gradient, by parameter name, from the noisy sum alone, which costs no privacy.

        If it is the function `mean` itself, the private step divides while it adds the noise.
        """


def mean(noisy: dict[str, Tensor], expected_batch_size: float) -> dict[str, Tensor]:
    """Divide by the EXPECTED batch size: the true size of a Poisson batch is private.

    `noisy` is overwritten.
    """
    for value in noisy.values():
        memory = value.conj() if value.is_conj() else value
        # as real numbers it takes a fifth of the time
        reals = torch.view_as_real(memory) if memory.is_complex() else memory
        reals.mul_(1 / expected_batch_size)
    return noisy


def parameter_block(
    name: str, parameter: nn.Parameter, bound: float, std: float, noise: NoiseKind
) -> Block:
    """Return the block that releases one parameter's gradient sum."""
    dtype = str(parameter.dtype).removeprefix("torch.")
    return Block(name, tuple(parameter.shape), dtype, bound, std, noise)


def spectrum_block(
    name: str,
    parameter: nn.Parameter,
    spectrum: Spectrum,
    bound: float,
    noise: NoiseKind,
    std: float,
) -> Block:
    """Return the block that releases the spectrum of one parameter's gradient sum."""
    dtype = str(parameter.dtype.to_complex()).removeprefix("torch.")
    fft_dims = spectrum.dims if noise == "hermitian" else ()
    return Block(name, spectrum.shape, dtype, bound, std, noise, fft_dims=fft_dims)
