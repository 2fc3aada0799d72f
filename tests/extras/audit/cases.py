"""Mechanisms whose claim is known to be right or wrong.

An attack must let the right ones pass and catch the wrong ones. Ours are the registered algorithms
on a tiny network, broken in one place if at all; Opacus is run as it is; and steps and runs that
draw or return what they should not.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from zdp_bench.algorithms import Algorithm, Problem
from zdp_bench.extras.audit.release import RELEASE_DELTA, Finding, Release, attack_release
from zdp_bench.gradients import Batch, clipped_sum
from zdp_bench.gradients.clipping import SAFETY
from zdp_bench.privacy.accounting import gdp_epsilon, tight_epsilon
from zdp_bench.privacy.mechanism import Block, Mechanism, Sampling
from zdp_bench.privacy.noise import SeededNoise, draw, stream
from zdp_bench.registry import lookup
from zdp_bench.training.setup import Plan
from zdp_bench.training.total import Total

SIGMA = 1.0
CPU = torch.device("cpu")
ONE_STEP = Sampling("full", 1.0, 4.0, 4)


class Magnitude(nn.Module):
    """|z|, the output of a complex network."""

    def forward(self, z: Tensor) -> Tensor:
        return z.abs()


def build_network(seed: int) -> tuple[nn.Module, Batch]:
    """Return a small complex network, and four examples with wrong targets."""
    generator = seeded(seed, "network")
    layer = nn.Linear(3, 2, dtype=torch.complex64)
    fill(layer, generator)
    model = nn.Sequential(layer, Magnitude())
    inputs = 3 * torch.randn(4, 3, dtype=torch.complex64, generator=generator)
    with torch.no_grad():
        return model, (inputs, model(inputs).argmin(dim=1))


def fill(layer: nn.Module, generator: torch.Generator) -> None:
    """Draw every parameter of a layer from a normal law."""
    with torch.no_grad():
        for own in layer.parameters():
            own.copy_(torch.randn(own.shape, dtype=own.dtype, generator=generator))


def seeded(seed: int, purpose: str) -> torch.Generator:
    """Return a generator of an audit's own stream."""
    number = int(stream(seed, "audit", purpose).generate_state(1, np.uint64)[0])
    return torch.Generator().manual_seed(number % 2**63)


def steep_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return cross-entropy times 1000, so that every gradient is clipped to the bound."""
    return 1e3 * nn.functional.cross_entropy(outputs, targets, reduction="none")


def neighbouring_sums(
    algorithm: Algorithm, batch: Batch
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the algorithm's sums without and with the last of four examples."""

    def accumulate(part: Batch) -> dict[str, Tensor]:
        total = Total(algorithm.mechanism(), CPU).whole()
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
    """Return the block of several independent releases, as one more dimension."""
    dims = tuple(dim + 1 if dim >= 0 else dim for dim in block.fft_dims)
    return dataclasses.replace(block, shape=(releases, *block.shape), fft_dims=dims)


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


def release_cancelling(seed: int, guarded: bool = True) -> Release:
    """DP-SGD on a linear layer over 64 positions, and an example whose terms of 10¹⁰ cancel.

    Args:
        guarded: clip with the package's own clipping, else by exact norms with a float32 sum.
    """
    layer = nn.Linear(1, 1, bias=False)
    generator = torch.Generator().manual_seed(seed % 2**63)
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

    block = Block("weight", (1, 1), "float64", 1.0, SIGMA, "real")
    summed = guarded_sum if guarded else unguarded_sum
    sums = {"weight": summed(rest)}, {"weight": summed(both)}
    return add_noise_to(sums, Mechanism((block,), ONE_STEP), seed)


