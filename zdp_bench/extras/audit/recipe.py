"""Attack a recipe: one release of its mechanism, in full size, and its whole run.

For the whole run a fair coin puts each canary in the training set or not, and the adversary guesses
which. Canaries are worst-case contributions, and the adversary reads every release.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
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
        """Set up the run of a recipe."""
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
        own = f"{digest_of(config, setup.data.digest)}:audit"
        key = run_key(own, setup.mechanism, foreign_code(config.plugins))
        return Subject(**vars(setup), key=key)

    @property
    def units(self) -> int:
        """How many examples or, with `privacy.unit=patient`, patients a step draws from."""
        return len(self.data.train) if self.patients is None else self.patients.count

    def rng(self, purpose: str) -> np.random.Generator:
        return np.random.default_rng(stream(self.config.seed, "audit", purpose))


# ----------------------------------------------------------------------- contributions as vectors


class Coordinates:
    """Maps a mechanism's blocks to one real vector and back, isometrically.

    A canary of norm C in the vector is a contribution of norm C. A complex entry is two
    coordinates. A block with hermitian noise becomes the real signal whose spectrum it is: only
    such spectra can occur.
    """

    def __init__(self, mechanism: Mechanism) -> None:
        self.blocks = mechanism.blocks
        self.sizes = [math.prod(b.shape) * (2 if self._two_parts(b) else 1) for b in self.blocks]
        self.starts = [sum(self.sizes[:i]) for i in range(len(self.sizes))]
        self.size = sum(self.sizes)

    @staticmethod
    def _two_parts(block: Block) -> bool:
        return block.dtype.startswith("complex") and block.noise != "hermitian"

    def of(self, sums: dict[str, Tensor]) -> Tensor:
        """Return the vector of the blocks' tensors, [size]."""
        parts = []
        for block in self.blocks:
            value = sums[block.name]
            if block.noise == "hermitian":
                value = torch.fft.ifftn(value, dim=block.fft_dims, norm="ortho").real
            value = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
            parts.append(value.flatten())
        return torch.cat(parts)

    def add(self, vector: Tensor, to: dict[str, Tensor]) -> None:
        """Add a vector, [size], to the blocks' tensors."""
        for block, start, size in zip(self.blocks, self.starts, self.sizes, strict=True):
            # A copy: torch may crash on a complex view of memory that is not aligned for it.
            part = vector[start : start + size].to(to[block.name].real.dtype, copy=True)
            if self._two_parts(block):
                part = torch.view_as_complex(part.view(*block.shape, 2))
            part = part.view(block.shape)
            if block.noise == "hermitian":
                part = torch.fft.fftn(part, dim=block.fft_dims, norm="ortho")
            to[block.name] += part

    def kinds(self) -> np.ndarray:
        """Number the coordinates by block and part, [size]: one number should get one noise."""
        parts = [2 if self._two_parts(block) else 1 for block in self.blocks]
        each = enumerate(zip(parts, self.sizes, strict=True))
        return np.concatenate([2 * i + np.arange(size) % part for i, (part, size) in each])


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

    Returns:
        indices and values, each [canaries, width].
    """
    bounds = [block.bound for block in mechanism.blocks]
    groups = [(0, coordinates.size, bounds[0])]
    if not mechanism.joint:
        each = zip(coordinates.starts, coordinates.sizes, bounds, strict=True)
        groups = [group for group in each if group[1] >= canaries]
    indices, values = [], []
    for start, size, bound in groups:
        wide = max(1, min(width, size // canaries))
        chosen = rng.permutation(size)[: canaries * wide].reshape(canaries, wide)
        indices.append(start + chosen)
        values.append(rng.choice([-1.0, 1.0], size=chosen.shape) * bound / math.sqrt(wide))
    return np.concatenate(indices, axis=1), np.concatenate(values, axis=1)


# ------------------------------------------------------------------------------------ one release

MOST_RECORDS = 12  # of a hostile patient


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
    kept = torch.from_numpy(np.concatenate(watched)).to(subject.device)
    moved = _furthest_move(subject, coordinates)
    kinds = torch.from_numpy(coordinates.kinds())
    numbers, kind_of = torch.unique(kinds, return_inverse=True)
    squares = torch.zeros(len(numbers), dtype=torch.float64).index_add_(0, kind_of, moved.square())
    lengths = squares.sqrt()
    # a unit vector in each block and part
    along = (moved / lengths[kind_of].clamp(min=1e-300)).to(subject.device)
    kind_of = kind_of.to(subject.device)

    source = subject.noise(subject.key)
    pure = max(200, trials // 10)
    noise = torch.empty(pure + 2 * trials, len(kept) + len(numbers), dtype=torch.float64)
    for i in range(len(noise)):
        total = Total(mechanism, subject.device).whole()
        step = 10**9 + i  # far from any run's steps
        drawn = coordinates.of(add_noise(total, mechanism, source, step)).double()
        projected = drawn.new_zeros(len(numbers)).index_add_(0, kind_of, along * drawn)
        noise[i] = torch.cat([drawn[kept], projected]).cpu()

    def attack(columns: slice, without: Tensor, with_it: Tensor) -> tuple[float, str]:
        def release(present: bool, count: int) -> Tensor:
            start = pure + trials * present
            return noise[start : start + count, columns] + (with_it if present else without)

        shift = (with_it - without).numpy()
        return attack_release(release, trials, RELEASE_DELTA, confidence, shift)

    seen = noise[:pure, : len(kept)].numpy()
    worst = torch.from_numpy(_worst_contribution(mechanism, watched, seen)) * mechanism.reach
    # the opposite, if neighbours differ by a replaced example
    absent = -worst if mechanism.sampling.shift == 2 else torch.zeros_like(worst)
    by_worst = attack(slice(len(kept)), absent, worst)
    hostile = lengths * mechanism.reach
    by_example = attack(slice(len(kept), None), torch.zeros_like(lengths), hostile)

    z, name = mechanism.z, subject.config.recipe
    claimed = gdp_epsilon(1 / z, RELEASE_DELTA)
    who = "records" if subject.patients is None else "patients"
    claim = f"its mechanism: z = {z:.4g}"
    found = {"worst contribution": by_worst, f"hostile {who}": by_example}
    return [
        Finding(
            f"{name}: release, {what}", claim, claimed, bound, RELEASE_DELTA, confidence, seen_by
        )
        for what, (bound, seen_by) in found.items()
    ]


def _choose_watched(coordinates: Coordinates, rng: np.random.Generator) -> list[np.ndarray]:
    """Choose about 64 coordinates, a few of every block; whole entries of a complex block."""
    share = max(2, 64 // len(coordinates.blocks))
    watched = []
    for start, size in zip(coordinates.starts, coordinates.sizes, strict=True):
        pairs = rng.permutation(max(1, size // 2))[: share // 2]
        chosen = (2 * np.sort(pairs)[:, None] + np.arange(2)).flatten()
        watched.append(start + chosen[chosen < size])
    return watched


def _worst_contribution(
    mechanism: Mechanism, watched: list[np.ndarray], noise: np.ndarray
) -> np.ndarray:
    """Return what has exactly the bound where least noise is, jointly or per block."""
    ends = np.cumsum([len(chosen) for chosen in watched])
    parts = [(0, int(ends[-1]), mechanism.blocks[0].bound)]
    if not mechanism.joint:
        each = zip(watched, ends, mechanism.blocks, strict=True)
        parts = [(end - len(chosen), end, block.bound) for chosen, end, block in each]
    worst = np.zeros(noise.shape[1])
    for start, end, bound in parts:
        seen = noise[:, start:end]
        worst[start:end] = bound * np.linalg.eigh(seen.T @ seen)[1][:, 0]
    return worst


def _furthest_move(subject: Subject, coordinates: Coordinates) -> Tensor:
    """Return the furthest move of the algorithm's own sum by one hostile unit: [size], float64.

    A hostile patient has one record many times, or many different ones.

    Distances count in standard deviations of each block's noise. If neighbours differ by a replaced
    example, it is the furthest move from one such example to another.
    """
    mechanism = subject.mechanism
    stds = torch.tensor([b.weakest_std or 1.0 for b in mechanism.blocks], dtype=torch.float64)
    weight = (1 / stds).repeat_interleave(torch.tensor(coordinates.sizes))
    some = torch.from_numpy(subject.rng("hostile").permutation(len(subject.data.train))[:16])
    inputs, targets = (part.to(subject.device) for part in subject.data.train.batch(some))
    wrong = targets.roll(1, dims=0)
    by_patient = subject.patients is not None
    many = min(subject.patients.largest, MOST_RECORDS) if subject.patients else 1

    def summed(x: Tensor, y: Tensor) -> Tensor:
        """Return the sum over four units of one example each and, if there are more, a hostile."""
        total = Total(mechanism, subject.device)
        shares = (1, 1, 1, 1, *([len(x) - 4] if len(x) > 4 else []))
        subject.algorithm.accumulate(total, (x, y), *([shares] if by_patient else []))
        return coordinates.of(total.whole()).double().cpu()

    rest = summed(inputs[:4], targets[:4])

    def move_by(x: Tensor, y: Tensor) -> Tensor:
        return summed(torch.cat([inputs[:4], x]), torch.cat([targets[:4], y])) - rest

    def moves() -> Iterator[Tensor]:
        numbers = inputs.dtype.is_floating_point or inputs.dtype.is_complex
        for scale in (1e-2, 1.0, 1e2, 1e4) if numbers else (1,):
            for i in range(4, len(inputs)):
                x, y = inputs[i : i + 1] * scale, wrong[i : i + 1]
                yield move_by(x.repeat_interleave(many, 0), y.repeat_interleave(many, 0))
            if many > 1:
                yield move_by(inputs[4 : 4 + many] * scale, wrong[4 : 4 + many])
        if numbers:  # all positions alike, so that a layer's terms may cancel
            one = inputs[4:5]
            alike = one.mean(dim=tuple(range(1, one.dim())), keepdim=True).expand_as(one)
            for size in (1e4, 1e10, 1e20):
                yield move_by(alike * size, wrong[4:5])

    def furthest(of: Tensor) -> Tensor:
        best, length = torch.zeros(coordinates.size, dtype=torch.float64), 0.0
        for move in moves():
            shift = move - of
            far = float((weight * shift).norm())
            if far > length * 1.001:  # most are clipped to one length: rounding must not choose
                best, length = shift, far
        return best

    first = furthest(torch.zeros(coordinates.size, dtype=torch.float64))
    return furthest(first) if mechanism.sampling.shift == 2 else first


# ---------------------------------------------------------------------------------- the whole run


class WithCanaries(Algorithm):
    """Insert canaries and record every release, round an algorithm.

    Canaries come as a batch of their own, (their numbers, how much of each), and the others as the
    arguments of an algorithm's `accumulate`; see `attack_with_gradients`.
    """

    def __init__(
        self, inner: Algorithm, coordinates: Coordinates, indices: np.ndarray, values: np.ndarray
    ) -> None:
        super().__init__(inner.problem, noise_multiplier=inner.noise_multiplier)
        self.inner, self.coordinates = inner, coordinates
        self.indices, self.values = torch.from_numpy(indices), torch.from_numpy(values)
        self.drawn: Any = None
        self.rest: dict[str, Tensor] = {}
        self.seen: list[Tensor] = []

    @property
    def sets_weights(self) -> bool:
        return self.inner.sets_weights

    def mechanism(self) -> Mechanism:
        return self.inner.mechanism()

    def accumulate(self, total: dict[str, Tensor], batch: Any) -> None:
        if batch is not self.drawn:
            self.inner.accumulate(total, *batch)
            return
        self.rest = {block.name: total[block.name].clone() for block in self.mechanism().blocks}
        numbers, amounts = batch
        vector = torch.zeros(self.coordinates.size, dtype=torch.float64)
        values = self.values[numbers] * amounts.unsqueeze(1)
        vector[self.indices[numbers].flatten()] = values.flatten()
        self.coordinates.add(vector.to(next(iter(total.values())).device), to=total)

    def contributions(self, batch: Batch) -> dict[str, Tensor]:
        return self.inner.contributions(batch)

    def postprocess(
        self, noisy: dict[str, Tensor], expected_batch_size: float
    ) -> dict[str, Tensor]:
        """Read the release before it is used; all other examples are known and subtracted."""
        unknown = {name: value - self.rest[name] for name, value in noisy.items()}
        unknown_part = self.coordinates.of(unknown)
        self.seen.append(unknown_part.cpu()[self.indices].float())  # [canaries, width]
        return self.inner.postprocess(noisy, expected_batch_size)


def attack_with_gradients(
    subject: Subject, confidence: float, canaries: int, steps: int
) -> Finding:
    """Attack the whole run with gradient canaries (white box), drawn by the recipe's own sampling.

    Each takes the place of a training example, or of a patient if patients are drawn. A canary that
    is out contributes nothing, or, if neighbours differ by a replaced example, its opposite.
    """
    mechanism, coordinates = subject.mechanism, Coordinates(subject.mechanism)
    rng = subject.rng("gradients")
    cycle, planned = mechanism.sampling.cycle, subject.plan.steps
    steps = min(steps, planned) // cycle * cycle
    most = coordinates.size if mechanism.joint else max(coordinates.sizes)
    canaries = min(canaries, most, subject.units // 2)
    width = max(1, min(16, int(1e8 / (steps * canaries))))
    indices, values = canary_supports(mechanism, coordinates, canaries, width, rng)
    slots = rng.permutation(subject.units)[:canaries]
    number = np.full(subject.units, -1)
    number[slots] = np.arange(canaries)
    included = rng.random(canaries) < 0.5
    replaced = mechanism.sampling.shift == 2
    audited = WithCanaries(subject.algorithm, coordinates, indices, values)

    def batches(drawn: np.ndarray) -> Iterator[Any]:
        others, shares = drawn[number[drawn] < 0], None
        if subject.patients is not None:
            others, shares = subject.patients.take(others, subject.key, 0)
        own = (subject.data.train, others, subject.config, subject.device)
        yield from arguments_of(micro_batches(*own, subject.key, shares=shares))
        here = number[drawn][number[drawn] >= 0]
        amounts = np.where(included[here], 1.0, -1.0 if replaced else 0.0)
        audited.drawn = torch.from_numpy(here), torch.from_numpy(amounts)
        yield audited.drawn

    releases = _train(subject, audited, steps, batches)
    seen = torch.from_numpy(_decorrelated(torch.stack(audited.seen).double().numpy(), mechanism))
    turns = np.arange(0, steps, cycle)[:, None]  # when each can be drawn
    if subject.plan.subset_of is not None:
        turns = turns + subject.plan.subset_of[slots]
    seen = seen[turns, np.arange(canaries)]
    scores = _gradient_scores(seen, audited, mechanism.sampling.sample_rate, replaced)
    delta = subject.config.privacy.delta
    allowed = 1 - (1 - confidence) / len(scores)  # so that the better bound has the confidence
    guesses = [guess(each, included, delta, allowed) for each in scores]
    bound, evidence = max(guesses, key=lambda found: found[0])
    first = "" if releases == planned else f"the first {releases:,} of "
    return Finding(
        f"{subject.config.recipe}: run, gradient canaries",
        f"tight ε of {first}{planned:,} steps",
        tight_epsilon(mechanism, releases, delta),
        bound,
        delta,
        confidence,
        evidence,
    )


def _decorrelated(seen: np.ndarray, mechanism: Mechanism) -> np.ndarray:
    """Return what the releases of all steps, [steps, ...], show of what each step added.

    C makes their noise white; what a step added then stands in the steps after it too, c times.
    """
    white = lfilter(mechanism.strategy, [1.0], seen, axis=0)
    matched = lfilter(mechanism.strategy, [1.0], white[::-1], axis=0)[::-1]
    return np.asarray(matched) / mechanism.reach**2


def _gradient_scores(
    seen: Tensor, audited: WithCanaries, rate: float, replaced: bool
) -> list[np.ndarray]:
    """Return log-likelihood ratios of 'in' over 'out', summed over steps: [canaries].

    If only a canary that is in moves, also how far the releases along it are from their mean: noise
    that comes again in every step hides no single one.

    At each step a canary is drawn with probability q: log(1 − q + q·exp(x − μ/2)), with x the
    release along it over the noise's variance, and μ its squared length over the same. The variance
    is measured, by block and part, not taken from the mechanism.
    """
    kinds = audited.coordinates.kinds()[audited.indices.numpy()]  # [canaries, width]
    variance = torch.empty(audited.values.shape, dtype=torch.float64)
    floor = 1e-12 * float(audited.values.square().max())
    for kind in np.unique(kinds):
        chosen = torch.from_numpy(kinds == kind)
        # of N(0, 1)²
        variance[chosen] = max(float(seen[:, chosen].square().flatten().median()) / 0.45494, floor)
    along = (seen * audited.values / variance).sum(dim=2)  # [steps, canaries]
    length = (audited.values.square() / variance).sum(dim=1)  # [canaries]
    inside, outside = math.log(rate), math.log1p(-rate) if rate < 1 else -math.inf

    def likelihood(x: Tensor) -> Tensor:
        return torch.logaddexp(torch.full_like(x, outside), inside + x - length / 2)

    ratio = likelihood(along) - (likelihood(-along) if replaced else 0.0)
    moved = [] if replaced or rate == 1 else [along.var(dim=0, correction=0)]
    return [each.numpy() for each in (ratio.sum(dim=0), *moved)]


def _train(
    subject: Subject,
    algorithm: Algorithm,
    steps: int,
    batches: Callable[[np.ndarray], Iterable[Batch]],
) -> int:
    """Take `steps` private steps with a temporary ledger; returns how many releases it counted."""
    noise = subject.noise(subject.key)
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(Path(folder) / "ledger.jsonl", algorithm.mechanism(), noise.repeatable)
        training = Training(algorithm, subject.model, subject.optimizer, noise, ledger)
        for step in range(steps):
            drawn, divisor = subject.plan.draw(subject.key, step, subject.config.privacy.secure)
            private_step(training, step, batches(drawn), divisor)
        ledger.close()
        return ledger.releases


def audit(config: Run, confidence: float = 0.99, steps: int = 1000) -> Iterator[Finding]:
    """Yield what attacks find on a recipe cut to `steps`; the same for the same seed."""
    require(0.5 <= confidence < 1, "--confidence", confidence, "must lie in [0.5, 1)")
    require(steps >= 1, "--steps", steps, "must be at least 1")
    yield from attack_recipe_release(Subject.prepare(config), confidence)
    yield attack_with_gradients(Subject.prepare(config), confidence, CANARIES, steps)
