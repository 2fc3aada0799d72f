"""Attack training code of others: any function from examples and a seed to what it releases.

The function runs many times on each of two neighbouring lists of examples: without a canary, and
with it. Runs of their own teach the attack what to look at, and the rest test it:

    canary        of a few loud examples, the one that moves the release furthest, unless given
    direction     the mean difference of what two runs with one seed release
    test          along the direction in each tensor, complex ones by part; by the distance from 0
                  and from the mean release; by numbers and updates that are exactly those of other
                  runs or steps. `release.py` learns how to weigh them, δ, and a threshold
    bound         Clopper-Pearson on hits and false alarms, in runs that taught nothing

One step is attacked like a whole run: the adversary sees what the function returns, and no
more.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zdp_bench.errors import UserError, require
from zdp_bench.extras.audit.release import (
    SHARES,
    Finding,
    Views,
    best_bound,
    count_repeats,
    sharpest_test,
)
from zdp_bench.privacy.accounting import tight_epsilon
from zdp_bench.privacy.mechanism import Mechanism, Sampling
from zdp_bench.privacy.noise import stream

Example = tuple[Any, Any]
# (examples, seed) -> the tensors that leave the training, by name
MakeStep = Callable[[list[Example], int], Mapping[str, Tensor]]

RUNS = 400  # of each neighbour
TRIED = 4  # pairs of runs for each canary that is tried
PARTS = 16  # tensors that get a feature of their own; the others share one
COMPARED = 64  # tensors that are held against each other
# A mechanism claims an ε for every δ. Few runs refute most in the middle of that curve.
DELTAS = (1e-5, 0.01, *(twentieth / 20 for twentieth in range(1, 20)))
FORMS = (
    "claimed: give {'epsilon': ..., 'delta': ...}, "
    "or {'noise_multiplier': ..., 'sample_rate': ..., 'steps': ...}."
)


def step(
    make_step: MakeStep,
    examples: Sequence[Example],
    claimed: Mapping[str, float],
    canary: Example | list[Example] | None = None,
    instead: Example | None = None,
    runs: int = RUNS,
    confidence: float = 0.99,
    seed: int = 0,
    name: str = "",
) -> Finding:
    """Return the finding of an attack on a private training step, or on a whole private training.

    The finding is 'flagged' if the attack shows more than the claimed ε. If the claim is true, that
    happens with probability 1 − confidence at most, whatever the function does. 'passes' means 'not
    caught'.

    Args:
        make_step: (list of (x, y), seed) -> tensors by name, such as a `state_dict`: all that the
            claim says may be seen. It must take lists of any length, start from the same weights
            whatever the seed, and draw batches and noise from the seed.
        examples: the other examples, (x, y) each; the adversary knows them.
        claimed: {"epsilon", "delta"}, or {"noise_multiplier", "sample_rate", "steps"}, which claims
            an ε for every δ and is easier to refute; see `StatedClaim.read`.
        canary: the example that is in one of the two neighbours; by default a loud one is chosen.
            A list of them comes and goes as one: a patient's, of whom the claim then is.
        instead: what stands in its place in the other; by default nothing.
        runs: of each neighbour. A few hundred find coarse faults, thousands find fine ones.
        seed: of the attack; the same seed gives the same finding.

    Raises:
        UserError: the claim or a number is wrong, or the function does not return finite tensors
            with the same names and shapes in every run.
    """
    require(runs >= 40, "runs", runs, "must be at least 40")
    require(0.5 <= confidence < 1, "confidence", confidence, "must lie in [0.5, 1)")
    require(len(examples) > 0, "examples", [], "must not be empty")
    claim = StatedClaim.read(claimed, replaced=instead is not None)
    rest = [*examples]
    neighbour = rest if instead is None else [*rest, instead]
    rng = np.random.default_rng(stream(seed, "audit", "step"))
    # Thousands of runs would repeat one warning thousands of times.
    with warnings.catch_warnings(action="ignore"):
        if canary is None:
            canary = _choose_canary(make_step, rest, neighbour, rng)
        added = canary if isinstance(canary, list) else [canary]
        without, with_it = _watch(make_step, neighbour, [*rest, *added], runs, rng)
    curve = {delta: claim.epsilon(delta) for delta in claim.deltas}
    bound, delta, evidence = best_bound(
        without,
        with_it,
        (runs - runs // 4) // 3,
        confidence,
        lambda scores, _: sharpest_test(scores, curve),
        curve.__getitem__,
    )
    name = name or getattr(make_step, "__name__", "step")
    return Finding(name, claim.text, curve[delta], bound, delta, confidence, evidence)


def _watch(
    make_step: MakeStep,
    neighbour: list[Example],
    with_canary: list[Example],
    runs: int,
    rng: np.random.Generator,
) -> tuple[Views, Views]:
    """Return what the attack looks at in three quarters of the runs, without the canary and with.

    The first quarter is pairs of runs that share a seed, and with it their noise if the function
    follows its seed: their mean difference is the direction.
    """
    first, moved, repeated = Mean(), Mean(), (Repeated(), Repeated())
    for number in _seeds(runs // 4, rng):
        base, other = (released(make_step, these, number) for these in (neighbour, with_canary))
        first.add(base)
        moved.add(_difference(other, base))
        repeated[0].add(base)
        repeated[1].add(other)
    features = Features.towards(moved.value, first.value, [each.value for each in repeated])

    def look(examples: list[Example]) -> Views:
        seeds = _seeds(runs - runs // 4, rng)
        seen = [features.of(released(make_step, examples, number)) for number in seeds]
        return {view: np.array([each[view] for each in seen]) for view in SHARES}

    return look(neighbour), look(with_canary)


def _seeds(count: int, rng: np.random.Generator) -> list[int]:
    return rng.integers(2**31, size=count).tolist()


def _choose_canary(
    make_step: MakeStep, rest: list[Example], neighbour: list[Example], rng: np.random.Generator
) -> Example:
    """Return the candidate that moves the release furthest, by ‖Σd‖ over a few pairs of runs.

    Noise that does not cancel in a pair adds the same to all; one that makes noise vanish moves it.
    """
    seeds = _seeds(TRIED, rng)
    bases = [released(make_step, neighbour, number) for number in seeds]

    def moved(canary: Example) -> float:
        differences = [
            np.concatenate([*_difference(released(make_step, [*rest, canary], n), base).values()])
            for n, base in zip(seeds, bases, strict=True)
        ]
        return float(np.linalg.norm(np.sum(differences, axis=0)))

    return max(_candidates(rest, rng), key=moved)


def _candidates(examples: list[Example], rng: np.random.Generator) -> Iterator[Example]:
    """Yield an example, and noise of its shape, at two scales and with up to three targets each."""
    inputs = [examples[0][0]]
    if isinstance(inputs[0], Tensor) and (inputs[0].is_floating_point() or inputs[0].is_complex()):
        generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
        x = inputs[0]
        noise = torch.randn(x.shape, dtype=x.dtype, generator=generator).to(x.device)
        inputs = [scale * base for base in (x, noise) for scale in (1, 100)]
    for _, target in examples[:3]:
        for x in inputs:
            yield x, target


# ------------------------------------------------------------------------------ what is released


Release = dict[str, np.ndarray]  # [entries] each, float64


def released(make_step: MakeStep, examples: list[Example], seed: int) -> Release:
    """Run the function once; return its tensors flat in float64, complex ones as two parts."""
    result = make_step([*examples], seed)
    if not isinstance(result, Mapping) or not result:
        said = "an empty one" if isinstance(result, Mapping) else type(result).__name__
        raise UserError(f"make_step must return a dictionary of tensors by name, not {said}.")
    flat: Release = {}
    for name, value in result.items():
        if not isinstance(value, Tensor | np.ndarray | float | int):
            kind = type(value).__name__
            raise UserError(f"make_step: '{name}' is a {kind}; return tensors by name.")
        tensor = torch.as_tensor(value).detach().cpu()
        parts = {name: tensor}
        if tensor.is_complex():
            parts = {f"{name}.real": tensor.real, f"{name}.imag": tensor.imag}
        for part, numbers in parts.items():
            flat[part] = numbers.double().flatten().numpy().copy()
            if not np.isfinite(flat[part]).all():
                raise UserError(
                    f"make_step: '{name}' contains values that are not finite, so nothing can be "
                    "measured; clip what overflows, or use a smaller canary."
                )
    return flat


def _difference(one: Release, other: Release) -> Release:
    if {name: v.shape for name, v in one.items()} != {name: v.shape for name, v in other.items()}:
        raise UserError("make_step must return the same names and shapes in every run.")
    return {name: value - other[name] for name, value in one.items()}


class Mean:
    """The mean of releases that are seen one after the other."""

    def __init__(self) -> None:
        self.count = 0
        self.value: Release = {}

    def add(self, release: Release) -> None:
        self.count += 1
        last = self.value or {name: np.zeros_like(v) for name, v in release.items()}
        self.value = {
            name: last[name] + change / self.count
            for name, change in _difference(release, last).items()
        }


class Repeated:
    """Return the last value that each entry took in two consecutive runs, or NaN."""

    def __init__(self) -> None:
        self.last: Release = {}
        self.value: Release = {}

    def add(self, release: Release) -> None:
        for name, now in release.items():
            known = self.value.get(name, np.full_like(now, np.nan))
            self.value[name] = np.where(now == self.last.get(name), now, known)
        self.last = release


@dataclass(frozen=True)
class Features:
    """What the attack looks at in a release: projections, distances and atoms."""

    directions: Release  # of length 1 in each tensor, or 0
    centre: Release
    repeated: Sequence[Release]  # values that come again, without the canary and with it
    feature_of: dict[str, int]

    @staticmethod
    def towards(moved: Release, centre: Release, repeated: Sequence[Release]) -> Features:
        """Look along the mean move in each tensor; those that move least share a feature."""
        lengths = {name: float(np.linalg.norm(v)) for name, v in moved.items()}
        order = sorted(moved, key=lambda name: -lengths[name])
        own, shared = order[:PARTS], order[PARTS:]
        scale = {name: lengths[name] or 1.0 for name in own}
        together = float(np.linalg.norm([lengths[name] for name in shared])) or 1.0
        directions = {name: value / scale.get(name, together) for name, value in moved.items()}
        feature_of = {name: min(i, PARTS) for i, name in enumerate(order)}
        return Features(directions, centre, repeated, feature_of)

    def of(self, release: Release) -> Mapping[str, Any]:
        """Return the features of each view."""
        projections = np.zeros(min(len(self.directions), PARTS + 1))
        from_start, from_centre, marks = 0.0, 0.0, [0.0]
        for name, away in _difference(release, self.centre).items():
            value = release[name]
            projections[self.feature_of[name]] += float(away @ self.directions[name])
            from_start += float(value @ value)
            from_centre += float(away @ away)
            if len(marks) <= COMPARED:
                marks.append(float(value @ np.cos(np.arange(len(value)))))
        # Updates that are equal in every step move the weights, or are, equally far apart.
        moves = np.subtract.outer(marks, marks)[np.triu_indices(len(marks), 1)]
        same = [sum(int((release[n] == v).sum()) for n, v in r.items()) for r in self.repeated]
        return {
            "projection": projections,
            "distance": (from_start**0.5, from_centre**0.5),
            "atom": (*same, count_repeats(moves[None])[0]),
        }


# ------------------------------------------------------------------------------ what is claimed


@dataclass(frozen=True)
class StatedClaim:
    """A claim to attack."""

    text: str
    epsilon: Callable[[float], float]  # δ -> the ε that is claimed for it
    deltas: tuple[float, ...]  # for which the claim holds

    @staticmethod
    def read(claimed: Mapping[str, float], replaced: bool = False) -> StatedClaim:
        """Read the claim as a script states it.

        Args:
            claimed: epsilon and delta; or noise_multiplier (σ, the noise over the bound of one
                example), sample_rate (default 1) and steps (default 1) of DP-SGD.
            replaced: neighbours differ by a replaced example, not by an added one. A mechanism's
                batches are then of a fixed size, drawn without replacement; else Poisson.
        """
        given = set(claimed) if isinstance(claimed, Mapping) else set()
        if given == {"epsilon", "delta"}:
            epsilon, delta = float(claimed["epsilon"]), float(claimed["delta"])
            rule = "must be finite, 0 or more"
            require(0 <= epsilon < math.inf, "claimed epsilon", epsilon, rule)
            require(0 < delta < 1, "claimed delta", delta, "must lie in (0, 1)")
            return StatedClaim(f"ε = {epsilon:.4g} at δ = {delta:g}", lambda _: epsilon, (delta,))
        if not {"noise_multiplier"} <= given <= {"noise_multiplier", "sample_rate", "steps"}:
            raise UserError(FORMS)
        sigma, rate = float(claimed["noise_multiplier"]), float(claimed.get("sample_rate", 1.0))
        steps, rule = int(claimed.get("steps", 1)), "must be positive and finite"
        require(0 < sigma < math.inf, "claimed noise_multiplier", sigma, rule)
        require(0 < rate <= 1, "claimed sample_rate", rate, "must lie in (0, 1]")
        require(steps >= 1, "claimed steps", steps, "must be at least 1")
        # Only the rate matters here, not how many examples there are.
        sampling = Sampling("uniform" if replaced else "poisson", rate, 1.0, 1)
        mechanism = Mechanism.of_z(sigma / sampling.shift, sampling)
        text = f"σ = {sigma:.4g}, rate {rate:.4g}, {steps:,} step{'s' if steps > 1 else ''}"
        return StatedClaim(text, lambda delta: tight_epsilon(mechanism, steps, delta), DELTAS)
