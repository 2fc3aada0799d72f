"""The small network, its examples and the noisy releases that the built-in cases are made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from zdp_bench.algorithms import Algorithm
from zdp_bench.audit.release import Release
from zdp_bench.gradients import Batch
from zdp_bench.privacy.mechanism import Block, Mechanism, Sampling
from zdp_bench.privacy.noise import SeededNoise, draw, stream

CPU = torch.device("cpu")
ONE_STEP = Sampling("full", 1.0, 4.0, 4)


class Magnitude(nn.Module):
    """|z|, the output of a complex network."""

    def forward(self, z: Tensor) -> Tensor:
        return z.abs()


def build_network(seed: int) -> tuple[nn.Module, Batch]:
    """Return a small complex network and four examples, each with a wrong target; the last may be
    left out.
    """
    generator = seeded(seed, "network")
    layer = nn.Linear(3, 2, dtype=torch.complex64)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(
                torch.randn(parameter.shape, dtype=torch.complex64, generator=generator)
            )
    model = nn.Sequential(layer, Magnitude())
    inputs = 3 * torch.randn(4, 3, dtype=torch.complex64, generator=generator)
    with torch.no_grad():
        return model, (inputs, model(inputs).argmin(dim=1))


def seeded(seed: int, purpose: str) -> torch.Generator:
    """Return a generator of an audit's own stream."""
    number = int(stream(seed, "audit", purpose).generate_state(1, np.uint64)[0])
    return torch.Generator().manual_seed(number % 2**63)


def steep_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy times 1000, so that every gradient is longer than the bound and is clipped to
    it.
    """
    return 1e3 * nn.functional.cross_entropy(outputs, targets, reduction="none")


def neighbouring_sums(
    algorithm: Algorithm, batch: Batch
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the algorithm's sums without and with the last of four examples."""

    def accumulate(part: Batch) -> dict[str, Tensor]:
        total = {
            block.name: torch.zeros(block.shape, dtype=getattr(torch, block.dtype))
            for block in algorithm.mechanism().blocks
        }
        algorithm.accumulate(total, part)
        return total

    return accumulate((batch[0][:3], batch[1][:3])), accumulate(batch)


def as_rows(releases: Tensor) -> Tensor:
    """[n, ...] -> [n, real coordinates], float64."""
    parts = torch.view_as_real(releases) if releases.is_complex() else releases
    return parts.reshape(len(parts), -1).double()


def add_noise_to(
    sums: tuple[dict[str, Tensor], dict[str, Tensor]],
    mechanism: Mechanism,
    seed: int,
    spoil: Callable[[Tensor], Tensor] = lambda noise: noise,
    post: Callable[[Tensor], Tensor] = lambda release: release,
) -> Release:
    """Return releases of a mechanism: sum + noise, block by block, as a private step makes them.

    Args:
        sums: without and with the example.
        spoil: what a broken mechanism does to the noise.
        post: what is done with the noisy sum.
    """
    source = SeededNoise(seed)

    def release(present: bool, count: int) -> Tensor:
        noisy = [
            sums[present][block.name].unsqueeze(0)
            + spoil(draw(_repeat(block, count), source, int(present), CPU))
            for block in mechanism.blocks
        ]
        return torch.cat([as_rows(post(value)) for value in noisy], dim=1)

    return release


def _repeat(block: Block, releases: int) -> Block:
    """The block of several independent releases: noise is independent over entries, so they are one
    more dimension.
    """
    dims = tuple(dim + 1 if dim >= 0 else dim for dim in block.fft_dims)
    return dataclasses.replace(block, shape=(releases, *block.shape), fft_dims=dims)
