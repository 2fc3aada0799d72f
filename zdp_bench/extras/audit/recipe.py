"""Attack a recipe: one full-size release of its mechanism, and its whole run.

In the attack on the whole run, each canary is included in the training set with probability 1/2,
and the adversary guesses which are. Canaries are worst-case contributions, and the adversary sees
every release.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.signal import lfilter
from torch import Tensor

from zdp_bench.algorithms import Algorithm
from zdp_bench.config.constraints import require_no_federation
from zdp_bench.config.schema import Run
from zdp_bench.errors import UserError, require
from zdp_bench.extras.audit.release import (
    RELEASE_DELTA,
    Finding,
    attack_release,
    guess,
    make_finite,
)
from zdp_bench.gradients import Batch
from zdp_bench.privacy.accounting import gdp_epsilon, tight_epsilon
from zdp_bench.privacy.ledger import Ledger
from zdp_bench.privacy.mechanism import Block, Mechanism
from zdp_bench.privacy.noise import add_noise, real_view, run_key, step_key, stream
from zdp_bench.training.batches import micro_batches
from zdp_bench.training.machine import foreign_code
from zdp_bench.training.public_start import run_digest_of
from zdp_bench.training.setup import Setup
from zdp_bench.training.step import Training, arguments_of_accumulate, private_step
from zdp_bench.training.total import Total

CANARIES = 1000  # in the attack on a whole run; fewer if the model or the data is too small
MEDIAN_SQUARE = 0.45494  # the median of the square of a standard normal variable


@dataclass(frozen=True)
class Subject(Setup):
    """A recipe's run, ready for its first step.

    Attributes:
        key: the key that seeds batches and noise. It differs from the run's own key: with the same
            noise, subtracting an audit's releases from the run's would cancel the noise.
    """

    key: str

    @staticmethod
    def prepare(config: Run) -> Subject:
        """Set up the run of a recipe.

        Raises:
            UserError: the recipe is federated, draws several views of an example, or has ε = ∞.
        """
        require_no_federation(config, "audit")
        if config.trainer.augmentations:
            raise UserError(
                "zdp-bench audit draws one view of an example, but trainer.augmentations draws "
                "several: add trainer.augmentations=null, which has the same mechanism."
            )
        if config.threads:
            torch.set_num_threads(config.threads)
        setup = Setup.of(config)
        if setup.mechanism.z == 0 or setup.plan.sampling.scheme == "shuffled":
            raise UserError(f"recipe={config.recipe}: its ε is ∞, so an audit cannot refute it.")
        setup.check_model()
        config = setup.config
        run = f"{run_digest_of(config, setup.data.digest)}:audit"
        key = run_key(run, setup.mechanism, foreign_code(config.plugins))
        return Subject(**vars(setup), key=key)

    @property
    def units(self) -> int:
        """The number of examples, or of patients if they are the unit, that a step samples from."""
        return len(self.data.train) if self.patients is None else self.patients.count

    @property
    def replaces(self) -> bool:
        """Whether neighbours differ by a replaced example, rather than by an added one."""
        return self.mechanism.sampling.shift == 2

    def rng(self, purpose: str) -> np.random.Generator:
        """Return a generator of the audit, seeded by the recipe's seed and the purpose."""
        return np.random.default_rng(stream(self.config.seed, "audit", purpose))


# ----------------------------------------------------------------------- contributions as vectors


