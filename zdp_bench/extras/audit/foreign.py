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
Release = dict[str, np.ndarray]  # [entries] each, float64

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
    tested = runs - runs // 4
    bound, delta, evidence = best_bound(
        without,
        with_it,
        tested // 3,
        confidence,
        lambda scores, _: sharpest_test(scores, curve),
        curve.__getitem__,
    )
    return Finding(
        case=name or getattr(make_step, "__name__", "step"),
        claim=claim.text,
        epsilon_claimed=curve[delta],
        lower_bound=bound,
        delta=delta,
        confidence=confidence,
        evidence=evidence,
    )


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
    centre, move = Mean(), Mean()
    repeated_without, repeated_with_it = Repeated(), Repeated()
    for seed in _draw_seeds(runs // 4, rng):
        without = released(make_step, neighbour, seed)
        with_it = released(make_step, with_canary, seed)
        centre.add(without)
        move.add(_subtract(with_it, without))
        repeated_without.add(without)
        repeated_with_it.add(with_it)
    features = Features.towards(
        move.value,
        centre.value,
        [repeated_without.value, repeated_with_it.value],
    )

    def look(examples: list[Example]) -> Views:
        seeds = _draw_seeds(runs - runs // 4, rng)
        views = [features.of(released(make_step, examples, seed)) for seed in seeds]
        return {name: np.array([view[name] for view in views]) for name in SHARES}

    return look(neighbour), look(with_canary)


def _draw_seeds(count: int, rng: np.random.Generator) -> list[int]:
    return rng.integers(2**31, size=count).tolist()


def _choose_canary(
    make_step: MakeStep,
    rest: list[Example],
    neighbour: list[Example],
    rng: np.random.Generator,
) -> Example:
    """Return the candidate that moves the release furthest, by ‖Σd‖ over a few pairs of runs.

    Noise that does not cancel in a pair adds the same to all; one that makes noise vanish moves it.
    """
    seeds = _draw_seeds(TRIED, rng)
    bases = [released(make_step, neighbour, seed) for seed in seeds]

    def measure_move(canary: Example) -> float:
        moves = []
        for seed, base in zip(seeds, bases, strict=True):
            release = released(make_step, [*rest, canary], seed)
            move = _subtract(release, base)
            moves.append(np.concatenate(list(move.values())))
        return float(np.linalg.norm(np.sum(moves, axis=0)))

    return max(_list_candidates(rest, rng), key=measure_move)


def _list_candidates(examples: list[Example], rng: np.random.Generator) -> Iterator[Example]:
    """Yield an example, and noise of its shape, at two scales and with up to three targets each."""
    first, _ = examples[0]
    inputs = [first]
    if isinstance(first, Tensor) and (first.is_floating_point() or first.is_complex()):
        generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
        noise = torch.randn(first.shape, dtype=first.dtype, generator=generator)
        noise = noise.to(first.device)
        inputs = [first, 100 * first, noise, 100 * noise]
    for _, target in examples[:3]:
        for x in inputs:
            yield x, target


# ------------------------------------------------------------------------------ what is released


def released(
    make_step: MakeStep,
    examples: list[Example],
    seed: int,
) -> Release:
    """Run the function once.

    Returns:
        its tensors, flat in float64; complex ones as two parts, `name.real` and `name.imag`.

    Raises:
        UserError: it returns something other than finite tensors by name.
    """
    result = make_step([*examples], seed)
    if not isinstance(result, Mapping):
        kind = type(result).__name__
        raise UserError(f"make_step must return a dictionary of tensors by name, not {kind}.")
    if not result:
        raise UserError("make_step must return a dictionary of tensors by name, not an empty one.")
    release: Release = {}
    for name, value in result.items():
        if not isinstance(value, Tensor | np.ndarray | float | int):
            kind = type(value).__name__
            raise UserError(f"make_step: '{name}' is a {kind}; return tensors by name.")
        tensor = torch.as_tensor(value).detach().cpu()
        if not torch.isfinite(tensor).all():
            raise UserError(
                f"make_step: '{name}' contains values that are not finite, so nothing can be "
                "measured; clip what overflows, or use a smaller canary."
            )
        if tensor.is_complex():
            release[f"{name}.real"] = _flatten(tensor.real)
            release[f"{name}.imag"] = _flatten(tensor.imag)
        else:
            release[name] = _flatten(tensor)
    return release


def _flatten(tensor: Tensor) -> np.ndarray:
    return tensor.double().flatten().numpy().copy()


def _subtract(release: Release, base: Release) -> Release:
    shapes = {name: value.shape for name, value in release.items()}
    if shapes != {name: value.shape for name, value in base.items()}:
        raise UserError("make_step must return the same names and shapes in every run.")
    return {name: value - base[name] for name, value in release.items()}


class Mean:
    """The mean of releases that are seen one after the other."""

    def __init__(self) -> None:
        self.count = 0
        self.value: Release = {}

    def add(self, release: Release) -> None:
        self.count += 1
        if self.count == 1:
            self.value = {name: np.zeros_like(value) for name, value in release.items()}
        for name, change in _subtract(release, self.value).items():
            self.value[name] = self.value[name] + change / self.count


class Repeated:
    """The last value that each entry took in two consecutive releases, or NaN."""

    def __init__(self) -> None:
        self.last: Release = {}
        self.value: Release = {}

    def add(self, release: Release) -> None:
        for name, value in release.items():
            unknown = np.full_like(value, np.nan)
            repeated = value == self.last.get(name)
            self.value[name] = np.where(repeated, value, self.value.get(name, unknown))
        self.last = release


@dataclass(frozen=True)
class Features:
    """What the attack looks at in a release: projections, distances and atoms.

    Attributes:
        directions: of length 1 in each tensor, or 0.
        centre: the mean release without the canary.
        repeated: values that come again, without the canary and with it.
        feature_of: the number of each tensor's projection.
    """

    directions: Release
    centre: Release
    repeated: Sequence[Release]
    feature_of: dict[str, int]

    @staticmethod
    def towards(
        move: Release,
        centre: Release,
        repeated: Sequence[Release],
    ) -> Features:
        """Look along the mean move in each tensor; those that move least share a feature."""
        lengths = {name: float(np.linalg.norm(value)) for name, value in move.items()}
        order = sorted(move, key=lambda name: -lengths[name])
        shared = [lengths[name] for name in order[PARTS:]]
        shared_length = float(np.linalg.norm(shared))
        directions, feature_of = {}, {}
        for name, value in move.items():
            feature_of[name] = min(order.index(name), PARTS)
            length = lengths[name] if feature_of[name] < PARTS else shared_length
            directions[name] = value / (length or 1.0)
        return Features(directions, centre, repeated, feature_of)

    def of(self, release: Release) -> Mapping[str, Any]:
        """Return the features of each view."""
        projections = np.zeros(min(len(self.directions), PARTS + 1))
        square_from_zero, square_from_centre = 0.0, 0.0
        for name, distance in _subtract(release, self.centre).items():
            value = release[name]
            projections[self.feature_of[name]] += float(distance @ self.directions[name])
            square_from_zero += float(value @ value)
            square_from_centre += float(distance @ distance)
        atoms = [_count_equal(release, values) for values in self.repeated]
        return {
            "projection": projections,
            "distance": (math.sqrt(square_from_zero), math.sqrt(square_from_centre)),
            "atom": (*atoms, _count_equal_moves(release)),
        }


def _count_equal(release: Release, values: Release) -> int:
    """Return how many entries are exactly the given ones."""
    count = 0
    for name, value in values.items():
        count += int((release[name] == value).sum())
    return count


def _count_equal_moves(release: Release) -> int:
    """Return how many pairs of tensors are as far apart as another pair.

    Updates that are equal in every step move the weights, or are, equally far apart.
    """
    marks = [0.0]
    for value in [*release.values()][:COMPARED]:
        weights = np.cos(np.arange(len(value)))
        marks.append(float(value @ weights))
    moves = np.subtract.outer(marks, marks)[np.triu_indices(len(marks), 1)]
    (repeats,) = count_repeats(moves[None])
    return int(repeats)


# ------------------------------------------------------------------------------ what is claimed


@dataclass(frozen=True)
class StatedClaim:
    """A claim to attack.

    Attributes:
        text: the claim in words.
        epsilon: δ -> the ε that is claimed for it.
        deltas: for which the claim holds.
    """

    text: str
    epsilon: Callable[[float], float]
    deltas: tuple[float, ...]

    @staticmethod
    def read(claimed: Mapping[str, float], replaced: bool = False) -> StatedClaim:
        """Read the claim as a script states it.

        Args:
            claimed: epsilon and delta; or noise_multiplier (σ, the noise over the bound of one
                example), sample_rate (default 1) and steps (default 1) of DP-SGD.
            replaced: neighbours differ by a replaced example, not by an added one. A mechanism's
                batches are then of a fixed size, drawn without replacement; else Poisson.

        Raises:
            UserError: it has neither form, or a number is out of its range.
        """
        keys = set(claimed) if isinstance(claimed, Mapping) else set()
        if keys == {"epsilon", "delta"}:
            return StatedClaim._of_epsilon(float(claimed["epsilon"]), float(claimed["delta"]))
        if not {"noise_multiplier"} <= keys <= {"noise_multiplier", "sample_rate", "steps"}:
            raise UserError(FORMS)
        sigma = float(claimed["noise_multiplier"])
        rate = float(claimed.get("sample_rate", 1.0))
        steps = int(claimed.get("steps", 1))
        require(
            0 < sigma < math.inf, "claimed noise_multiplier", sigma, "must be positive and finite"
        )
        require(0 < rate <= 1, "claimed sample_rate", rate, "must lie in (0, 1]")
        require(steps >= 1, "claimed steps", steps, "must be at least 1")
        # Only the rate matters here, not how many examples there are.
        sampling = Sampling("uniform" if replaced else "poisson", rate, 1.0, 1)
        mechanism = Mechanism.of_z(sigma / sampling.shift, sampling)
        plural = "s" if steps > 1 else ""
        return StatedClaim(
            f"σ = {sigma:.4g}, rate {rate:.4g}, {steps:,} step{plural}",
            lambda delta: tight_epsilon(mechanism, steps, delta),
            DELTAS,
        )

    @staticmethod
    def _of_epsilon(epsilon: float, delta: float) -> StatedClaim:
        require(0 <= epsilon < math.inf, "claimed epsilon", epsilon, "must be finite, 0 or more")
        require(0 < delta < 1, "claimed delta", delta, "must lie in (0, 1)")
        return StatedClaim(f"ε = {epsilon:.4g} at δ = {delta:g}", lambda _: epsilon, (delta,))
