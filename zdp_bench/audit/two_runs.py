"""Attacks that no single release shows: two runs whose noise is held against one another, batches that hold too many, and a
record whose terms cancel. Each is built sound, from the package's own keys, draws and clipping, and broken in one place.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn

from zdp_bench.algorithms import Algorithm, Problem
from zdp_bench.audit.release import Release
from zdp_bench.config import compose, parse
from zdp_bench.config.digests import run_digest
from zdp_bench.config.schema import Run
from zdp_bench.gradients import Batch, clipped_sum
from zdp_bench.gradients.clipping import SAFETY
from zdp_bench.privacy.mechanism import Block, Mechanism, Sampling
from zdp_bench.privacy.noise import SeededNoise, draw, run_key, stream
from zdp_bench.registry import lookup
from zdp_bench.training.environment import foreign_code
from zdp_bench.training.plan import Plan

TRIALS = 2_000  # of each neighbour, at most: each takes two keys and two draws
CPU = torch.device("cpu")
_FULL = Sampling("full", 1.0, 4.0, 4)


def two_runs(seed: int, change: str, keyed: bool) -> Release:
    """One release of each of two runs on the same records, which differ in σ, in the rate, or in one record.

    Args:
        change: sigma, rate or record.
        keyed: noise has the run's own key. Else it has the seed's alone, as it was before, and is the same in both runs.
    """
    first = _configured()
    model, (inputs, targets) = network(seed)
    one_less = inputs[:3], targets[:3]
    code = foreign_code(first.plugins)
    second = {
        "sigma": _configured("algorithm.noise_multiplier=1.25"),
        "rate": _configured("optimizer.lr=0.25"),
        "record": first,
    }[change]
    runs = []
    for config, moved in ((first, 0.0), (second, 0.1 if change == "rate" else 0.0)):
        with torch.no_grad():  # another rate has led to other weights
            for parameter in model.parameters():
                parameter.add_(moved)
        sigma = float(config.algorithm.options["noise_multiplier"])
        make = lookup("algorithm", "zeta_dp_sgd")
        problem = Problem(
            model, lambda o, t: 1e3 * nn.functional.cross_entropy(o, t, reduction="none"), _FULL
        )
        algorithm: Algorithm = make(problem, noise_multiplier=sigma, max_grad_norm=1.0)
        sums = sums_of(algorithm, one_less), sums_of(algorithm, (inputs, targets))
        runs.append((config, algorithm.mechanism(), *sums))

    def release(there: bool, count: int) -> Tensor:
        return torch.stack([one(seed * 10**6 + 2 * trial + there, there) for trial in range(count)])

    def one(trial: int, there: bool) -> Tensor:
        parts = []
        for which, (config, mechanism, without, with_it) in enumerate(runs):
            gone = (
                change == "record" and which == 1
            )  # the second run is on the rest, whatever the first was on
            data = "all but one" if gone else "with it" if there else "without"
            key: int | str = trial
            if keyed:
                key = run_key(
                    run_digest(dataclasses.replace(config, seed=trial), data), mechanism, code
                )
            sums = with_it if there and not gone else without
            noise = (draw(block, SeededNoise(key), 0, CPU) for block in mechanism.blocks)
            parts += [
                torch.view_as_real(sums[b.name] + xi).flatten()
                for b, xi in zip(mechanism.blocks, noise, strict=True)
            ]
        return torch.cat(parts).double()

    return release


@cache
def _configured(*words: str) -> Run:
    return parse(compose(["recipe=quickstart", "algorithm.noise_multiplier=1.0", *words]))


def network(seed: int) -> tuple[nn.Module, Batch]:
    """A small complex network, and four records, the last of which comes or goes; each is taken for what it is not."""
    generator = torch.Generator().manual_seed(
        int(stream(seed, "audit", "network").generate_state(1, np.uint64)[0]) % 2**63
    )
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


class Magnitude(nn.Module):
    """|z|, as an output of a complex network."""

    def forward(self, z: Tensor) -> Tensor:
        return z.abs()


def sums_of(algorithm: Algorithm, batch: Batch) -> dict[str, Tensor]:
    total = {
        block.name: torch.zeros(block.shape, dtype=getattr(torch, block.dtype))
        for block in algorithm.mechanism().blocks
    }
    algorithm.accumulate(total, batch)
    return total


# ------------------------------------------------------------------------------------------------------------ batches

RATE = 0.1
SHARP = 0.05  # the noise multiplier of `sampled`
BESIDE = (
    1.1 * RATE
)  # its δ: where a record is drawn at the rate, next to nothing can be told beyond it


def sampled(seed: int, too_many: float = 1.0) -> Release:
    """One step's share of a record, in next to no noise: whether it was drawn is all there is to see.

    Args:
        too_many: records are drawn so many times as often as the mechanism says.
    """
    plan = Plan(Sampling("poisson", RATE * too_many, 4 * RATE * too_many, 4), 1, 1)

    def release(there: bool, count: int) -> Tensor:
        noise = (
            np.random.default_rng(stream(seed, "audit", "sampled", int(there))).standard_normal(
                count
            )
            * SHARP
        )
        drawn = np.array(
            [
                there and 0 in plan.draw(f"{seed}:{int(there)}:{trial}", 0)[0]
                for trial in range(count)
            ]
        )
        return torch.from_numpy(drawn + noise).unsqueeze(1)

    return release


# --------------------------------------------------------------------------------------------------------- cancelling


def cancelling(seed: int, guarded: bool = True) -> Release:
    """DP-SGD on a linear layer over 64 positions, and a record of size 10¹⁰ whose terms there cancel to 0, each with another.

    Args:
        guarded: by the package's own clipping. Else by exact norms and a float32 sum, as it was before.
    """
    layer = nn.Linear(1, 1, bias=False)
    generator = torch.Generator().manual_seed(seed % 2**63)
    rest = torch.randn(3, 64, 1, generator=generator), torch.randn(3, 64, generator=generator)
    order, (x, w) = torch.randperm(64, generator=generator), torch.rand(2, 32, generator=generator)
    large, weights = 1e10 * torch.cat([x, x])[order], torch.cat([w, -w])[order]
    both = torch.cat([rest[0], large.view(1, 64, 1)]), torch.cat([rest[1], weights.view(1, 64)])

    def loss(outputs: Tensor, weights: Tensor) -> Tensor:
        return (outputs.flatten(1) * weights).sum(dim=1)

    def bare_sum(batch: Batch) -> Tensor:
        norms = (
            (batch[0].double().flatten(1) * batch[1].double()).sum(dim=1).abs()
        )  # Σ_t w_t x_t, all digits
        factors = (SAFETY / norms).clamp(max=1.0).float().view(-1, 1)
        return ((batch[1] * factors).view(1, -1) @ batch[0].view(-1, 1)).double()

    def guarded_sum(batch: Batch) -> Tensor:
        return clipped_sum(layer, loss, batch, 1.0, engine="fast").sums["weight"].double()

    made: Callable[[Batch], Tensor] = guarded_sum if guarded else bare_sum
    block = Block("weight", (1, 1), "float64", 1.0, 1.0, "real")
    sums = [made(batch) for batch in (rest, both)]

    def release(there: bool, count: int) -> Tensor:
        many = dataclasses.replace(block, shape=(count, 1, 1))
        return (sums[there] + draw(many, SeededNoise(seed), int(there), CPU)).flatten(1)

    return release


def together(*z: float) -> float:
    """The noise multiplier of several Gaussian releases seen at once."""
    return 1 / math.sqrt(sum(1 / each**2 for each in z))


def subsampled(z: float) -> Mechanism:
    """One Gaussian release of a Poisson batch at `RATE`."""
    return Mechanism(
        (Block("share", (1,), "float64", 1.0, z, "real"),), Sampling("poisson", RATE, 4 * RATE, 4)
    )
