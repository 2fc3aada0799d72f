"""The only place where privacy noise is drawn.

Gaussian numbers are drawn as REAL numbers and laid over `view_as_real` of a complex tensor, at the block's full `std` on each
part. (`torch.normal` on a complex tensor would put std/√2 on each part, and Opacus's secure mode none on the imaginary one.)

Noise of a step is a pure function of (seed, step, block): a step that is run again after a crash draws the same bits, so it is
the same release and not a second one; and no two steps, blocks or purposes share a stream (numpy's SeedSequence hashes the
whole key into 128 bits; torch's CPU generator would keep only 32).
"""

from __future__ import annotations

import hashlib
import math
import os
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

    CPU noise comes from numpy's SFC64, float32 by its ziggurat. On a GPU it comes from torch's Philox generator, which keeps 63
    bits of the key: two of the n (step, block) pairs of a run share a stream with probability n²/2⁶⁴, 5e-6 for ten million.
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


class SecureRandom:
    """The operating system's cryptographic randomness with the two methods of numpy's Generator that sampling needs."""

    def random(self, size: int) -> np.ndarray:
        """`size` independent numbers, uniform on the odd multiples of 2⁻⁵³ in (0, 1): never 0, never 1."""
        bits = np.frombuffer(os.urandom(8 * size), dtype=np.uint64) >> np.uint64(12)
        return (bits.astype(np.float64) + 0.5) * 2.0**-52

    def choice(self, records: int, size: int, replace: bool) -> np.ndarray:
        """`size` different numbers below `records`: the places of the smallest of as many random numbers."""
        if replace or size > records:
            raise ValueError("a secure choice is made without replacement, and of no more than there are")
        return np.argsort(self.random(records))[:size]


@dataclass(frozen=True)
class SecureNoise:
    """Noise for a release to an adversary: nobody can draw it again, and its digits tell nothing of what it hides.

    The randomness is the operating system's (`os.urandom`: ChaCha20 on Linux), made normal by Box and Muller in float64.
    One number is the mean of FOUR independent ones, times two (Holohan & Braghin 2021, "Secure random sampling in differential
    privacy", section 5.1, n = 2): a normal number made in floating point can otherwise be told from a shifted one by which
    digits it can have (Mironov 2012; Jin et al. 2022). Opacus's secure mode does the same, but leaves the imaginary part
    without noise; here a complex tensor's parts are drawn as twice as many real numbers.

    Drawn on the CPU and moved. `key` is of no use: a step that is drawn again is a new release, and the ledger counts it.
    """

    repeatable = False

    def standard_normal(self, count: int, dtype: torch.dtype, device: torch.device, *key: int | str) -> Tensor:
        numbers = np.empty(count, dtype=np.float64)
        for start in range(0, count, _SECURE_CHUNK):
            part = numbers[start : start + _SECURE_CHUNK]
            part[:] = sum(_box_muller(len(part)) for _ in range(4))
            part *= 0.5
        return torch.from_numpy(numbers).to(device=device, dtype=dtype)


_SECURE_CHUNK = 2**18  # numbers made at once: what they are made from stays in the cache


def _box_muller(count: int) -> np.ndarray:
    """`count` independent N(0, 1) float64 numbers, |x| ≤ 8.6, from the operating system's randomness."""
    half = -(-count // 2)
    uniform = SecureRandom().random(2 * half)
    radius = np.sqrt(-2.0 * np.log(uniform[:half]))
    angle = (2.0 * np.pi) * uniform[half:]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


def draw(block: Block, source: NoiseSource, step: int, device: torch.device, rank: int = 0, ranks: int = 1) -> Tensor:
    """One step's noise ξ for one block, in the block's shape and dtype; or the share of it that one of several ranks draws.

    Formal guarantees:
        - zero mean; the covariance the block's kind declares (see `Block.noise`), in every entry;
        - the shares of all `ranks` are independent and add up to that covariance: each has std/√ranks.
    """
    dtype: torch.dtype = getattr(torch, block.dtype)
    if block.noise == "none":
        return torch.zeros(block.shape, dtype=dtype, device=device)
    entries = math.prod(block.shape)
    real_dtype = dtype.to_real()
    key = (step, block.name) if ranks == 1 else (step, block.name, "rank", rank, ranks)

    def white(parts: int) -> Tensor:
        return source.standard_normal(entries * parts, real_dtype, device, *key).mul_(block.std / math.sqrt(ranks))

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


def add_noise(
    total: dict[str, Tensor], mechanism: Mechanism, source: NoiseSource, step: int, rank: int = 0, ranks: int = 1
) -> dict[str, Tensor]:
    """The release: `total + ξ`, block by block. `total` is overwritten, so that no noise-free copy stays behind.

    Where several ranks hold a part of the sum each, there are two right ways. After the sums are reduced, every rank adds the
    same ξ (a seeded source draws the same on all of them). Or, before they are reduced, each adds its share
    (`rank` of `ranks`); then no rank ever sends a noise-free sum, and a secure source serves as well.
    """
    for block in mechanism.blocks:
        if block.noise != "none":
            total[block.name].add_(draw(block, source, step, total[block.name].device, rank, ranks))
    return total
