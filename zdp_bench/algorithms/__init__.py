"""The algorithms, one file each. All of them are one line: y = Post( Σᵢ Boundᵢ(xᵢ) + ξ ).

An algorithm says how one record's share is bounded and what is made of the noisy sum; sampling, noise, ledger and optimiser
belong to `engine.py`, once. No algorithm computes or prints an ε.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from zdp_bench.gradients import Batch, Loss
from zdp_bench.gradients.spectra import Spectrum
from zdp_bench.privacy.mechanism import Block, Mechanism, NoiseKind, Sampling


@dataclass(frozen=True)
class Problem:
    """What an algorithm is asked to train: a model, a per-record loss, and how records are sampled.

    Attributes:
        seed: the run's; what an algorithm draws once, before it has seen a record (feedback matrices), follows from it.
        like: inputs [n, ...] of the shape and dtype to come, for what depends on them; n may be 0, no value is read.
    """

    model: nn.Module
    loss: Loss
    sampling: Sampling
    seed: int = 0
    like: Tensor | None = None


class Algorithm(Protocol):
    """What every algorithm answers; see `notes` in the module docstrings of each for its formulas."""

    noise_multiplier: float  # σ as the paper states it; 0 without noise

    def mechanism(self) -> Mechanism:
        """What a step releases, fixed before the first record is read."""

    def accumulate(self, total: dict[str, Tensor], batch: Batch) -> None:
        """total += Σᵢ uᵢ with ‖uᵢ‖₂ ≤ bound; micro-batches and ranks just add up. An empty batch adds nothing. The model's
        parameters stay as they are."""

    def contributions(self, batch: Batch) -> dict[str, Tensor]:
        """The uᵢ themselves, block name -> [B, *shape]: for tests and audits only."""

    def postprocess(
        self, noisy: dict[str, Tensor], expected_batch_size: float
    ) -> dict[str, Tensor]:
        """The gradient, by parameter name, from the noisy sum alone: costs no privacy. Where it is `mean` itself, and no function
        around it, the engine divides in the pass that lays noise over the sum."""


def mean(noisy: dict[str, Tensor], expected_batch_size: float) -> dict[str, Tensor]:
    """Divide by the EXPECTED batch size: the true size of a Poisson batch is private. `noisy` is overwritten."""
    for value in noisy.values():
        memory = (
            value.conj() if value.is_conj() else value
        )  # as it lies there; as real numbers it takes a fifth of the time
        (torch.view_as_real(memory) if memory.is_complex() else memory).mul_(
            1 / expected_batch_size
        )
    return noisy


def parameter_block(
    name: str, parameter: nn.Parameter, bound: float, std: float, noise: NoiseKind
) -> Block:
    """The block that releases one parameter's gradient sum."""
    return Block(
        name, tuple(parameter.shape), str(parameter.dtype).removeprefix("torch."), bound, std, noise
    )


def spectrum_block(
    name: str,
    parameter: nn.Parameter,
    spectrum: Spectrum,
    bound: float,
    noise: NoiseKind,
    std: float,
) -> Block:
    """The block that releases the spectrum of one parameter's gradient sum."""
    dtype = str(parameter.dtype.to_complex()).removeprefix("torch.")
    return Block(
        name,
        spectrum.shape,
        dtype,
        bound,
        std,
        noise,
        fft_dims=spectrum.dims if noise == "hermitian" else (),
    )
