"""Attack a recipe: one release of its mechanism, in full size, and its whole run.

For the whole run a fair coin puts each canary in the training set or not, and the adversary guesses
which. Canaries are worst-case contributions, and the adversary reads every release.
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
from zdp_bench.config.constraints import require_central
from zdp_bench.config.schema import Run
from zdp_bench.errors import UserError, require
from zdp_bench.extras.audit.release import RELEASE_DELTA, Finding, attack_release, guess
from zdp_bench.gradients import Batch
from zdp_bench.privacy.accounting import gdp_epsilon, tight_epsilon
from zdp_bench.privacy.ledger import Ledger
from zdp_bench.privacy.mechanism import Block, Mechanism
from zdp_bench.privacy.noise import add_noise, run_key, stream
from zdp_bench.training.batches import micro_batches
from zdp_bench.training.machine import foreign_code
from zdp_bench.training.public_start import digest_of
from zdp_bench.training.setup import Setup
from zdp_bench.training.step import Training, arguments_of, private_step
from zdp_bench.training.total import Total

CANARIES = 1000  # of the attack on a whole run; fewer if the model or the data is too small
MEDIAN_SQUARE = 0.45494  # of N(0, 1)²


@dataclass(frozen=True)
class Subject(Setup):
    """A recipe's run, ready for its first step.

    Attributes:
        key: seeds batches and noise, as a run's key does, but gives other streams than the run's
            own: an audit's releases of the same data must not be subtracted from those of the run.
    """

    key: str

    @staticmethod
    def prepare(config: Run) -> Subject:
        """Set up the run of a recipe.

        Raises:
            UserError: it is a federation, draws several views of an example, or has ε = ∞.
        """
        require_central(config, "audit")
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
        run = f"{digest_of(config, setup.data.digest)}:audit"
        key = run_key(run, setup.mechanism, foreign_code(config.plugins))
        return Subject(**vars(setup), key=key)

    @property
    def units(self) -> int:
        """How many examples or, with `privacy.unit=patient`, patients a step draws from."""
        return len(self.data.train) if self.patients is None else self.patients.count

    @property
    def replaces(self) -> bool:
        """True if neighbours differ by a replaced example, not by an added one."""
        return self.mechanism.sampling.shift == 2

    def rng(self, purpose: str) -> np.random.Generator:
        return np.random.default_rng(stream(self.config.seed, "audit", purpose))


# ----------------------------------------------------------------------- contributions as vectors


class Coordinates:
    """Maps a mechanism's blocks to one real vector and back, isometrically.

    A canary of norm C in the vector is a contribution of norm C. A complex entry is two
    coordinates. A block with hermitian noise becomes the real signal whose spectrum it is: only
    such spectra can occur.

    Attributes:
        starts, sizes: of each block in the vector.
        size: of the vector.
    """

    def __init__(self, mechanism: Mechanism) -> None:
        self.blocks = mechanism.blocks
        self.sizes = [math.prod(block.shape) * _count_parts(block) for block in self.blocks]
        *starts, self.size = accumulate(self.sizes, initial=0)
        self.starts = starts

    def of(self, sums: dict[str, Tensor]) -> Tensor:
        """Return the vector of the blocks' tensors, [size]."""
        parts = []
        for block in self.blocks:
            value = sums[block.name]
            if block.noise == "hermitian":
                value = torch.fft.ifftn(value, dim=block.fft_dims, norm="ortho").real
            if value.is_complex():
                value = torch.view_as_real(value.resolve_conj())
            parts.append(value.flatten())
        return torch.cat(parts)

    def add(
        self,
        vector: Tensor,
        to: dict[str, Tensor],
    ) -> None:
        """Add a vector, [size], to the blocks' tensors."""
        for block, start, size in zip(self.blocks, self.starts, self.sizes, strict=True):
            total = to[block.name]
            # A copy: torch may crash on a complex view of memory that is not aligned for it.
            part = vector[start : start + size].to(total.real.dtype, copy=True)
            if _count_parts(block) == 2:
                part = torch.view_as_complex(part.view(*block.shape, 2))
            part = part.view(block.shape)
            if block.noise == "hermitian":
                part = torch.fft.fftn(part, dim=block.fft_dims, norm="ortho")
            total += part

    def kinds(self) -> np.ndarray:
        """Number the coordinates by block and part, [size]: one number should get one noise."""
        kinds = []
        for number, (block, size) in enumerate(zip(self.blocks, self.sizes, strict=True)):
            part = np.arange(size) % _count_parts(block)
            kinds.append(2 * number + part)
        return np.concatenate(kinds)


