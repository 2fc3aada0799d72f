"""Two runs whose noise is compared: with a shared stream, their difference shows the sums."""

from __future__ import annotations

import dataclasses
import math
from functools import cache

import torch
from torch import Tensor

from zdp_bench.algorithms import Algorithm, Problem
from zdp_bench.audit.cases.toy import (
    CPU,
    ONE_STEP,
    as_rows,
    build_network,
    neighbouring_sums,
    steep_loss,
)
from zdp_bench.audit.release import Release
from zdp_bench.config import compose, parse
from zdp_bench.config.digests import run_digest
from zdp_bench.config.schema import Run
from zdp_bench.privacy.noise import SeededNoise, draw, run_key
from zdp_bench.registry import lookup
from zdp_bench.training.environment import foreign_code

TRIALS = 2_000  # of each neighbour, at most: each takes two keys and two draws


def release_two_runs(seed: int, change: str, keyed: bool) -> Release:
    """One release of each of two runs on the same examples, which differ in σ, in the rate, or in
    one example.

    Args:
        change: sigma, rate or record.
        keyed: noise has the run's own key, else the seed's alone, so that both runs have the same
            noise.
    """
    first = _configure()
    model, batch = build_network(seed)
    code = foreign_code(first.plugins)
    second = {
        "sigma": _configure("algorithm.noise_multiplier=1.25"),
        "rate": _configure("optimizer.lr=0.25"),
        "record": first,
    }[change]
    runs = []
    for config, moved in ((first, 0.0), (second, 0.1 if change == "rate" else 0.0)):
        with torch.no_grad():  # another learning rate has led to other weights
            for parameter in model.parameters():
                parameter.add_(moved)
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