class Coordinates:
    """An isometric map between a mechanism's blocks and one real vector.

    A vector of norm C is a contribution of norm C. A complex entry has two coordinates. A block
    with Hermitian noise is mapped to the real signal with that spectrum, because only such spectra
    occur.

    Attributes:
        starts, sizes: where each block begins in the vector, and its number of coordinates.
        size: the number of coordinates of the vector.
    """

    def __init__(self, mechanism: Mechanism) -> None:
        self.blocks = mechanism.blocks
        self.sizes = [math.prod(block.shape) * _count_parts(block) for block in self.blocks]
        *starts, self.size = accumulate(self.sizes, initial=0)
        self.starts = starts

    def to_vector(self, sums: dict[str, Tensor]) -> Tensor:
        """Return the vector of the blocks' tensors, [size]."""
        parts = []
        for block in self.blocks:
            value = sums[block.name]
            if block.noise == "hermitian":
                value = torch.fft.ifftn(value, dim=block.fft_dims, norm="ortho").real
            parts.append(real_view(value.resolve_conj()).flatten())
        return torch.cat(parts)

    def add_vector(
        self,
        vector: Tensor,
        sums: dict[str, Tensor],
    ) -> None:
        """Add a vector, [size], to the blocks' tensors in place."""
        for block, start, size in zip(self.blocks, self.starts, self.sizes, strict=True):
            total = sums[block.name]
            # Copy, because PyTorch may crash on a complex view of memory that is not aligned.
            part = vector[start : start + size].to(total.real.dtype, copy=True)
            if _count_parts(block) == 2:
                part = torch.view_as_complex(part.view(*block.shape, 2))
            part = part.view(block.shape)
            if block.noise == "hermitian":
                part = torch.fft.fftn(part, dim=block.fft_dims, norm="ortho")
            total += part

    def kinds(self) -> np.ndarray:
        """Return the kind of each coordinate, [size].

        Coordinates are of the same kind if they are in the same block and both real or both
        imaginary parts. The mechanism gives all coordinates of a kind the same noise variance.
        """
        kinds = []
        for number, (block, size) in enumerate(zip(self.blocks, self.sizes, strict=True)):
            part = np.arange(size) % _count_parts(block)
            kinds.append(2 * number + part)
        return np.concatenate(kinds)


def _count_parts(block: Block) -> int:
    """Return the number of coordinates of an entry of a block."""
    is_complex = block.dtype.startswith("complex")
    return 2 if is_complex and block.noise != "hermitian" else 1