def _count_parts(block: Block) -> int:
    """Return how many coordinates an entry of a block has."""
    is_complex = block.dtype.startswith("complex")
    return 2 if is_complex and block.noise != "hermitian" else 1


def canary_supports(
    mechanism: Mechanism,
    coordinates: Coordinates,
    canaries: int,
    width: int,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Draw worst-case contributions with no coordinate in common, which makes them orthogonal.

    Each has exactly the mechanism's bound: a joint bound over all blocks together, else in every
    block that is large enough for all canaries.

    Args:
        canaries: how many are drawn.
        width: the most coordinates of one in a group of blocks that share a bound.

    Returns:
        indices and values, each [canaries, coordinates of a canary].
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

MOST_RECORDS = 12  # of a hostile patient
FAR_STEP = 10**9  # beyond the steps of any run
SCALES = (1e-2, 1.0, 1e2, 1e4)  # by which a hostile example is multiplied


def attack_recipe_release(
    subject: Subject, confidence: float, trials: int = 10_000
) -> list[Finding]:
    """Attack one release of the recipe's own mechanism, with noise drawn as in a private step.

    Two contributions are tried:
    - the worst one: the adversary first watches pure noise, then chooses a vector of exactly the
      bound in the direction where it saw the least (of `Mechanism.reach` bounds: what steps of
      correlated noise show of it together);
    - a hostile example's: of training examples, scaled up or not, with another example's target,
      the one that moves the algorithm's own sum furthest. It finds a clipper that lets more through
      than the bound. With `privacy.unit=patient` it is a hostile patient's, all of whose records
      come at once: a clipper of single records is found.
    """
    mechanism = subject.mechanism
    coordinates = Coordinates(mechanism)
    trials = max(200, min(trials, int(2e8 / coordinates.size)))
    watched = _choose_watched(coordinates, subject.rng("release"))
    move = Move.of(_find_furthest_move(subject, coordinates), coordinates)

    pure = max(200, trials // 10)
    indices = torch.from_numpy(np.concatenate(watched))
    noise_watched, noise_along = _draw_noise(subject, coordinates, pure + 2 * trials, indices, move)

    def attack(
        noise: Tensor,
        without: Tensor,
        with_it: Tensor,
    ) -> tuple[float, str]:
        def release(present: bool, count: int) -> Tensor:
            start = pure + trials * present
            contribution = with_it if present else without
            return noise[start : start + count] + contribution

        shift = (with_it - without).numpy()
        return attack_release(release, trials, RELEASE_DELTA, confidence, shift)

    quietest = _worst_contribution(mechanism, watched, noise_watched[:pure].numpy())
    worst = torch.from_numpy(quietest) * mechanism.reach
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
            case=f"{subject.config.recipe}: release, {contribution}",
            claim=f"its mechanism: z = {z:.4g}",
            epsilon_claimed=gdp_epsilon(1 / z, RELEASE_DELTA),
            lower_bound=bound,
            delta=RELEASE_DELTA,
            confidence=confidence,
            evidence=evidence,
        )
        for contribution, (bound, evidence) in results.items()
    ]


