"""Attack third-party training code: any function that maps examples and a seed to its releases.

The function runs many times on each of two neighbouring lists of examples, without and with a
canary. Some runs fit the attack, and the others test it:

    canary      a given example, or the one of a few with large gradients that moves the release
                furthest
    direction   the mean difference of the releases of two runs with the same seed
    features    each tensor's projection on the direction, with real and imaginary parts separate;
                distances from 0 and from the mean release; the numbers of values and updates that
                are exactly those of other runs or steps
    test        the features' weights, δ and the threshold, which `release.py` fits
    bound       Clopper-Pearson bounds on hits and false alarms in runs that were not used to fit

A single step is attacked in the same way as a whole run: the adversary sees what the function
returns, and nothing else.
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

from zdp_bench.errors import UserError, in_one_line, require, wrong_type
from zdp_bench.extras.audit.release import (
    FAR_OFF,
    SHARES,
    Finding,
    Views,
    best_bound,
    count_repeats,
    make_finite,
    sharpest_test,
)
from zdp_bench.privacy.accounting import tight_epsilon
from zdp_bench.privacy.mechanism import Mechanism, Sampling
from zdp_bench.privacy.noise import stream

Example = tuple[Any, Any]
# (examples, seed) -> the released tensors, by name
MakeStep = Callable[[list[Example], int], Mapping[str, Tensor]]
# a tensor's name, and "real" or "imag" if it is a part of a complex tensor, else ""
Key = tuple[str, str]
Release = dict[Key, np.ndarray]  # each float64, [entries]

RUNS = 400  # of each neighbour
CANARY_RUNS = 4  # pairs of runs that try a candidate for the canary
MAX_FEATURES = 16  # tensors with a feature of their own; all others share one
MAX_COMPARED = 64  # tensors whose moves are compared, because the number of pairs is quadratic
# A mechanism claims an ε for every δ. With few runs, a medium δ is the easiest to refute.
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

    The finding is 'flagged' if the lower bound on ε exceeds the claimed ε. A true claim is flagged
    with probability 1 − confidence at most, whatever the function does. 'passes' means 'not
    caught'.

    Args:
        make_step: (list of (x, y), seed) -> tensors by name, such as a `state_dict`: everything
            that an adversary may see under the claim. It must accept lists of any length, start
            from the same weights for every seed, and draw batches and noise from the seed.
        examples: the examples (x, y) that both neighbours have, and that the adversary knows.
        claimed: {"epsilon", "delta"}, or {"noise_multiplier", "sample_rate", "steps"}. The second
            form claims an ε for every δ, which is easier to refute; see `StatedClaim.read`.
        canary: the example that only one of the neighbours has. A list of examples, such as all of
            a patient, is added as a whole; the claim is then about the patient. Default: one of
            several examples with large gradients.
        instead: the example that the canary replaces. Default: none, so the canary is added.
        runs: the number of runs of each neighbour. A few hundred find large faults, thousands find
            small ones.
        confidence: the confidence of the lower bound on ε.
        seed: the seed of the attack. The same seed gives the same finding.
        name: the name of the finding's case. Default: the name of the function.

    Raises:
        UserError: the claim or an argument is invalid, or the function does not return tensors
            with the same names and shapes in every run, which are finite without the canary.
    """
    require(runs >= 40, "runs", runs, "must be at least 40")
    require(0.5 <= confidence < 1, "confidence", confidence, "must lie in [0.5, 1)")
    known = _list_examples(examples, must_be_pairs=canary is None)
    claim = StatedClaim.read(claimed, replaced=instead is not None)
    neighbour = known if instead is None else [*known, instead]
    rng = np.random.default_rng(stream(seed, "audit", "step"))
    # Thousands of runs would repeat one warning thousands of times.
    with warnings.catch_warnings(action="ignore"):
        if canary is None:
            canary = _choose_canary(make_step, known, neighbour, rng)
        added = canary if isinstance(canary, list) else [canary]
        without, with_it = _extract_features(make_step, neighbour, [*known, *added], runs, rng)
    curve = {delta: claim.epsilon(delta) for delta in claim.deltas}
    # Of all runs, a quarter gave the direction, a quarter fits the tests, and half tests.
    num_views = runs - runs // 4
    bound, delta, evidence = best_bound(
        without,
        with_it,
        num_views // 3,
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


def _list_examples(examples: Any, must_be_pairs: bool) -> list[Example]:
    """Return the examples as a list; reject what cannot be listed or, if required, is no pair."""
    try:
        known = [*examples]
    except TypeError:
        raise wrong_type("examples", examples, "a list", "[(x, y), ...]") from None
    require(len(known) > 0, "examples", known, "must not be empty")
    if must_be_pairs and not all(_is_pair(each) for each in known):
        raise UserError("examples: must be pairs (x, y); of other examples, give the canary.")
    return known


def _is_pair(example: Any) -> bool:
    if isinstance(example, Tensor | np.ndarray):  # a row of an array of pairs
        return example.ndim > 0 and len(example) == 2
    return isinstance(example, tuple | list) and len(example) == 2


def _extract_features(
    make_step: MakeStep,
    neighbour: list[Example],
    with_canary: list[Example],
    runs: int,
    rng: np.random.Generator,
) -> tuple[Views, Views]:
    """Return the features of three quarters of the runs, without and with the canary.

    The first quarter determines what the features are. Its runs come in pairs with the same seed,
    and therefore the same noise if the function draws it from the seed, so that the mean of their
    differences is mostly the canary's effect.
    """
    centre, move = Mean(), Mean()
    repeated_without, repeated_with_it = Repeated(), Repeated()
    for seed in _draw_seeds(runs // 4, rng):
        without = run_once(make_step, neighbour, seed, must_be_finite=True)
        with_it = run_once(make_step, with_canary, seed)
        centre.add(without)
        move.add(_subtract(with_it, without))
        repeated_without.add(without)
        repeated_with_it.add(with_it)
    features = Features.towards(
        move.value,
        centre.value,
        [repeated_without.value, repeated_with_it.value],
    )

    def extract_views(examples: list[Example], must_be_finite: bool) -> Views:
        views = []
        for seed in _draw_seeds(runs - runs // 4, rng):
            release = run_once(make_step, examples, seed, must_be_finite)
            views.append(features.extract(release))
        return {name: np.array([view[name] for view in views]) for name in SHARES}

    views_without = extract_views(neighbour, must_be_finite=True)
    return views_without, extract_views(with_canary, must_be_finite=False)


def _draw_seeds(count: int, rng: np.random.Generator) -> list[int]:
    return rng.integers(2**31, size=count).tolist()


def _choose_canary(
    make_step: MakeStep,
    known: list[Example],
    neighbour: list[Example],
    rng: np.random.Generator,
) -> Example:
    """Return the candidate that moves the release furthest, by the norm of the summed differences.

    Noise that does not cancel in a pair of runs adds about the same to every candidate, unless a
    candidate makes the noise vanish, which is then a move that is found.
    """
    seeds = _draw_seeds(CANARY_RUNS, rng)
    bases = [run_once(make_step, neighbour, seed, must_be_finite=True) for seed in seeds]

    def measure_move(canary: Example) -> float:
        moves = []
        for seed, base in zip(seeds, bases, strict=True):
            release = run_once(make_step, [*known, canary], seed)
            move = _subtract(release, base)
            moves.append(np.concatenate(list(move.values())))
        return float(np.linalg.norm(np.sum(moves, axis=0)))

    return max(_list_candidates(known, rng), key=measure_move)


def _list_candidates(examples: list[Example], rng: np.random.Generator) -> Iterator[Example]:
    """Yield an example and noise of its shape, at two scales and with up to three targets."""
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


# -------------------------------------------------------------------------------------- releases


def run_once(
    make_step: MakeStep,
    examples: list[Example],
    seed: int,
    must_be_finite: bool = False,
) -> Release:
    """Run the function once, and return its tensors.

    A release that is not finite only if the canary is present reveals the canary, so it is measured
    (see `make_finite`). If the canary is absent, such a release is a mistake in the function.

    Args:
        make_step: the function.
        examples: the examples.
        seed: the seed.
        must_be_finite: whether to reject tensors that `make_finite` would change. Default: False.

    Returns:
        flat float64 arrays; a complex tensor is two of them, the real and the imaginary part.

    Raises:
        UserError: the function does not return tensors by name, or they are not finite.
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
        try:
            tensor = torch.as_tensor(value).detach().cpu().to_dense()
        except (TypeError, ValueError, RuntimeError) as error:  # an array of text, say
            raise UserError(
                f"make_step: '{name}' contains no numbers ({in_one_line(error)})."
            ) from None
        parts = {"real": tensor.real, "imag": tensor.imag} if tensor.is_complex() else {"": tensor}
        for part, entries in parts.items():
            values = entries.double().flatten()
            measured = make_finite(values)
            if must_be_finite and not torch.equal(measured, values):
                raise UserError(
                    f"make_step: '{name}' contains values that are not finite, or exceed "
                    f"{FAR_OFF:g}, without the canary, so it cannot be measured; clip values that "
                    "overflow."
                )
            release[name, part] = measured.numpy()
    return release


def _subtract(release: Release, base: Release) -> Release:
    shapes = {name: value.shape for name, value in release.items()}
    if shapes != {name: value.shape for name, value in base.items()}:
        raise UserError("make_step must return the same names and shapes in every run.")
    return {name: value - base[name] for name, value in release.items()}


class Mean:
    """The running mean of releases."""

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
    """The most recent value that each entry had in two consecutive releases, or NaN."""

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
    """The features of a release: projections, distances and atoms (see `release.py`).

    Attributes:
        directions: the mean move in each tensor, normalised to length 1 in each feature.
        centre: the mean release without the canary.
        repeated: each entry's repeated value, without the canary and with it; see `Repeated`.
        feature_of: the index of the feature that a tensor's projection adds to.
    """

    directions: Release
    centre: Release
    repeated: Sequence[Release]
    feature_of: dict[Key, int]

    @staticmethod
    def towards(
        move: Release,
        centre: Release,
        repeated: Sequence[Release],
    ) -> Features:
        """Return features that project each tensor on its mean move.

        The tensors that move least share a feature.
        """
        lengths = {name: float(np.linalg.norm(value)) for name, value in move.items()}
        order = sorted(move, key=lambda name: -lengths[name])
        shared = [lengths[name] for name in order[MAX_FEATURES:]]
        shared_length = float(np.linalg.norm(shared))
        directions, feature_of = {}, {}
        for name, value in move.items():
            feature_of[name] = min(order.index(name), MAX_FEATURES)
            length = lengths[name] if feature_of[name] < MAX_FEATURES else shared_length
            directions[name] = value / (length or 1.0)
        return Features(directions, centre, repeated, feature_of)

    def extract(self, release: Release) -> Mapping[str, Any]:
        """Return the features of a release, by view (the keys of `SHARES`)."""
        projections = np.zeros(min(len(self.directions), MAX_FEATURES + 1))
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
    """Return how many entries of a release are exactly equal to `values`."""
    count = 0
    for name, value in values.items():
        count += int((release[name] == value).sum())
    return count


def _count_equal_moves(release: Release) -> int:
    """Return how many pairs of tensors have the same difference as another pair.

    If a function returns the weights after each step, an update that occurs twice makes two such
    differences equal. Tensors are compared by a fixed linear function, to 0 as well, so that equal
    updates are found if the function returns the updates themselves.
    """
    marks = [0.0]
    for value in [*release.values()][:MAX_COMPARED]:
        weights = np.cos(np.arange(len(value)))
        marks.append(float(value @ weights))
    differences = np.subtract.outer(marks, marks)[np.triu_indices(len(marks), 1)]
    (repeats,) = count_repeats(differences[None])
    return int(repeats)


# --------------------------------------------------------------------------------------- claims


@dataclass(frozen=True)
class StatedClaim:
    """A claim to attack.

    Attributes:
        text: the claim in words.
        epsilon: δ -> the ε that is claimed at this δ.
        deltas: the values of δ at which the claim is tested.
    """

    text: str
    epsilon: Callable[[float], float]
    deltas: tuple[float, ...]

    @staticmethod
    def read(claimed: Mapping[str, float], replaced: bool = False) -> StatedClaim:
        """Return the claim that a script states.

        Args:
            claimed: `epsilon` and `delta`; or, for DP-SGD, `noise_multiplier` (σ, the noise's
                standard deviation divided by the clipping norm), `sample_rate` (default 1) and
                `steps` (default 1).
            replaced: if True, neighbours differ by a replaced example rather than an added one. A
                mechanism's batches then have a fixed size and are drawn without replacement;
                otherwise they are Poisson samples.

        Raises:
            UserError: the claim has neither form, or a number is out of range.
        """
        keys = set(claimed) if isinstance(claimed, Mapping) else set()
        if keys == {"epsilon", "delta"}:
            epsilon, delta = (_read_number(claimed, key) for key in ("epsilon", "delta"))
            return StatedClaim._of_epsilon(epsilon, delta)
        if not {"noise_multiplier"} <= keys <= {"noise_multiplier", "sample_rate", "steps"}:
            raise UserError(FORMS)
        sigma = _read_number(claimed, "noise_multiplier")
        rate = _read_number(claimed, "sample_rate", 1.0)
        steps = _read_number(claimed, "steps", 1.0)
        require(
            0 < sigma < math.inf, "claimed noise_multiplier", sigma, "must be positive and finite"
        )
        require(0 < rate <= 1, "claimed sample_rate", rate, "must lie in (0, 1]")
        is_count = steps >= 1 and steps.is_integer()
        require(is_count, "claimed steps", steps, "must be a whole number of at least 1")
        steps = int(steps)
        # ε depends on the sampling rate, not on the number of examples, so any number will do.
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


def _read_number(
    claimed: Mapping[str, float],
    key: str,
    default: float | None = None,
) -> float:
    """Return a number of a claim.

    Raises:
        UserError: the value is not a number, or too large a one.
    """
    value = claimed.get(key, default)
    try:
        return float(value)  # type: ignore[arg-type]
    except OverflowError:  # of an integer
        raise UserError(f"claimed {key}: is too large a number; give one below 1e308.") from None
    except (TypeError, ValueError):
        raise wrong_type(f"claimed {key}", value, "a number", "for example 2.0") from None