def canary_supports(
    mechanism: Mechanism,
    coordinates: Coordinates,
    canaries: int,
    width: int,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Draw worst-case contributions that share no coordinate, so that they are orthogonal.

    The norm of each is exactly the bound: over all blocks if the bound is joint, otherwise in
    every block that has a coordinate for each canary.

    Args:
        mechanism: gives the bounds.
        coordinates: the coordinates of the mechanism's blocks.
        canaries: the number of contributions.
        width: the largest number of coordinates of a contribution in each group of blocks that
            share a bound.
        rng: draws coordinates and signs.

    Returns:
        the coordinates' indices and their values, each [canaries, coordinates of a canary].
    """
    bounds = [block.bound for block in mechanism.blocks]
    groups = list(zip(coordinates.starts, coordinates.sizes, bounds, strict=True))
    if mechanism.joint:
        groups = [(0, coordinates.size, bounds[0])]
    indices, values = [], []
    for start, size, bound in groups:
        if size < canaries and not mechanism.joint:
            continue
        group_width = max(1, min(width, size // canaries))
        chosen = rng.permutation(size)[: canaries * group_width]
        chosen = chosen.reshape(canaries, group_width)
        signs = rng.choice([-1.0, 1.0], size=chosen.shape)
        indices.append(start + chosen)
        values.append(signs * bound / math.sqrt(group_width))
    return np.concatenate(indices, axis=1), np.concatenate(values, axis=1)


# ------------------------------------------------------------------------------------ one release

MAX_RECORDS = 12  # of a hostile patient
FAR_STEP = 10**9  # beyond the steps of any run, so that the noise is not the run's
SCALES = (1e-2, 1.0, 1e2, 1e4)  # factors of a hostile example's inputs


def attack_recipe_release(
    subject: Subject, confidence: float, trials: int = 10_000
) -> list[Finding]:
    """Attack one release of the recipe's mechanism, with noise drawn as in a private step.

    The attack uses two contributions:
    - the worst one. The adversary first observes pure noise at some coordinates. It then chooses
      the vector whose norm is exactly the bound, in the direction with the least noise;
    - that of a hostile example: the training example that moves the algorithm's sum furthest,
      scaled or not, with the target of another example. It detects clipping that exceeds the
      bound. With `privacy.unit=patient`, it is that of a hostile patient with all records at once,
      which detects that records are clipped one by one.

    Both are multiplied by `Mechanism.reach`: with noise that is correlated over steps, the
    releases of a cycle together reveal as much as one release of a contribution scaled this way.

    Args:
        subject: the recipe's run.
        confidence: the confidence of the bounds.
        trials: the number of releases of each neighbour; fewer if the model is large.
    """
    mechanism = subject.mechanism
    coordinates = Coordinates(mechanism)
    trials = max(200, min(trials, int(2e8 / coordinates.size)))
    watched = _choose_watched(coordinates, subject.rng("release"))
    move = Move.of(_find_furthest_move(subject, coordinates), coordinates)

    # The adversary learns the noise from the first draws; the others are of the two neighbours.
    num_learned = max(200, trials // 10)
    num_draws = num_learned + 2 * trials
    indices = torch.from_numpy(np.concatenate(watched))
    noise_watched, noise_along = _draw_noise(subject, coordinates, num_draws, indices, move)

    def attack(
        noise: Tensor,
        without: Tensor,
        with_it: Tensor,
    ) -> tuple[float, str]:
        def release(present: bool, count: int) -> Tensor:
            start = num_learned + trials * present
            contribution = with_it if present else without
            return noise[start : start + count] + contribution

        shift = (with_it - without).numpy()
        return attack_release(release, trials, RELEASE_DELTA, confidence, shift)

    learned_noise = noise_watched[:num_learned].numpy()
    contribution = _worst_contribution(mechanism, watched, learned_noise)
    worst = torch.from_numpy(contribution) * mechanism.reach
    opposite = -worst if subject.replaces else torch.zeros_like(worst)
    hostile = move.lengths * mechanism.reach
    unit = "records" if subject.patients is None else "patients"
    results = {
        "worst contribution": attack(noise_watched, opposite, worst),
        f"hostile {unit}": attack(noise_along, torch.zeros_like(hostile), hostile),
    }
    z = mechanism.z
    return [
        Finding(
            case=f"{subject.config.recipe}: release, {name}",
            claim=f"its mechanism: z = {z:.4g}",
            epsilon_claimed=gdp_epsilon(1 / z, RELEASE_DELTA),
            lower_bound=bound,
            delta=RELEASE_DELTA,
            confidence=confidence,
            evidence=evidence,
        )
        for name, (bound, evidence) in results.items()
    ]


@dataclass(frozen=True)
class Move:
    """A move of the sum, split by the kind of coordinates (see `Coordinates.kinds`).

    Attributes:
        lengths: the length of the move in each kind, float64 [kinds].
        directions: the move, normalised to length 1 in each kind, float64 [size].
        kind_of: the index of each coordinate's kind, [size].
    """

    lengths: Tensor
    directions: Tensor
    kind_of: Tensor

    @staticmethod
    def of(move: Tensor, coordinates: Coordinates) -> Move:
        """Split a move, float64 [size]."""
        numbers = torch.from_numpy(coordinates.kinds())
        kinds, kind_of = torch.unique(numbers, return_inverse=True)
        squares = torch.zeros(len(kinds), dtype=torch.float64)
        lengths = squares.index_add_(0, kind_of, move.square()).sqrt()
        directions = move / lengths[kind_of].clamp(min=1e-300)
        return Move(lengths, directions, kind_of)

    def project(self, vector: Tensor) -> Tensor:
        """Return the projection of a vector, [size], on the move in each kind: float64 [kinds]."""
        kind_of = self.kind_of.to(vector.device)
        products = self.directions.to(vector.device) * vector
        return products.new_zeros(len(self.lengths)).index_add_(0, kind_of, products)


def _draw_noise(
    subject: Subject,
    coordinates: Coordinates,
    num_draws: int,
    watched: Tensor,
    move: Move,
) -> tuple[Tensor, Tensor]:
    """Draw noise as a private step does.

    Returns:
        the noise at the watched coordinates, float64 [num_draws, watched], and its projection on
        the move, float64 [num_draws, kinds].
    """
    mechanism = subject.mechanism
    source = subject.noise(subject.key)
    at_watched, along_move = [], []
    for draw in range(num_draws):
        total = Total(mechanism, subject.device).all_blocks()
        noisy = add_noise(total, mechanism, source, FAR_STEP + draw)
        noise = coordinates.to_vector(noisy).double()
        at_watched.append(noise[watched.to(noise.device)].cpu())
        along_move.append(move.project(noise).cpu())
    return torch.stack(at_watched), torch.stack(along_move)


def _choose_watched(coordinates: Coordinates, rng: np.random.Generator) -> list[np.ndarray]:
    """Choose about 64 coordinates: for each block, an array of their indices.

    Coordinates are chosen in pairs, which are the two parts of an entry in a complex block.
    """
    per_block = max(2, 64 // len(coordinates.blocks))
    watched = []
    for start, size in zip(coordinates.starts, coordinates.sizes, strict=True):
        pairs = np.sort(rng.permutation(max(1, size // 2))[: per_block // 2])
        chosen = np.stack([2 * pairs, 2 * pairs + 1], axis=1).flatten()
        watched.append(start + chosen[chosen < size])
    return watched


def _worst_contribution(
    mechanism: Mechanism,
    watched: list[np.ndarray],
    noise: np.ndarray,
) -> np.ndarray:
    """Return the contribution in the direction with the least noise, whose norm is the bound.

    If the bound is not joint, this holds in each block.

    Args:
        mechanism: gives the bounds.
        watched: the indices of the watched coordinates of each block.
        noise: noise at these coordinates, [draws, watched].

    Returns:
        the contribution at the watched coordinates, [watched].
    """
    sizes = [len(chosen) for chosen in watched]
    bounds = [block.bound for block in mechanism.blocks]
    if mechanism.joint:
        sizes, bounds = [sum(sizes)], bounds[:1]
    parts = []
    start = 0
    for size, bound in zip(sizes, bounds, strict=True):
        block_noise = noise[:, start : start + size]
        _, axes = np.linalg.eigh(block_noise.T @ block_noise)
        parts.append(bound * axes[:, 0])
        start += size
    return np.concatenate(parts)


class Hostile:
    """Measures how far a hostile example or patient moves the algorithm's sum.

    A hostile patient has the same record many times, or many different records.
    """

    def __init__(self, subject: Subject, coordinates: Coordinates) -> None:
        self.subject, self.coordinates = subject, coordinates
        rows = subject.rng("hostile").permutation(len(subject.data.train))[:16]
        inputs, targets = subject.data.train.batch(torch.from_numpy(rows))
        self.inputs = inputs.to(subject.device)
        self.targets = targets.to(subject.device)
        self.wrong_targets = self.targets.roll(1, dims=0)
        self.others = self._sum(self.inputs[:4], self.targets[:4])

    def _sum(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum over four examples and a hostile unit, as a vector, float64 [size].

        The first four inputs are units of their own; all others belong to the hostile unit. An
        entry that is not finite counts as a distant one, so that it is the furthest move.
        """
        subject = self.subject
        total = Total(subject.mechanism, subject.device)
        arguments: list[Any] = [(inputs, targets)]
        if subject.patients is not None:
            shares = [1, 1, 1, 1]
            if len(inputs) > 4:
                shares.append(len(inputs) - 4)
            arguments.append(tuple(shares))
        subject.algorithm.accumulate(total, *arguments)
        return make_finite(self.coordinates.to_vector(total.all_blocks()).double().cpu())

    def _move(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return how a hostile unit with these examples changes the sum."""
        inputs = torch.cat([self.inputs[:4], inputs])
        targets = torch.cat([self.targets[:4], targets])
        return self._sum(inputs, targets) - self.others

    def moves(self) -> Iterator[Tensor]:
        """Yield the move of each candidate for the hostile unit, float64 [size]."""
        inputs, targets, patients = self.inputs, self.wrong_targets, self.subject.patients
        records = 1 if patients is None else min(patients.largest, MAX_RECORDS)
        is_numeric = inputs.dtype.is_floating_point or inputs.dtype.is_complex
        for scale in SCALES if is_numeric else (1,):
            for i in range(4, len(inputs)):
                same = [i] * records
                yield self._move(inputs[same] * scale, targets[same])
            if records > 1:
                different = slice(4, 4 + records)
                yield self._move(inputs[different] * scale, targets[different])
        if is_numeric:
            # With the same value at all positions, terms of a layer may cancel, so that its norm
            # is easily computed wrongly.
            example = inputs[4:5]
            positions = tuple(range(1, example.dim()))
            constant = example.mean(dim=positions, keepdim=True).expand_as(example)
            for scale in (1e4, 1e10, 1e20):
                yield self._move(constant * scale, targets[4:5])


def _find_furthest_move(subject: Subject, coordinates: Coordinates) -> Tensor:
    """Return the largest move of the algorithm's sum by one hostile unit, float64 [size].

    Distances are measured in standard deviations of each block's noise. If neighbours differ by a
    replaced example, the move is from one hostile unit to another: from the one that moves the sum
    furthest to the one that is furthest from it.
    """
    stds = [block.weakest_std or 1.0 for block in subject.mechanism.blocks]
    weights = 1 / torch.tensor(stds, dtype=torch.float64)
    weights = weights.repeat_interleave(torch.tensor(coordinates.sizes))
    hostile = Hostile(subject, coordinates)

    def find_furthest_from(start: Tensor) -> Tensor:
        furthest, distance = torch.zeros_like(start), 0.0
        for move in hostile.moves():
            shift = move - start
            length = float((weights * shift).norm())
            # Most moves are clipped to the same length; rounding must not decide between them.
            if length > distance * 1.001:
                furthest, distance = shift, length
        return furthest

    origin = torch.zeros(coordinates.size, dtype=torch.float64)
    move = find_furthest_from(origin)
    return find_furthest_from(move) if subject.replaces else move


# ---------------------------------------------------------------------------------- the whole run


@dataclass(frozen=True)
class Canaries:
    """Gradient canaries, each of which replaces a unit (an example or a patient).

    Attributes:
        indices, values: the coordinates of each contribution, [canaries, width]; see
            `canary_supports`.
        included: whether each canary is in the training set, [canaries].
        slots: the index of the unit that each canary replaces, [canaries].
        number_of: the canary that replaces each unit, or -1, [units].
    """

    indices: np.ndarray
    values: np.ndarray
    included: np.ndarray
    slots: np.ndarray
    number_of: np.ndarray

    @staticmethod
    def draw(
        subject: Subject,
        coordinates: Coordinates,
        count: int,
        steps: int,
    ) -> Canaries:
        """Draw at most `count` canaries for a run of `steps` steps."""
        rng = subject.rng("gradients")
        joint = subject.mechanism.joint
        max_count = coordinates.size if joint else max(coordinates.sizes)
        count = min(count, max_count, subject.units // 2)
        # Limits the memory for the releases at the canaries' coordinates.
        width = max(1, min(16, int(1e8 / (steps * count))))
        indices, values = canary_supports(subject.mechanism, coordinates, count, width, rng)
        slots = rng.permutation(subject.units)[:count]
        number_of = np.full(subject.units, -1)
        number_of[slots] = np.arange(count)
        included = rng.random(count) < 0.5
        return Canaries(indices, values, included, slots, number_of)


class WithCanaries(Algorithm):
    """Wraps an algorithm: adds the canaries' contributions, and records every release.

    The canaries of a step come in a batch (indices, factors) of their own, which `drawn` holds. Any
    other batch is a tuple of arguments for the algorithm's `accumulate`.

    Attributes:
        drawn: the batch of canaries of the current step.
        known: the sum over all other examples of the current step, which the adversary knows.
        seen: the release of each step at the canaries' coordinates, without the known sum; each
            float32 [canaries, width].
    """

    def __init__(
        self,
        inner: Algorithm,
        coordinates: Coordinates,
        canaries: Canaries,
    ) -> None:
        super().__init__(inner.problem, noise_multiplier=inner.noise_multiplier)
        self.inner, self.coordinates = inner, coordinates
        self.indices = torch.from_numpy(canaries.indices)
        self.values = torch.from_numpy(canaries.values)
        self.drawn: Any = None
        self.known: dict[str, Tensor] = {}
        self.seen: list[Tensor] = []

    @property
    def sets_weights(self) -> bool:
        return self.inner.sets_weights

    def mechanism(self) -> Mechanism:
        return self.inner.mechanism()

    def accumulate(
        self,
        total: dict[str, Tensor],
        batch: Any,
    ) -> None:
        if batch is not self.drawn:
            self.inner.accumulate(total, *batch)
            return
        names = [block.name for block in self.mechanism().blocks]
        self.known = {name: total[name].clone() for name in names}
        numbers, factors = batch
        values = self.values[numbers] * factors.unsqueeze(1)
        vector = torch.zeros(self.coordinates.size, dtype=torch.float64)
        vector[self.indices[numbers].flatten()] = values.flatten()
        device = next(iter(total.values())).device
        self.coordinates.add_vector(vector.to(device), total)

    def contributions(self, batch: Batch) -> dict[str, Tensor]:
        return self.inner.contributions(batch)

    def postprocess(
        self, noisy: dict[str, Tensor], expected_batch_size: float
    ) -> dict[str, Tensor]:
        """Record the release without the known sum, before the algorithm uses it."""
        unknown = {name: value - self.known[name] for name, value in noisy.items()}
        vector = self.coordinates.to_vector(unknown).cpu()
        self.seen.append(vector[self.indices].float())  # [canaries, width]
        return self.inner.postprocess(noisy, expected_batch_size)


def attack_with_gradients(
    subject: Subject,
    confidence: float,
    canaries: int,
    steps: int,
) -> Finding:
    """Attack the whole run with gradient canaries (white box), drawn by the recipe's sampling.

    A canary that is not included contributes nothing, or, if neighbours differ by a replaced
    example, the negative of its contribution.

    Args:
        subject: the recipe's run.
        confidence: the confidence of the bound.
        canaries: the largest number of canaries.
        steps: the largest number of steps, but at least one cycle of the sampling.
    """
    mechanism, plan = subject.mechanism, subject.plan
    coordinates = Coordinates(mechanism)
    cycle = mechanism.sampling.cycle
    steps = max(cycle, min(steps, plan.steps) // cycle * cycle)
    drawn = Canaries.draw(subject, coordinates, canaries, steps)
    audited = WithCanaries(subject.algorithm, coordinates, drawn)
    releases = _train(subject, audited, drawn, steps)

    seen = torch.stack(audited.seen).double()
    seen = torch.from_numpy(_decorrelate(seen.numpy(), mechanism))
    # The steps at which each canary can be drawn: in a cycle, only the step of its subset.
    eligible_steps = np.arange(0, steps, cycle)[:, None]
    if plan.subset_of is not None:
        eligible_steps = eligible_steps + plan.subset_of[drawn.slots]
    seen = seen[eligible_steps, np.arange(len(drawn.slots))]
    scores = _score_canaries(seen, audited, mechanism.sampling.sample_rate, subject.replaces)

    delta = subject.config.privacy.delta
    # Divide the error probability among the scores, so that the best bound has the confidence.
    score_confidence = 1 - (1 - confidence) / len(scores)
    guesses = [guess(score, drawn.included, delta, score_confidence) for score in scores]
    bound, evidence = max(guesses, key=lambda guess: guess[0])
    first = "" if releases == plan.steps else f"the first {releases:,} of "
    return Finding(
        case=f"{subject.config.recipe}: run, gradient canaries",
        claim=f"tight ε of {first}{plan.steps:,} steps",
        epsilon_claimed=tight_epsilon(mechanism, releases, delta),
        lower_bound=bound,
        delta=delta,
        confidence=confidence,
        evidence=evidence,
    )


def _train(
    subject: Subject,
    audited: WithCanaries,
    canaries: Canaries,
    steps: int,
) -> int:
    """Take `steps` private steps with a temporary ledger; return the number of its releases."""
    noise = subject.noise(subject.key)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.jsonl"
        ledger = Ledger(path, audited.mechanism(), noise.repeatable)
        training = Training(audited, subject.model, subject.optimizer, noise, ledger)
        secure = subject.config.privacy.secure
        for step in range(steps):
            units, divisor = subject.plan.draw(subject.key, step, secure)
            batches = _list_batches(subject, audited, canaries, units)
            private_step(training, step, batches, divisor)
        ledger.close()
        return ledger.releases


def _list_batches(
    subject: Subject,
    audited: WithCanaries,
    canaries: Canaries,
    units: np.ndarray,
) -> Iterator[Any]:
    """Yield the batches of a step that draws these units: first those of data, then the canaries.

    The canaries come last, so that the sum of all others is complete before they are added.
    """
    numbers = canaries.number_of[units]
    others, shares = units[numbers < 0], None
    if subject.patients is not None:
        records_key = step_key(subject.key, "records", 0, subject.config.privacy.secure)
        others, shares = subject.patients.take(others, records_key)
    batches = micro_batches(
        subject.data.train,
        others,
        subject.config,
        subject.device,
        subject.key,
        shares=shares,
    )
    yield from arguments_of_accumulate(batches)
    numbers = numbers[numbers >= 0]
    factor_if_out = -1.0 if subject.replaces else 0.0
    factors = np.where(canaries.included[numbers], 1.0, factor_if_out)
    audited.drawn = (torch.from_numpy(numbers), torch.from_numpy(factors))
    yield audited.drawn


def _decorrelate(seen: np.ndarray, mechanism: Mechanism) -> np.ndarray:
    """Return the best linear estimate of each step's contribution from all releases, [steps, ...].

    The mechanism's strategy c, applied as a filter C, makes the noise of the releases white, but
    spreads a step's contribution over later steps. Cᵀ/‖c‖² collects it again.
    """
    white = lfilter(mechanism.strategy, [1.0], seen, axis=0)
    backwards = lfilter(mechanism.strategy, [1.0], white[::-1], axis=0)
    return np.asarray(backwards[::-1]) / mechanism.reach**2


def _score_canaries(
    seen: Tensor,
    audited: WithCanaries,
    rate: float,
    replaced: bool,
) -> list[np.ndarray]:
    """Return one or two scores of the canaries, each [canaries].

    The first is the log-likelihood ratio of 'in' to 'out', summed over steps. A canary is drawn
    with probability q at each step, so the ratio of a step is log(1 − q + q·exp(x − μ/2)). Here, x
    is the projection of the release on the canary divided by the noise variance, and μ is the
    canary's squared norm divided by that variance.

    The second is the variance of x over the steps, which is larger for a canary that is drawn in
    some of them. It detects noise that is the same in every step. It needs canaries that
    contribute nothing if they are out, and q < 1.

    Args:
        seen: the releases at each canary's coordinates, [steps, canaries, width].
        audited: the canaries.
        rate: the sampling rate q.
        replaced: whether neighbours differ by a replaced example; see `Subject.replaces`.
    """
    variance = _measure_variance(seen, audited)
    projection = (seen * audited.values / variance).sum(dim=2)  # x, [steps, canaries]
    squared_norm = (audited.values.square() / variance).sum(dim=1)  # μ, [canaries]
    log_drawn = math.log(rate)
    log_left_out = math.log1p(-rate) if rate < 1 else -math.inf

    def log_likelihood(x: Tensor) -> Tensor:
        return torch.logaddexp(torch.full_like(x, log_left_out), log_drawn + x - squared_norm / 2)

    if replaced:
        ratio = log_likelihood(projection) - log_likelihood(-projection)
        return [ratio.sum(dim=0).numpy()]
    scores = [log_likelihood(projection).sum(dim=0).numpy()]
    if rate < 1:
        scores.append(projection.var(dim=0, correction=0).numpy())
    return scores


def _measure_variance(seen: Tensor, audited: WithCanaries) -> Tensor:
    """Return the noise variance at the canaries' coordinates, float64 [canaries, width].

    It is estimated from the releases of each kind of coordinates, because the mechanism's own
    statement may be false. The median is used, because most releases hold no canary.
    """
    kinds = audited.coordinates.kinds()[audited.indices.numpy()]
    variance = torch.empty(audited.values.shape, dtype=torch.float64)
    min_variance = 1e-12 * float(audited.values.square().max())
    for kind in np.unique(kinds):
        chosen = torch.from_numpy(kinds == kind)
        squares = seen[:, chosen].square()
        median = float(squares.flatten().median())
        variance[chosen] = max(median / MEDIAN_SQUARE, min_variance)
    return variance


def audit(
    config: Run,
    confidence: float = 0.99,
    steps: int = 1000,
) -> Iterator[Finding]:
    """Yield the findings of the attacks on a recipe; the same seed gives the same findings.

    Args:
        config: the recipe.
        confidence: the confidence of every bound.
        steps: the largest number of steps of the run to attack.

    Raises:
        UserError: an argument is out of range, or the recipe cannot be audited (see
            `Subject.prepare`).
    """
    require(0.5 <= confidence < 1, "--confidence", confidence, "must lie in [0.5, 1)")
    require(steps >= 1, "--steps", steps, "must be at least 1")
    yield from attack_recipe_release(Subject.prepare(config), confidence)
    yield attack_with_gradients(Subject.prepare(config), confidence, CANARIES, steps)