@dataclass(frozen=True)
class Move:
    """A move of the sum, by block and part.

    Attributes:
        lengths: of the move in each kind of coordinates, float64 [kinds].
        directions: of length 1 in each kind, float64 [size].
        kind_of: the kind of each coordinate, [size].
    """

    lengths: Tensor
    directions: Tensor
    kind_of: Tensor

    @staticmethod
    def of(move: Tensor, coordinates: Coordinates) -> Move:
        numbers = torch.from_numpy(coordinates.kinds())
        kinds, kind_of = torch.unique(numbers, return_inverse=True)
        squares = torch.zeros(len(kinds), dtype=torch.float64)
        lengths = squares.index_add_(0, kind_of, move.square()).sqrt()
        directions = move / lengths[kind_of].clamp(min=1e-300)
        return Move(lengths, directions, kind_of)

    def project(self, vector: Tensor) -> Tensor:
        """Return how far a vector [size] goes along the move: float64 [kinds]."""
        kind_of = self.kind_of.to(vector.device)
        products = self.directions.to(vector.device) * vector
        return products.new_zeros(len(self.lengths)).index_add_(0, kind_of, products)


def _draw_noise(
    subject: Subject,
    coordinates: Coordinates,
    releases: int,
    watched: Tensor,
    move: Move,
) -> tuple[Tensor, Tensor]:
    """Draw noise as a private step does.

    Returns:
        the watched coordinates, float64 [releases, watched]; and the noise along a move, float64
        [releases, kinds].
    """
    mechanism = subject.mechanism
    source = subject.noise(subject.key)
    at_watched, along_move = [], []
    for number in range(releases):
        total = Total(mechanism, subject.device).whole()
        noisy = add_noise(total, mechanism, source, FAR_STEP + number)
        noise = coordinates.of(noisy).double()
        at_watched.append(noise[watched.to(noise.device)].cpu())
        along_move.append(move.project(noise).cpu())
    return torch.stack(at_watched), torch.stack(along_move)


