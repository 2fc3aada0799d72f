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
from functools import cache, partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from zdp_bench.algorithms import Algorithm, Problem
from zdp_bench.config import compose, parse
from zdp_bench.config.digests import run_digest
from zdp_bench.config.schema import Run
from zdp_bench.extras.audit.release import RELEASE_DELTA, Finding, Release, attack_release
from zdp_bench.gradients import Batch, clipped_sum, reference
from zdp_bench.gradients.clipping import SAFETY
from zdp_bench.nn.circulant import CirculantLinear
from zdp_bench.privacy.accounting import gdp_epsilon, tight_epsilon
from zdp_bench.privacy.mechanism import Block, Mechanism, Sampling
from zdp_bench.privacy.noise import SeededNoise, draw, run_key, stream
from zdp_bench.registry import lookup
from zdp_bench.training.machine import foreign_code
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


def release_under_measured(seed: int) -> Release:
    """Clip by |Σ g²| for ‖g‖² = Σ|g|²: parts of a complex gradient cancel."""
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
    fill(layer, generator)
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


def release_two_runs(seed: int, change: str, keyed: bool) -> Release:
    """One release each of two runs that differ in σ or in one example.

    Args:
        change: sigma or record.
        keyed: noise has the run's own key, else the seed's alone, so that both runs have the same
            noise.
    """
    first = _configure()
    model, batch = build_network(seed)
    code = foreign_code(first.plugins)
    second = _configure("algorithm.noise_multiplier=1.25") if change == "sigma" else first
    runs = []
    for config in (first, second):
        algorithm: Algorithm = lookup("algorithm", "zeta_dp_sgd")(
            Problem(model, steep_loss, ONE_STEP),
            noise_multiplier=float(config.algorithm.options["noise_multiplier"]),
            max_grad_norm=1.0,
        )
        runs.append((config, algorithm.mechanism(), neighbouring_sums(algorithm, batch)))

    def release(present: bool, count: int) -> Tensor:
        trials = (seed * 10**6 + 2 * trial + present for trial in range(count))
        return torch.stack([release_both(trial, present) for trial in trials])

    def release_both(trial: int, present: bool) -> Tensor:
        parts = []
        for which, (config, mechanism, sums) in enumerate(runs):
            # with change=record the second run never has the example
            left_out = change == "record" and which == 1
            data = "all but one" if left_out else "with it" if present else "without"
            key: int | str = trial
            if keyed:
                digest = run_digest(dataclasses.replace(config, seed=trial), data)
                key = run_key(digest, mechanism, code)
            total = sums[present and not left_out]
            for block in mechanism.blocks:
                noise = draw(block, SeededNoise(key), 0, CPU)
                parts.append(as_rows((total[block.name] + noise).unsqueeze(0))[0])
        return torch.cat(parts)

    return release


@cache
def _configure(*words: str) -> Run:
    return parse(compose(["recipe=quickstart", "algorithm.noise_multiplier=1.0", *words]))


def together(*z: float) -> float:
    """Return the noise multiplier of several Gaussian releases seen at once."""
    return 1 / math.sqrt(sum(1 / each**2 for each in z))


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
        return Finding.of(*about, bound, self.delta, confidence, self.expected, evidence)


def _sound(name: str, claim: str, make: Callable[..., Release], **more: Any) -> AuditCase:
    return AuditCase(name, claim, "passes", make, **more)


def _broken(name: str, claim: str, make: Callable[..., Release], **more: Any) -> AuditCase:
    return AuditCase(name, claim, "flagged", make, **more)


circular = partial(release_zeta, noise="circular")
gredp_complex = partial(release_fourier, noise="complex")
spectral = partial(release_fourier, algorithm="spectral_dp")
spectral_2023 = partial(spectral, noise="as_published", back=False)
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
    _broken("under_measured_norm", "clipping by |Σ g²| for Σ|g|²: z = σ", release_under_measured),
    _sound("gredp", "GReDP, sound noise: z = σ", release_fourier),
    _sound(
        "gredp_complex_at_z",
        "GReDP, complex noise, at what it gives: z = σ/√2",
        gredp_complex,
        z=HALF,
    ),
    _broken("gredp_complex", "GReDP, complex noise (its Theorem 1): z = σ", gredp_complex),
    _broken(
        "gredp_real",
        "GReDP, real noise (its Algorithm 2): z = σ",
        partial(release_fourier, noise="as_published"),
    ),
    _sound("spectral_dp", "Spectral-DP, sound noise: z = σ", spectral),
    _broken("spectral_dp_2023", "Spectral-DP as published: z = σ", spectral_2023),
    *(
        (_sound if keyed else _broken)(
            f"two_runs_{change}" if keyed else f"shared_noise_{change}",
            f"two runs that differ in {what}, noise of {'a key each' if keyed else 'one seed'}: "
            f"z = {z:.3g} together",
            partial(release_two_runs, change=change, keyed=keyed),
            z=z,
            trials=2_000,  # each takes two keys and two draws
        )
        for change, what, z in (
            ("sigma", "σ", together(SIGMA, 1.25)),
            ("record", "one record", SIGMA),
        )
        for keyed in (True, False)
    ),
    *(
        (_sound if rate == 1 else _broken)(
            name,
            f"Poisson batches drawn at {rate:g} times the rate of 0.1 that is claimed",
            partial(release_sampled, rate=0.1 * rate, std=SHARP),
            z=SHARP,
            rate=0.1,
            delta=0.11,  # below it, next to nothing can be told
        )
        for name, rate in (("sampling", 1.0), ("over_sampling", 1.3))
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
