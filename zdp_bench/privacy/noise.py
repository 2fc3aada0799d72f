"""The only place where privacy noise is drawn.

Gaussian numbers are drawn as REAL numbers and laid over `view_as_real` of a complex tensor, at the block's full `std` on each
part. (`torch.normal` on a complex tensor would put std/√2 on each part, and Opacus's secure mode none on the imaginary one.)

Noise of a step is a pure function of (seed, step, block): a step that is run again after a crash draws the same bits, so it is
the same release and not a second one; and no two steps, blocks or purposes share a stream (numpy's SeedSequence hashes the
whole key into 128 bits; torch's CPU generator would keep only 32).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from zdp_bench.privacy.mechanism import Block, Mechanism


def stream(seed: int, *key: int | str) -> np.random.SeedSequence:
    """The seed of an independent stream for a purpose: `stream(seed, "noise", step, block)`."""
    words = [int.from_bytes(hashlib.sha256(str(part).encode()).digest()[:8], "little") for part in key]
    return np.random.SeedSequence([seed, *words])


class NoiseSource(Protocol):
    """Where standard normal numbers come from."""

    repeatable: bool  # the same step draws the same noise again, so a repeated step is the same release

    def standard_normal(self, count: int, dtype: torch.dtype, device: torch.device, *key: int | str) -> Tensor:
        """`count` independent N(0, 1) numbers of a real `dtype`; `key` names the stream."""


@dataclass(frozen=True)
class SeededNoise:
    """Reproducible noise for experiments. Anyone who knows the seed can subtract it: not for a release to an adversary.

    CPU noise comes from numpy's SFC64, float32 by its ziggurat; on a GPU from torch's Philox generator with a 64-bit seed.
    """

    seed: int
    repeatable = True

    def standard_normal(self, count: int, dtype: torch.dtype, device: torch.device, *key: int | str) -> Tensor:
        sequence = stream(self.seed, "noise", *key)
        if device.type == "cpu":
            generator = np.random.Generator(np.random.SFC64(sequence))
            if dtype == torch.float64:
                return torch.from_numpy(generator.standard_normal(count, dtype=np.float64))
            return torch.from_numpy(generator.standard_normal(count, dtype=np.float32)).to(dtype)
        on_device = torch.Generator(device=device)
        on_device.manual_seed(int(sequence.generate_state(1, np.uint64)[0]) % 2**63)
        return torch.randn(count, generator=on_device, device=device, dtype=dtype)


def draw(block: Block, source: NoiseSource, step: int, device: torch.device) -> Tensor:
    """One step's noise ξ for one block, in the block's shape and dtype.

    Formal guarantees: zero mean; the covariance the block's kind declares (see `Block.noise`), in every entry.
    """
    dtype: torch.dtype = getattr(torch, block.dtype)
    if block.noise == "none":
        return torch.zeros(block.shape, dtype=dtype, device=device)
    entries = int(np.prod(block.shape, dtype=np.int64))
    real_dtype = dtype.to_real()

    def white(parts: int) -> Tensor:
        return source.standard_normal(entries * parts, real_dtype, device, step, block.name).mul_(block.std)

    if block.noise == "real":
        return white(1).view(block.shape)
    if block.noise == "real_on_complex":
        return torch.complex(white(1), torch.zeros(entries, dtype=real_dtype, device=device)).view(block.shape)
    if block.noise == "hermitian":
        return torch.fft.fftn(white(1).view(block.shape), dim=block.fft_dims, norm="ortho")
    parts = white(2).view(*block.shape, 2)  # [..., (re, im)]
    if block.noise == "correlated":
        real, independent = parts.unbind(-1)
        parts = torch.stack([real, block.rho * real + (1 - block.rho**2) ** 0.5 * independent], dim=-1)
    return torch.view_as_complex(parts.contiguous())


def add_noise(total: dict[str, Tensor], mechanism: Mechanism, source: NoiseSource, step: int) -> dict[str, Tensor]:
    """The release: `total + ξ`, block by block. `total` is overwritten, so that no noise-free copy stays behind."""
    for block in mechanism.blocks:
        if block.noise != "none":
            total[block.name].add_(draw(block, source, step, total[block.name].device))
    return total