def release_sampled(
    seed: int, rate: float, std: float, steps: int = 1, fresh: bool = True
) -> Release:
    """The share of an example in each step: 1 if it was drawn, else 0, and noise.

    Args:
        rate: at which examples are really drawn.
        fresh: noise is drawn in every step, else once.
    """
    plan = Plan(Sampling("poisson", rate, 4 * rate, 4), 1, steps)

    def release(present: bool, count: int) -> Tensor:
        rng = np.random.default_rng(stream(seed, "audit", "sampled", int(present)))
        noise = rng.standard_normal((count, steps if fresh else 1)) * std
        keys = (f"{seed}:{int(present)}:{trial}" for trial in range(count))
        drawn = [[present and 0 in plan.draw(key, i)[0] for i in range(steps)] for key in keys]
        return torch.from_numpy(np.array(drawn) + noise)

    return release


# ---------------------------------------------------------------------------------------- the table

TRIALS = 40_000  # of each neighbour
SHARP = 0.05  # the noise multiplier with which all that shows is whether an example was drawn


@dataclass(frozen=True)
class AuditCase:
    """A mechanism whose claim is known to be right or wrong.

    Attributes:
        make: seed -> its release.
        z: the noise multiplier it claims for one step.
        rate, steps: of the Poisson batches it claims.
        delta: the δ at which its attack shows most.
        trials: at most so many of each neighbour.
    """

    name: str
    claim: str
    expected: Literal["passes", "flagged"]
    make: Callable[[int], Release]
    z: float = SIGMA
    rate: float = 1.0
    steps: int = 1
    delta: float = RELEASE_DELTA
    trials: int = TRIALS

    def audit(self, seed: int, confidence: float, trials: int = TRIALS) -> Finding:
        """Attack the mechanism."""
        claimed = gdp_epsilon(1 / self.z, self.delta)
        if self.rate < 1:
            drawn = Sampling("poisson", self.rate, 4 * self.rate, 4)
            claimed = tight_epsilon(Mechanism.of_z(self.z, drawn), self.steps, self.delta)
        about = (self.name, self.claim, claimed)
        bound, evidence = attack_release(
            self.make(seed), min(trials, self.trials), self.delta, confidence
        )
        return Finding.of(*about, bound, self.delta, confidence, evidence)


def _sound(name: str, claim: str, make: Callable[..., Release], **more: Any) -> AuditCase:
    return AuditCase(name, claim, "passes", make, **more)


def _broken(name: str, claim: str, make: Callable[..., Release], **more: Any) -> AuditCase:
    return AuditCase(name, claim, "flagged", make, **more)


circular = partial(release_zeta, noise="circular")
HALF = SIGMA / math.sqrt(2)

CASES: tuple[AuditCase, ...] = (
    _sound("per_component", "ζ-DP-SGD, σ on each part: z = σ", release_zeta),
    _sound("circular", "circular noise, at what it gives: z = σ/√2", circular, z=HALF),
    _broken("circular_2021", "circular noise of Ziller et al. 2021: z = σ", circular),
    _broken(
        "no_imaginary_noise",
        "noise that forgets the imaginary part: z = σ",
        partial(release_zeta, spoil=drop_imaginary_part),
    ),
    *(
        (_sound if rate == 1 else _broken)(
            name,
            f"Poisson batches drawn at {rate:g} times the rate of 0.1 that is claimed",
            partial(release_sampled, rate=0.1 * rate, std=SHARP),
            z=SHARP,
            rate=0.1,
            delta=0.11,  # below it, next to nothing can be told
            trials=8_000,
        )
        for name, rate in (("sampling", 1.0), ("over_sampling", 2.0))
    ),
    *(
        (_sound if fresh else _broken)(
            name,
            f"four steps at rate 0.5, {'fresh noise in each' if fresh else 'one noise'}: z = σ",
            partial(release_sampled, rate=0.5, std=SIGMA, steps=4, fresh=fresh),
            rate=0.5,
            steps=4,
            delta=0.2,
            trials=200,
        )
        for name, fresh in (("fresh_noise", True), ("repeated_noise", False))
    ),
    _sound("cancelling", "clipping of a record whose terms cancel: z = σ", release_cancelling),
    _broken(
        "cancelling_unguarded",
        "the same, clipped by its exact norm and summed in float32: z = σ",
        partial(release_cancelling, guarded=False),
    ),
)
