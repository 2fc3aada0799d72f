"""Mechanisms whose claim is known to be right or wrong get the verdict they deserve."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from zdp_bench.algorithms import Problem
from zdp_bench.algorithms.zeta_dp_sgd import ZetaDPSGD
from zdp_bench.extras.audit.release import RELEASE_DELTA, Release, attack_release
from zdp_bench.gradients import Batch, clipped_sum
from zdp_bench.gradients.clipping import SAFETY
from zdp_bench.privacy.accounting import gdp_epsilon
from zdp_bench.privacy.mechanism import Block, Mechanism, Sampling
from zdp_bench.privacy.noise import SeededNoise, draw
from zdp_bench.training.total import Total

CPU, ONE_STEP = torch.device("cpu"), Sampling("full", 1.0, 4.0, 4)
Sums = dict[str, Tensor]


class Magnitude(nn.Module):
    def forward(self, z: Tensor) -> Tensor:
        return z.abs()


def steep_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return cross-entropy times 1000, so that every gradient is clipped to the bound."""
    return 1e3 * nn.functional.cross_entropy(outputs, targets, reduction="none")


def noisy(
    sums: tuple[Sums, Sums],
    mechanism: Mechanism,
    seed: int,
    spoil: Callable[[Tensor], Tensor] = lambda noise: noise,
) -> Release:
    """Return releases of sums without and with the example, as a private step makes them."""
    source = SeededNoise(seed)

    def release(present: bool, count: int) -> Tensor:
        rows = []
        for block in mechanism.blocks:  # that of several releases has one more dimension
            dims = tuple(dim + 1 if dim >= 0 else dim for dim in block.fft_dims)
            many = dataclasses.replace(block, shape=(count, *block.shape), fft_dims=dims)
            value = sums[present][block.name] + spoil(draw(many, source, int(present), CPU))
            parts = torch.view_as_real(value) if value.is_complex() else value
            rows.append(parts.reshape(count, -1).double())
        return torch.cat(rows, dim=1)

    return release


def zeta(
    seed: int, noise: str = "per_component", spoil: Callable[[Tensor], Tensor] = lambda noise: noise
) -> Release:
    """ζ-DP-SGD at σ = 1, on a complex network and four examples with wrong targets."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 2, dtype=torch.complex64), Magnitude())
    inputs = 3 * torch.randn(4, 3, dtype=torch.complex64)
    targets = model(inputs).detach().argmin(dim=1)
    problem = Problem(model, steep_loss, ONE_STEP)
    algorithm = ZetaDPSGD(problem, noise_multiplier=1.0, max_grad_norm=1.0, noise=noise)

    def summed(examples: int) -> Sums:
        total = Total(algorithm.mechanism(), CPU).whole()
        algorithm.accumulate(total, (inputs[:examples], targets[:examples]))
        return total

    return noisy((summed(3), summed(4)), algorithm.mechanism(), seed, spoil)


def forget_imaginary(noise: Tensor) -> Tensor:
    return torch.complex(noise.real, torch.zeros_like(noise.imag))


def cancelling(seed: int, guarded: bool = True) -> Release:
    """DP-SGD on a linear layer over 64 positions, and an example whose terms of 10¹⁰ cancel.

    `guarded`: clipped by the package's own clipping, else by exact norms with a float32 sum.
    """
    layer, generator = nn.Linear(1, 1, bias=False), torch.Generator().manual_seed(seed)
    rest = torch.randn(3, 64, 1, generator=generator), torch.randn(3, 64, generator=generator)
    order, (x, w) = torch.randperm(64, generator=generator), torch.rand(2, 32, generator=generator)
    large, weights = 1e10 * torch.cat([x, x])[order], torch.cat([w, -w])[order]
    both = torch.cat([rest[0], large.view(1, 64, 1)]), torch.cat([rest[1], weights.view(1, 64)])

    def loss(outputs: Tensor, weights: Tensor) -> Tensor:
        return (outputs.flatten(1) * weights).sum(dim=1)

    def unguarded_sum(batch: Batch) -> Tensor:
        terms = batch[0].double().flatten(1) * batch[1].double()
        norms = terms.sum(dim=1).abs()  # Σ_t w_t x_t, all digits
        factors = (SAFETY / norms).clamp(max=1.0).float().view(-1, 1)
        return ((batch[1] * factors).view(1, -1) @ batch[0].view(-1, 1)).double()

    def guarded_sum(batch: Batch) -> Tensor:
        return clipped_sum(layer, loss, batch, 1.0, engine="fast").sums["weight"].double()

    block = Block("weight", (1, 1), "float64", 1.0, 1.0, "real")
    summed = guarded_sum if guarded else unguarded_sum
    sums = {"weight": summed(rest)}, {"weight": summed(both)}
    return noisy(sums, Mechanism((block,), ONE_STEP), seed)


circular = partial(zeta, noise="circular")
# name -> (the mechanism, the z it claims, whether that is true)
CASES: dict[str, tuple[Callable[[int], Release], float, bool]] = {
    "per_component": (zeta, 1.0, True),
    "per_component, too small a claim": (zeta, 1.6, False),  # so the attack is not blind
    "circular": (circular, 1 / math.sqrt(2), True),
    "circular, too small a claim": (circular, 1.2, False),
    "circular as Ziller et al. 2021 claim it": (circular, 1.0, False),
    "without imaginary noise": (partial(zeta, spoil=forget_imaginary), 1.0, False),
    "cancelling": (cancelling, 1.0, True),
    "cancelling, unguarded": (partial(cancelling, guarded=False), 1.0, False),
}


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES)
def test_every_case_gets_the_verdict_it_deserves(case: str, seed: int) -> None:
    make, z, is_true = CASES[case]
    bound, evidence = attack_release(make(seed), 20_000, RELEASE_DELTA, 0.99)
    assert (bound <= gdp_epsilon(1 / z, RELEASE_DELTA)) == is_true, evidence


def test_the_same_seed_gives_the_same_finding() -> None:
    first, again, other = (
        attack_release(circular(seed), 2000, RELEASE_DELTA, 0.99) for seed in (5, 5, 6)
    )
    assert first == again != other