def _choose_watched(coordinates: Coordinates, rng: np.random.Generator) -> list[np.ndarray]:
    """Choose about 64 coordinates, a few of every block; whole entries of a complex block."""
    share = max(2, 64 // len(coordinates.blocks))
    watched = []
    for start, size in zip(coordinates.starts, coordinates.sizes, strict=True):
        pairs = np.sort(rng.permutation(max(1, size // 2))[: share // 2])
        chosen = np.stack([2 * pairs, 2 * pairs + 1], axis=1).flatten()
        watched.append(start + chosen[chosen < size])
    return watched


def _worst_contribution(
    mechanism: Mechanism,
    watched: list[np.ndarray],
    noise: np.ndarray,
) -> np.ndarray:
    """Return what has exactly the bound where least noise is, jointly or per block.

    Args:
        watched: the watched coordinates of each block.
        noise: at them, [releases, watched].
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
    """Measures how far a hostile unit moves the algorithm's own sum.

    A hostile patient has one record many times, or many different ones.
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
        """Return the sum over four units of one example each, and a hostile one of the rest."""
        subject = self.subject
        total = Total(subject.mechanism, subject.device)
        arguments: list[Any] = [(inputs, targets)]
        if subject.patients is not None:
            shares = [1, 1, 1, 1]
            if len(inputs) > 4:
                shares.append(len(inputs) - 4)
            arguments.append(tuple(shares))
        subject.algorithm.accumulate(total, *arguments)
        return self.coordinates.of(total.whole()).double().cpu()

    def _move(self, inputs: Tensor, targets: Tensor) -> Tensor:
        inputs = torch.cat([self.inputs[:4], inputs])
        targets = torch.cat([self.targets[:4], targets])
        return self._sum(inputs, targets) - self.others

    def moves(self) -> Iterator[Tensor]:
        """Yield the move of each hostile unit that is tried, float64 [size]."""
        inputs, targets, patients = self.inputs, self.wrong_targets, self.subject.patients
        records = 1 if patients is None else min(patients.largest, MOST_RECORDS)
        is_numeric = inputs.dtype.is_floating_point or inputs.dtype.is_complex
        for scale in SCALES if is_numeric else (1,):
            for i in range(4, len(inputs)):
                same = [i] * records
                yield self._move(inputs[same] * scale, targets[same])
            if records > 1:
                different = slice(4, 4 + records)
                yield self._move(inputs[different] * scale, targets[different])
        if is_numeric:  # all positions alike, so that a layer's terms may cancel
            example = inputs[4:5]
            positions = tuple(range(1, example.dim()))
            alike = example.mean(dim=positions, keepdim=True).expand_as(example)
            for scale in (1e4, 1e10, 1e20):
                yield self._move(alike * scale, targets[4:5])


def _find_furthest_move(subject: Subject, coordinates: Coordinates) -> Tensor:
    """Return the furthest move of the algorithm's own sum by one hostile unit: [size], float64.

    Distances count in standard deviations of each block's noise. If neighbours differ by a replaced
    example, it is the furthest move from one such example to another.
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
            # most are clipped to one length: rounding must not choose
            if length > distance * 1.001:
                furthest, distance = shift, length
        return furthest

    none = torch.zeros(coordinates.size, dtype=torch.float64)
    move = find_furthest_from(none)
    return find_furthest_from(move) if subject.replaces else move


# ---------------------------------------------------------------------------------- the whole run


@dataclass(frozen=True)
class Canaries:
    """Gradient canaries, each in the place of an example, or of a patient if patients are drawn.

    Attributes:
        indices, values: of each contribution, [canaries, width]; see `canary_supports`.
        included: whether it is in the training set, [canaries].
        slots: the unit whose place it takes, [canaries].
        number_of: the canary of each unit, -1 for none, [units].
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
        """Draw at most `count` canaries for a run of so many steps."""
        rng = subject.rng("gradients")
        joint = subject.mechanism.joint
        most = coordinates.size if joint else max(coordinates.sizes)
        count = min(count, most, subject.units // 2)
        width = max(1, min(16, int(1e8 / (steps * count))))
        indices, values = canary_supports(subject.mechanism, coordinates, count, width, rng)
        slots = rng.permutation(subject.units)[:count]
        number_of = np.full(subject.units, -1)
        number_of[slots] = np.arange(count)
        included = rng.random(count) < 0.5
        return Canaries(indices, values, included, slots, number_of)


class WithCanaries(Algorithm):
    """Insert canaries and record every release, round an algorithm.

    Canaries come as a batch of their own, (their numbers, how much of each), and the others as the
    arguments of an algorithm's `accumulate`; see `attack_with_gradients`.
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
        numbers, amounts = batch
        values = self.values[numbers] * amounts.unsqueeze(1)
        vector = torch.zeros(self.coordinates.size, dtype=torch.float64)
        vector[self.indices[numbers].flatten()] = values.flatten()
        device = next(iter(total.values())).device
        self.coordinates.add(vector.to(device), to=total)

    def contributions(self, batch: Batch) -> dict[str, Tensor]:
        return self.inner.contributions(batch)

    def postprocess(
        self, noisy: dict[str, Tensor], expected_batch_size: float
    ) -> dict[str, Tensor]:
        """Read the release before it is used; all other examples are known and subtracted."""
        unknown = {name: value - self.known[name] for name, value in noisy.items()}
        vector = self.coordinates.of(unknown).cpu()
        self.seen.append(vector[self.indices].float())  # [canaries, width]
        return self.inner.postprocess(noisy, expected_batch_size)


def attack_with_gradients(
    subject: Subject,
    confidence: float,
    canaries: int,
    steps: int,
) -> Finding:
    """Attack the whole run with gradient canaries (white box), drawn by the recipe's own sampling.

    A canary that is out contributes nothing, or, if neighbours differ by a replaced example, its
    opposite.
    """
    mechanism, plan = subject.mechanism, subject.plan
    coordinates = Coordinates(mechanism)
    cycle = mechanism.sampling.cycle
    steps = min(steps, plan.steps) // cycle * cycle
    drawn = Canaries.draw(subject, coordinates, canaries, steps)
    audited = WithCanaries(subject.algorithm, coordinates, drawn)
    releases = _train(subject, audited, drawn, steps)

    seen = torch.stack(audited.seen).double()
    seen = torch.from_numpy(_decorrelate(seen.numpy(), mechanism))
    turns = np.arange(0, steps, cycle)[:, None]  # when each can be drawn
    if plan.subset_of is not None:
        turns = turns + plan.subset_of[drawn.slots]
    seen = seen[turns, np.arange(len(drawn.slots))]
    scores = _score_canaries(seen, audited, mechanism.sampling.sample_rate, subject.replaces)

    delta = subject.config.privacy.delta
    allowed = 1 - (1 - confidence) / len(scores)  # so that the better bound has the confidence
    guesses = [guess(score, drawn.included, delta, allowed) for score in scores]
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
    """Take `steps` private steps with a temporary ledger; return how many releases it counted."""
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
    """Yield the batches of a step that draws these units: of the others, then of the canaries."""
    numbers = canaries.number_of[units]
    others, shares = units[numbers < 0], None
    if subject.patients is not None:
        others, shares = subject.patients.take(others, subject.key, 0)
    batches = micro_batches(
        subject.data.train,
        others,
        subject.config,
        subject.device,
        subject.key,
        shares=shares,
    )
    yield from arguments_of(batches)
    numbers = numbers[numbers >= 0]
    absent = -1.0 if subject.replaces else 0.0
    amounts = np.where(canaries.included[numbers], 1.0, absent)
    audited.drawn = (torch.from_numpy(numbers), torch.from_numpy(amounts))
    yield audited.drawn


def _decorrelate(seen: np.ndarray, mechanism: Mechanism) -> np.ndarray:
    """Return what the releases of all steps, [steps, ...], show of what each step added.

    C makes their noise white; what a step added then stands in the steps after it too, c times.
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
    """Return log-likelihood ratios of 'in' over 'out', summed over steps: [canaries].

    If only a canary that is in moves, also how far the releases along it are from their mean: noise
    that comes again in every step hides no single one.

    At each step a canary is drawn with probability q: log(1 − q + q·exp(x − μ/2)), with x the
    release along it over the noise's variance, and μ its squared length over the same.

    Args:
        seen: the releases at each canary's coordinates, [steps, canaries, width].
        rate: q.
        replaced: see `Subject.replaces`.
    """
    variance = _measure_variance(seen, audited)
    along = (seen * audited.values / variance).sum(dim=2)  # [steps, canaries]
    length = (audited.values.square() / variance).sum(dim=1)  # [canaries]
    log_drawn = math.log(rate)
    log_left_out = math.log1p(-rate) if rate < 1 else -math.inf

    def log_likelihood(x: Tensor) -> Tensor:
        return torch.logaddexp(torch.full_like(x, log_left_out), log_drawn + x - length / 2)

    if replaced:
        ratio = log_likelihood(along) - log_likelihood(-along)
        return [ratio.sum(dim=0).numpy()]
    scores = [log_likelihood(along).sum(dim=0).numpy()]
    if rate < 1:
        scores.append(along.var(dim=0, correction=0).numpy())
    return scores


def _measure_variance(seen: Tensor, audited: WithCanaries) -> Tensor:
    """Return the noise's variance by block and part, measured and not the mechanism's.

    Returns:
        float64 [canaries, width].
    """
    kinds = audited.coordinates.kinds()[audited.indices.numpy()]
    variance = torch.empty(audited.values.shape, dtype=torch.float64)
    floor = 1e-12 * float(audited.values.square().max())
    for kind in np.unique(kinds):
        chosen = torch.from_numpy(kinds == kind)
        squares = seen[:, chosen].square()
        median = float(squares.flatten().median())
        variance[chosen] = max(median / MEDIAN_SQUARE, floor)
    return variance


def audit(
    config: Run,
    confidence: float = 0.99,
    steps: int = 1000,
) -> Iterator[Finding]:
    """Yield what attacks find on a recipe cut to `steps`; the same for the same seed.

    Raises:
        UserError: an argument is out of its range, or `Subject.prepare` refuses the recipe.
    """
    require(0.5 <= confidence < 1, "--confidence", confidence, "must lie in [0.5, 1)")
    require(steps >= 1, "--steps", steps, "must be at least 1")
    yield from attack_recipe_release(Subject.prepare(config), confidence)
    yield attack_with_gradients(Subject.prepare(config), confidence, CANARIES, steps)
