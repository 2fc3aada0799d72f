"""Attacks that bound ε from below: what an adversary really gets out of one release, or out of a whole run.

An accountant says what ε cannot exceed if the code does what the proof assumes. An attack needs no such assumption: if it tells
two neighbours apart better than (ε, δ) allows, the claim is false, and the audit flags it with the confidence it states. An
attack that fails proves nothing; 'passes' means 'not caught'.

    one release   The adversary sees a mechanism's release of one of two neighbouring sums, many times over, learns the noise's
                  covariance, and tests along the direction that gets least of it. Clopper-Pearson bounds on its hits and false
                  alarms give the bound on ε. Nobody tells it what is wrong with the mechanism.
    one run       m canaries, each in the training set or out of it by a fair coin; the adversary guesses for those it is surest
                  of and abstains for the rest (Steinke, Nasr & Jagielski 2023, "Privacy auditing with one (1) training run").
                  Gradient canaries are worst-case contributions of exactly the bound, seen by an adversary who knows every other
                  record and reads every release; input canaries are records with another record's target, judged by their loss.

Whatever algorithm is registered can be audited: the attacks need its mechanism, and drive it through the engine.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from scipy.stats import beta, binom
from torch import Tensor, nn

from zdp_bench.algorithms import Algorithm, Problem
from zdp_bench.config import Run, require_central
from zdp_bench.data import Source, Splits
from zdp_bench.engine import Training, private_step
from zdp_bench.errors import UserError, require, unknown
from zdp_bench.experiment import Plan, build_algorithm, build_model, build_optimizer, check_model, micro_batches, pick_device
from zdp_bench.gradients import Batch, reference
from zdp_bench.nn.circulant import CirculantLinear
from zdp_bench.privacy.accounting import gdp_epsilon, tight_epsilon
from zdp_bench.privacy.ledger import Ledger
from zdp_bench.privacy.mechanism import Block, Mechanism, Sampling
from zdp_bench.privacy.noise import NoiseSource, SecureNoise, SeededNoise, add_noise, draw, stream
from zdp_bench.registry import lookup
from zdp_bench.tasks import Task

Verdict = Literal["passes", "flagged", "skipped"]
Expected = Literal["passes", "flagged", "skipped", "either"]

# A Gaussian release with multiplier z claims an ε for EVERY δ. Here its attack sees most: the likeliest outcomes decide.
RELEASE_DELTA = 0.01
TRIALS = 40_000  # of each neighbour, for the small built-in cases
LEARNED = 0.25  # share of the trials from which the adversary learns direction and threshold; the rest is the test
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Finding:
    """One attack and what came of it."""

    case: str
    claim: str
    epsilon_claimed: float
    lower_bound: float
    delta: float
    confidence: float
    verdict: Verdict
    expected: Expected
    evidence: str

    @property
    def as_expected(self) -> bool:
        return self.expected in (self.verdict, "either")


def _finding(
    case: str, claim: str, claimed: float, bound: float, delta: float, confidence: float, expected: Expected, evidence: str
) -> Finding:
    verdict: Verdict = "flagged" if bound > claimed else "passes"
    return Finding(case, claim, claimed, bound, delta, confidence, verdict, expected, evidence)


# ---------------------------------------------------------------------------------------------------------- statistics


def clopper_pearson(hits: np.ndarray, trials: int, alpha: float) -> tuple[np.ndarray, np.ndarray]:
    """A lower and an upper bound on a probability, each of which fails with probability `alpha` at most."""
    hits = np.asarray(hits, dtype=float)
    with np.errstate(invalid="ignore"):
        lower = np.where(hits > 0, beta.ppf(alpha, hits, trials - hits + 1), 0.0)
        upper = np.where(hits < trials, beta.ppf(1 - alpha, hits + 1, trials - hits), 1.0)
    return lower, upper


def release_bound(hits: np.ndarray, false_alarms: np.ndarray, trials: int, delta: float, confidence: float) -> np.ndarray:
    """The ε that a test with these counts refutes: (ε, δ)-DP demands P[hit] ≤ e^ε P[false alarm] + δ."""
    alpha = (1 - confidence) / 2
    hit = clopper_pearson(hits, trials, alpha)[0]
    alarm = clopper_pearson(false_alarms, trials, alpha)[1]
    return np.log(np.maximum((hit - delta) / alarm, 1.0))


def guess_p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """How likely `right` or more right guesses are, at most, if training is (ε, δ)-DP (Steinke et al. 2023, Theorem 5.2).

    P[V ≥ v] ≤ P[W ≥ v] + 2mδ·max_i P[v > W ≥ v − i]/i, with W ~ Binomial(r, e^ε/(1 + e^ε)) for r guesses on m canaries.
    """
    if right == 0:
        return 1.0
    accuracy = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(right - 1, guesses, accuracy))
    reach = np.arange(1, right + 1)
    below = binom.cdf(right - 1, guesses, accuracy) - binom.cdf(right - reach - 1, guesses, accuracy)  # P[v > W ≥ v − i]
    return min(1.0, tail + 2 * canaries * delta * float(np.max(below / reach)))


def run_bound(canaries: int, guesses: int, right: int, delta: float, confidence: float) -> float:
    """The largest ε at which so many right guesses would be less likely than 1 − confidence; 0 where none is refuted."""

    def refuted(epsilon: float) -> bool:
        return guess_p_value(canaries, guesses, right, epsilon, delta) <= 1 - confidence

    if not refuted(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while refuted(high) and high < 64:
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def guess(scores: np.ndarray, included: np.ndarray, delta: float, confidence: float) -> tuple[float, str]:
    """The bound from guessing 'in' for the highest eighth of the scores and 'out' for the lowest, and abstaining for the rest.

    How many are guessed is fixed beforehand: to try several numbers would cost confidence, and with it the larger part of the
    bound, for the δ-term 2mδ·(…) of the theorem leaves little of it.
    """
    canaries = len(scores)
    each = max(1, canaries // 8)
    order = np.argsort(scores, kind="stable")
    right = int(included[order[-each:]].sum() + (~included[order[:each]]).sum())
    told = f"{right:,} of {2 * each:,} guesses right, {canaries:,} canaries"
    return run_bound(canaries, 2 * each, right, delta, confidence), told


# ---------------------------------------------------------------------------------------------- the attack on one release

# (the record is in?, releases) -> [releases, d] real coordinates, every call with noise of its own
Release = Callable[[bool, int], Tensor]


def attack_release(
    release: Release, trials: int, delta: float, confidence: float, shift: np.ndarray | None = None
) -> tuple[float, str]:
    """A lower bound on ε from `trials` releases of each of two neighbours, and the counts behind it.

    Args:
        shift: by how much the neighbours' sums differ, where the adversary knows it in these coordinates; else it is learned.
    """
    without, with_it = (release(there, trials).double().numpy() for there in (False, True))
    learned = max(2, round(LEARNED * trials))
    direction = _least_noisy_direction(without[:learned], with_it[:learned], shift)
    scores = [rows @ direction for rows in (without, with_it)]
    threshold, sign = _best_threshold(scores[0][:learned], scores[1][:learned], delta, confidence)
    tested = trials - learned
    if sign > 0:  # 'it is in' above the threshold
        alarms, hits = (int((s[learned:] > threshold).sum()) for s in scores)
    else:  # neighbours are symmetric: 'it is not in' below it
        hits, alarms = (int((s[learned:] <= threshold).sum()) for s in scores)
    bound = float(release_bound(np.array(hits), np.array(alarms), tested, delta, confidence))
    if hits == tested and alarms == 0:
        return bound, f"the attack wins {2 * tested:,} of {2 * tested:,}"
    return bound, f"{hits:,} hits and {alarms:,} false alarms in {tested:,} each"


def _least_noisy_direction(without: np.ndarray, with_it: np.ndarray, shift: np.ndarray | None) -> np.ndarray:
    """Σ⁻¹Δ: the best linear test for Gaussian noise of covariance Σ (Fisher). Where there is no noise it looks nowhere else."""
    if shift is None:
        shift = with_it.mean(axis=0) - without.mean(axis=0)
    noise = np.concatenate([without - without.mean(axis=0), with_it - with_it.mean(axis=0)])
    variances, axes = np.linalg.eigh(noise.T @ noise / len(noise))
    floor = 1e-12 * (max(float(variances.max()), float(shift @ shift)) or 1.0)
    direction = axes @ ((axes.T @ shift) / (np.maximum(variances, 0.0) + floor))
    return direction / (np.linalg.norm(direction) or 1.0)


def _best_threshold(without: np.ndarray, with_it: np.ndarray, delta: float, confidence: float) -> tuple[float, int]:
    """The threshold, and the side of it, whose counts refute most."""
    candidates = np.quantile(np.concatenate([without, with_it]), np.linspace(0.0005, 0.9995, 1000))
    candidates = np.append(candidates, (without.max() + with_it.min()) / 2)
    above = [(rows[None, :] > candidates[:, None]).sum(axis=1) for rows in (without, with_it)]
    n = len(without)
    high = release_bound(above[1], above[0], n, delta, confidence)
    low = release_bound(n - above[0], n - above[1], n, delta, confidence)
    at_high, at_low = int(np.argmax(high)), int(np.argmax(low))
    return (float(candidates[at_high]), 1) if high[at_high] >= low[at_low] else (float(candidates[at_low]), -1)


# ------------------------------------------------------------------------------------------------------- built-in cases


@dataclass(frozen=True)
class Case:
    """A mechanism whose claim is known to be right or wrong.

    Attributes:
        z: the noise multiplier it claims for one release.
        needs: a package that must be installed, else the case is skipped.
        make: seed -> its release.
    """

    name: str
    claim: str
    z: float
    expected: Literal["passes", "flagged"]
    make: Callable[[int], Release]
    needs: str = ""

    def audit(self, seed: int, confidence: float, trials: int = TRIALS) -> Finding:
        """Attack it, unless what it needs is not installed."""
        claimed = gdp_epsilon(1 / self.z, RELEASE_DELTA)
        if self.needs and find_spec(self.needs) is None:
            told = f"{self.needs} is not installed"
            return Finding(self.name, self.claim, claimed, 0.0, RELEASE_DELTA, confidence, "skipped", "skipped", told)
        bound, evidence = attack_release(self.make(seed), trials, RELEASE_DELTA, confidence)
        return _finding(self.name, self.claim, claimed, bound, RELEASE_DELTA, confidence, self.expected, evidence)


_ONE_STEP = Sampling("full", 1.0, 4.0, 4)
SIGMA = 1.0
HALF_POWER = 1 / math.sqrt(2)


def _in_rows(releases: Tensor) -> Tensor:
    """[n, ...] -> [n, real coordinates], float64."""
    parts = torch.view_as_real(releases) if releases.is_complex() else releases
    return parts.reshape(len(parts), -1).double()


def _repeated(block: Block, releases: int) -> Block:
    """The block of `releases` independent releases: one more dimension in front, for noise is independent over entries."""
    dims = tuple(dim + 1 if dim >= 0 else dim for dim in block.fft_dims)
    return dataclasses.replace(block, shape=(releases, *block.shape), fft_dims=dims)


def _noisy(
    mechanism: Mechanism,
    sums: tuple[dict[str, Tensor], dict[str, Tensor]],
    seed: int,
    spoil: Callable[[Tensor], Tensor] = lambda noise: noise,
    post: Callable[[Tensor], Tensor] = lambda release: release,
) -> Release:
    """Releases of a mechanism, without and with the record: sum + noise, block by block, as the engine makes them."""
    source = SeededNoise(seed)

    def release(there: bool, count: int) -> Tensor:
        noisy = [
            sums[there][block.name].unsqueeze(0) + spoil(draw(_repeated(block, count), source, int(there), CPU))
            for block in mechanism.blocks
        ]
        return torch.cat([_in_rows(post(value)) for value in noisy], dim=1)

    return release


class _Magnitude(nn.Module):
    def forward(self, z: Tensor) -> Tensor:
        return z.abs()


def _complex_network(seed: int) -> tuple[nn.Module, Batch]:
    """A small complex network, and four records, the last of which is the one that comes or goes."""
    generator = torch.Generator().manual_seed(int(stream(seed, "audit", "network").generate_state(1, np.uint64)[0]) % 2**63)
    layer = nn.Linear(3, 2, dtype=torch.complex64)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.complex64, generator=generator))
    inputs = 3 * torch.randn(4, 3, dtype=torch.complex64, generator=generator)
    model = nn.Sequential(layer, _Magnitude())
    with torch.no_grad():  # each record is taken for what it is not, so that none is without a gradient
        return model, (inputs, model(inputs).argmin(dim=1))


def _cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def _zeta(seed: int, noise: str = "per_component", spoil: Callable[[Tensor], Tensor] = lambda noise: noise) -> Release:
    """ζ-DP-SGD as it is registered, on a complex network, at σ = 1: everything but the claim is the real thing."""
    model, (inputs, targets) = _complex_network(seed)
    make = lookup("algorithm", "zeta_dp_sgd")
    # The loss is scaled up, so that every gradient is longer than the bound and is clipped to it.
    algorithm: Algorithm = make(
        Problem(model, lambda o, t: 1e3 * _cross_entropy(o, t), _ONE_STEP), noise_multiplier=SIGMA, max_grad_norm=1.0, noise=noise
    )
    sums = _sums(algorithm, (inputs[:3], targets[:3])), _sums(algorithm, (inputs, targets))
    return _noisy(algorithm.mechanism(), sums, seed, spoil)


def _sums(algorithm: Algorithm, batch: Batch) -> dict[str, Tensor]:
    total = {block.name: torch.zeros(block.shape, dtype=getattr(torch, block.dtype)) for block in algorithm.mechanism().blocks}
    algorithm.accumulate(total, batch)
    return total


def _forgets_the_imaginary_part(noise: Tensor) -> Tensor:
    return torch.complex(noise.real, torch.zeros_like(noise.imag))


def _under_measured(seed: int) -> Release:
    """A clipper that takes |Σ g²| for ‖g‖² = Σ|g|²: without the conjugate, parts of a complex gradient cancel."""
    model, _ = _complex_network(seed)
    generator = torch.Generator().manual_seed(seed % 2**63)
    inputs = torch.randn(200, 3, dtype=torch.complex64, generator=generator)
    targets = torch.randint(0, 2, (200,), generator=generator)
    gradients = reference.per_sample_gradients(model, lambda o, t: 1e3 * _cross_entropy(o, t), (inputs, targets))
    rows = torch.cat([g.flatten(1) for g in gradients.values()], dim=1).to(torch.complex128)  # [200, parameters]
    measured = rows.square().sum(dim=1).abs().sqrt()
    shares = rows / measured.clamp(min=1.0).unsqueeze(1)
    record = int(shares.abs().square().sum(dim=1).argsort()[100])  # an ordinary record, not the worst
    rest = shares[:4].sum(dim=0)
    block = Block("gradient", tuple(rest.shape), "complex128", 1.0, SIGMA, "circular")
    return _noisy(Mechanism((block,), _ONE_STEP), ({"gradient": rest}, {"gradient": rest + shares[record]}), seed)


def _fourier(seed: int, algorithm: str = "gredp", noise: str = "sound", std: float = SIGMA, back: bool = True) -> Release:
    """GReDP or Spectral-DP as it is registered, on one circulant block of eight numbers: its release, transformed back or not."""
    generator = torch.Generator().manual_seed(int(stream(seed, "audit", "fourier").generate_state(1, np.uint64)[0]) % 2**63)
    layer = CirculantLinear(8, 8, 8, bias=False).double()
    with torch.no_grad():
        layer.weight.copy_(torch.randn(layer.weight.shape, dtype=torch.float64, generator=generator))
    inputs = torch.randn(4, 8, dtype=torch.float64, generator=generator)
    targets = torch.randint(0, 8, (4,), generator=generator)
    problem = Problem(nn.Sequential(layer), lambda o, t: 1e3 * _cross_entropy(o, t), _ONE_STEP, like=inputs[:0])
    made: Algorithm = lookup("algorithm", algorithm)(problem, noise_multiplier=std, max_grad_norm=1.0, noise=noise)
    sums = _sums(made, (inputs[:3], targets[:3])), _sums(made, (inputs, targets))
    (name,) = sums[0]

    def as_gradient(spectra: Tensor) -> Tensor:
        return made.postprocess({name: spectra}, 1.0)[name] if back else spectra

    return _noisy(made.mechanism(), sums, seed, post=as_gradient)


def _opacus(seed: int, ghost: bool = False, secure_mode: bool = False) -> Release:
    """Opacus itself, driven with one complex linear layer: its gradients, its clipping, its noise."""
    with warnings.catch_warnings(action="ignore"):
        sums, optimizer = _opacus_sums(seed, ghost, secure_mode)

    def release(there: bool, count: int) -> Tensor:
        (parameter,) = optimizer.params
        rows = torch.empty((count, *parameter.shape), dtype=parameter.dtype)
        with torch.no_grad():
            for i in range(count):
                parameter.summed_grad = sums[there].clone()
                optimizer.add_noise()
                rows[i] = parameter.grad
        return _in_rows(rows)

    return release


def _opacus_sums(seed: int, ghost: bool, secure_mode: bool) -> tuple[tuple[Tensor, Tensor], Any]:
    """Opacus's clipped sums without and with the record that moves them most, and the optimiser that adds its noise."""
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    generator = torch.Generator().manual_seed(seed % 2**63)
    layer = nn.Linear(2, 2, bias=False, dtype=torch.complex64)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(layer.weight.shape, dtype=torch.complex64, generator=generator))
    inputs = 100 * torch.randn(40, 2, dtype=torch.complex64, generator=generator)
    targets = torch.randint(0, 2, (40,), generator=generator)
    wrapped = GradSampleModuleFastGradientClipping if ghost else GradSampleModule
    optimizing = DPOptimizerFastGradientClipping if ghost else DPOptimizer
    more = {"max_grad_norm": 1.0, "use_ghost_clipping": True} if ghost else {}
    model = wrapped(layer, batch_first=True, loss_reduction="sum", **more)
    optimizer = optimizing(
        torch.optim.SGD(model.parameters(), lr=0.0),
        noise_multiplier=SIGMA,
        max_grad_norm=1.0,
        expected_batch_size=None,
        loss_reduction="sum",
        generator=generator,
        secure_mode=secure_mode,
    )
    criterion = nn.CrossEntropyLoss(reduction="sum")
    loss = DPLossFastGradientClipping(model, optimizer, criterion, loss_reduction="sum") if ghost else criterion

    def clipped_sum(batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss(model(inputs[batch]).abs(), targets[batch]).backward()
        if ghost:
            optimizer.accumulate()
        else:
            optimizer.clip_and_accumulate()
        (parameter,) = optimizer.params
        return parameter.summed_grad.detach().clone()

    rest = clipped_sum(torch.tensor([0, 1]))
    with_each = [clipped_sum(torch.tensor([0, 1, record])) for record in range(2, len(inputs))]
    return (rest, max(with_each, key=lambda moved: float((moved - rest).norm()))), optimizer


CASES: tuple[Case, ...] = (
    Case("per_component", "ζ-DP-SGD, σ on each part: z = σ", SIGMA, "passes", _zeta),
    Case("circular", "circular noise, at what it gives: z = σ/√2", SIGMA * HALF_POWER, "passes", lambda s: _zeta(s, "circular")),
    Case("circular_2021", "circular noise of Ziller et al. 2021: z = σ", SIGMA, "flagged", lambda s: _zeta(s, "circular")),
    Case(
        "no_imaginary_noise",
        "noise that forgets the imaginary part: z = σ",
        SIGMA,
        "flagged",
        lambda s: _zeta(s, spoil=_forgets_the_imaginary_part),
    ),
    Case("under_measured_norm", "clipping by |Σ g²| for Σ|g|²: z = σ", SIGMA, "flagged", _under_measured),
    Case("gredp", "GReDP, sound noise: z = σ", SIGMA, "passes", _fourier),
    Case(
        "gredp_complex_at_z",
        "GReDP, complex noise, at what it gives: z = σ/√2",
        SIGMA * HALF_POWER,
        "passes",
        lambda s: _fourier(s, noise="complex"),
    ),
    Case(
        "gredp_complex",
        "GReDP, complex noise (its Theorem 1): z = σ",
        SIGMA,
        "flagged",
        lambda s: _fourier(s, noise="complex"),
    ),
    Case(
        "gredp_real",
        "GReDP, real noise (its Algorithm 2): z = σ",
        SIGMA,
        "flagged",
        lambda s: _fourier(s, noise="as_published"),
    ),
    Case("spectral_dp", "Spectral-DP, sound noise: z = σ", SIGMA, "passes", lambda s: _fourier(s, "spectral_dp")),
    Case(
        "spectral_dp_2023",
        "Spectral-DP as published: z = σ",
        SIGMA,
        "flagged",
        lambda s: _fourier(s, "spectral_dp", "as_published", back=False),
    ),
    Case("opacus", "Opacus, complex layer, hooks: z = σ", SIGMA, "flagged", _opacus, "opacus"),
    Case(
        "opacus_secure",
        "Opacus, complex layer, secure mode: z = σ",
        SIGMA,
        "flagged",
        lambda s: _opacus(s, secure_mode=True),
        "opacus",
    ),
    Case(
        "opacus_ghost",
        "Opacus, complex layer, ghost clipping: z = σ",
        SIGMA,
        "flagged",
        lambda s: _opacus(s, ghost=True),
        "opacus",
    ),
)


# ------------------------------------------------------------------------------------------------ blocks as real numbers


class Coordinates:
    """A mechanism's blocks as one real vector, isometrically: a canary of norm C there is a contribution of norm C.

    A complex entry is two coordinates. A block with hermitian noise is taken back to the real signal whose spectrum it is: only
    such spectra can occur in it.
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
        """The blocks' tensors -> [size]."""
        return torch.cat([self._of_block(block, sums[block.name]) for block in self.blocks])

    def _of_block(self, block: Block, value: Tensor) -> Tensor:
        if block.noise == "hermitian":
            return torch.fft.ifftn(value, dim=block.fft_dims, norm="ortho").real.flatten()
        return (torch.view_as_real(value) if value.is_complex() else value).flatten()

    def add(self, vector: Tensor, to: dict[str, Tensor]) -> None:
        """[size] -> added to the blocks' tensors."""
        for block, start, size in zip(self.blocks, self.starts, self.sizes, strict=True):
            # a copy of its own: torch may crash on a complex view of memory that is not aligned for complex numbers
            part = vector[start : start + size].to(to[block.name].real.dtype, copy=True)
            if block.noise == "hermitian":
                to[block.name] += torch.fft.fftn(part.view(block.shape), dim=block.fft_dims, norm="ortho")
            elif self._two_parts(block):
                to[block.name] += torch.view_as_complex(part.view(*block.shape, 2))
            else:
                to[block.name] += part.view(block.shape)

    def kinds(self) -> np.ndarray:
        """[size] numbers: coordinates that should get the same noise, by block and by part, have the same one."""
        numbers = []
        for i, (block, size) in enumerate(zip(self.blocks, self.sizes, strict=True)):
            numbers.append(2 * i + (np.arange(size) % 2 if self._two_parts(block) else np.zeros(size, dtype=int)))
        return np.concatenate(numbers)


def canary_supports(
    mechanism: Mechanism, coordinates: Coordinates, canaries: int, width: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Worst-case contributions with no coordinate in common, hence orthogonal: indices and values, each [canaries, width].

    Each has exactly the mechanism's bound: under a joint bound over all blocks together, else in every block that has room for
    all canaries.
    """
    groups = (
        [(0, coordinates.size, mechanism.blocks[0].bound)]
        if mechanism.joint
        else [
            (start, size, block.bound)
            for block, start, size in zip(coordinates.blocks, coordinates.starts, coordinates.sizes, strict=True)
            if size >= canaries
        ]
    )
    indices, values = [], []
    for start, size, bound in groups:
        wide = max(1, min(width, size // canaries))
        chosen = rng.permutation(size)[: canaries * wide].reshape(canaries, wide)
        indices.append(start + chosen)
        values.append(rng.choice([-1.0, 1.0], size=chosen.shape) * bound / math.sqrt(wide))
    return np.concatenate(indices, axis=1), np.concatenate(values, axis=1)


# ----------------------------------------------------------------------------------------------- the attacks on a recipe


@dataclass(frozen=True)
class Subject:
    """A recipe's run, set up and not begun."""

    config: Run
    data: Splits
    task: Task
    model: nn.Module
    algorithm: Algorithm
    optimizer: torch.optim.Optimizer
    plan: Plan
    noise: NoiseSource
    device: torch.device

    @staticmethod
    def of(config: Run) -> Subject:
        """Everything as `experiment.run` has it.

        Raises:
            UserError: the data is missing, the model is not fit for private training, or nothing private is claimed.
        """
        require_central(config, "audit")
        if config.threads:
            torch.set_num_threads(config.threads)
        device = pick_device(config.device)
        data: Splits = lookup("dataset", config.dataset.name)(config.data_root, **config.dataset.options)
        task: Task = lookup("task", config.task.name)(**config.task.options)
        model = build_model(config, data).to(device)
        plan = Plan.of(config, len(data.train))
        problem = Problem(model, task.loss, plan.sampling, config.seed, data.train.batch(torch.arange(0))[0])
        config, algorithm = build_algorithm(config, problem, plan)
        if algorithm.mechanism().z == 0 or plan.sampling.scheme == "shuffled":
            raise UserError(f"recipe={config.recipe}: its ε is ∞, so there is nothing an audit could refute.")
        check_model(model, algorithm, task, data)
        noise: NoiseSource = SecureNoise() if config.privacy.secure else SeededNoise(config.seed)
        return Subject(config, data, task, model, algorithm, build_optimizer(config, model), plan, noise, device)

    @property
    def mechanism(self) -> Mechanism:
        return self.algorithm.mechanism()

    def rng(self, purpose: str) -> np.random.Generator:
        return np.random.default_rng(stream(self.config.seed, "audit", purpose))


def attack_recipe_release(subject: Subject, confidence: float, trials: int = 10_000) -> list[Finding]:
    """One release of the recipe's own mechanism, in full size: noise drawn by the engine's own function. Two contributions:

    - the worst one: the adversary first watches pure noise, then chooses a vector of exactly the bound where it saw least of it;
    - a record's: of training records, blown up or not, with another record's target, the one that moves the algorithm's own sum
      furthest. It finds a clipper that lets more through than the bound.

    Where the recipe's noise multiplier promises more than its mechanism gives, a third row holds the first against that promise.
    Nothing is expected of it: the tight ε beside the recipe's claim already says what is true.
    """
    mechanism = subject.mechanism
    coordinates = Coordinates(mechanism)
    trials = max(200, min(trials, int(2e8 / coordinates.size)))
    watched = _watched(coordinates, subject.rng("release"))
    kept = torch.from_numpy(np.concatenate(watched)).to(subject.device)
    moved = _furthest_move(subject, coordinates)
    kinds = torch.from_numpy(coordinates.kinds())
    numbers, kind_of = torch.unique(kinds, return_inverse=True)
    lengths = torch.zeros(len(numbers), dtype=torch.float64).index_add_(0, kind_of, moved.square()).sqrt()
    along = (moved / lengths[kind_of].clamp(min=1e-300)).to(subject.device)  # a unit vector in each block and part
    kind_of = kind_of.to(subject.device)

    pure = max(200, trials // 10)
    noise = torch.empty(pure + 2 * trials, len(kept) + len(numbers), dtype=torch.float64)
    for i in range(len(noise)):
        total = {
            block.name: torch.zeros(block.shape, dtype=getattr(torch, block.dtype), device=subject.device)
            for block in mechanism.blocks
        }
        drawn = coordinates.of(add_noise(total, mechanism, subject.noise, 10**9 + i)).double()  # far from any run's steps
        projected = torch.zeros(len(numbers), dtype=torch.float64, device=subject.device).index_add_(0, kind_of, along * drawn)
        noise[i] = torch.cat([drawn[kept], projected]).cpu()

    def attack(columns: slice, without: Tensor, with_it: Tensor) -> tuple[float, str]:
        def release(there: bool, count: int) -> Tensor:
            start = pure + trials * there
            return noise[start : start + count, columns] + (with_it if there else without)

        return attack_release(release, trials, RELEASE_DELTA, confidence, (with_it - without).numpy())

    worst = torch.from_numpy(_worst_contribution(mechanism, watched, noise[:pure, : len(kept)].numpy()))
    absent = -worst if mechanism.sampling.shift == 2 else torch.zeros_like(worst)  # the opposite, where records are replaced
    by_worst = attack(slice(len(kept)), absent, worst)
    by_record = attack(slice(len(kept), None), torch.zeros_like(lengths), lengths)

    def against(case: str, z: float, claim: str, expected: Expected, found: tuple[float, str]) -> Finding:
        claimed = gdp_epsilon(1 / z, RELEASE_DELTA)
        return _finding(f"{name}: {case}", claim, claimed, found[0], RELEASE_DELTA, confidence, expected, found[1])

    name, z = subject.config.recipe, mechanism.z
    findings = [
        against("release, worst contribution", z, f"its mechanism: z = {z:.4g}", "passes", by_worst),
        against("release, hostile records", z, f"its mechanism: z = {z:.4g}", "passes", by_record),
    ]
    sigma = float(subject.config.algorithm.options.get("noise_multiplier", 0.0))
    if z < 0.9 * sigma:
        findings.append(against("release, as claimed", sigma, f"its noise multiplier: z = {sigma:g}", "either", by_worst))
    return findings


def _watched(coordinates: Coordinates, rng: np.random.Generator) -> list[np.ndarray]:
    """A few coordinates of every block, 64 or so in all; of a complex block whole entries."""
    share = max(2, 64 // len(coordinates.blocks))
    watched = []
    for start, size in zip(coordinates.starts, coordinates.sizes, strict=True):
        pairs = rng.permutation(max(1, size // 2))[: share // 2]
        chosen = (2 * np.sort(pairs)[:, None] + np.arange(2)).flatten()
        watched.append(start + chosen[chosen < size])
    return watched


def _worst_contribution(mechanism: Mechanism, watched: list[np.ndarray], noise: np.ndarray) -> np.ndarray:
    """The contribution within the bound that lies where the least noise was seen: over all watched coordinates, or per block."""
    ends = np.cumsum([len(chosen) for chosen in watched])
    parts = [(0, int(ends[-1]), mechanism.blocks[0].bound)]
    if not mechanism.joint:
        parts = [(end - len(chosen), end, b.bound) for chosen, end, b in zip(watched, ends, mechanism.blocks, strict=True)]
    worst = np.zeros(noise.shape[1])
    for start, end, bound in parts:
        seen = noise[:, start:end]
        worst[start:end] = bound * np.linalg.eigh(seen.T @ seen)[1][:, 0]
    return worst


def _furthest_move(subject: Subject, coordinates: Coordinates) -> Tensor:
    """How far one hostile record moves the algorithm's own sum, at most: [size], float64.

    Distances count in standard deviations of each block's noise. Where neighbours differ by a replaced record, it is the
    furthest that replacing one such record by another goes.
    """
    mechanism = subject.mechanism
    weight = torch.cat(
        [
            torch.full((size,), 1 / (block.weakest_std or 1.0), dtype=torch.float64)
            for block, size in zip(coordinates.blocks, coordinates.sizes, strict=True)
        ]
    )
    some = torch.from_numpy(subject.rng("hostile").permutation(len(subject.data.train))[:16])
    inputs, targets = (part.to(subject.device) for part in subject.data.train.batch(some))
    wrong = targets.roll(1, dims=0)

    def summed(x: Tensor, y: Tensor) -> Tensor:
        total = {
            block.name: torch.zeros(block.shape, dtype=getattr(torch, block.dtype), device=subject.device)
            for block in mechanism.blocks
        }
        subject.algorithm.accumulate(total, (x, y))
        return coordinates.of(total).double().cpu()

    def moves() -> Iterator[Tensor]:
        rest = summed(inputs[:4], targets[:4])
        scales = (1e-2, 1.0, 1e2, 1e4) if inputs.dtype.is_floating_point or inputs.dtype.is_complex else (1,)
        for scale in scales:
            for i in range(4, len(inputs)):
                x, y = torch.cat([inputs[:4], inputs[i : i + 1] * scale]), torch.cat([targets[:4], wrong[i : i + 1]])
                yield summed(x, y) - rest

    def furthest(of: Tensor) -> Tensor:
        best, length = torch.zeros(coordinates.size, dtype=torch.float64), 0.0
        for move in moves():
            shift = move - of
            if (
                far := float((weight * shift).norm())
            ) > length * 1.001:  # most are clipped to one length: rounding must not choose
                best, length = shift, far
        return best

    first = furthest(torch.zeros(coordinates.size, dtype=torch.float64))
    return furthest(first) if mechanism.sampling.shift == 2 else first


class _WithCanaries:
    """An algorithm whose batches hold canaries among the records, and whose every release is read.

    Canaries come as a batch of their own, (their numbers, how much of each), put together by `attack_with_gradients`.
    """

    private = True

    def __init__(self, inner: Algorithm, coordinates: Coordinates, indices: np.ndarray, values: np.ndarray) -> None:
        self.inner, self.coordinates = inner, coordinates
        self.indices, self.values = torch.from_numpy(indices), torch.from_numpy(values)
        self.drawn: Batch | None = None
        self.rest: dict[str, Tensor] = {}
        self.seen: list[Tensor] = []

    def mechanism(self) -> Mechanism:
        return self.inner.mechanism()

    def accumulate(self, total: dict[str, Tensor], batch: Batch) -> None:
        if batch is not self.drawn:
            self.inner.accumulate(total, batch)
            return
        self.rest = {block.name: total[block.name].clone() for block in self.mechanism().blocks}
        numbers, amounts = batch
        vector = torch.zeros(self.coordinates.size, dtype=torch.float64)
        vector[self.indices[numbers].flatten()] = (self.values[numbers] * amounts.unsqueeze(1)).flatten()
        self.coordinates.add(vector.to(next(iter(total.values())).device), to=total)

    def contributions(self, batch: Batch) -> dict[str, Tensor]:
        return self.inner.contributions(batch)

    def postprocess(self, noisy: dict[str, Tensor], expected_batch_size: float) -> dict[str, Tensor]:
        """Read the release before it is used. The adversary knows every other record, and takes their sum away."""
        unknown_part = self.coordinates.of({name: value - self.rest[name] for name, value in noisy.items()})
        self.seen.append(unknown_part.cpu()[self.indices].float())  # [canaries, width]
        return self.inner.postprocess(noisy, expected_batch_size)


def attack_with_gradients(subject: Subject, confidence: float, canaries: int, steps: int) -> Finding:
    """The whole run with gradient canaries (white box): worst-case contributions, drawn by the recipe's own sampling.

    Each stands in a training record's place. Out of the set it contributes nothing, or, where neighbours differ by a replaced
    record, its opposite.
    """
    mechanism, coordinates = subject.mechanism, Coordinates(subject.mechanism)
    rng = subject.rng("gradients")
    steps = min(steps, subject.plan.steps)
    room = coordinates.size if mechanism.joint else max(coordinates.sizes)
    canaries = min(canaries, room, len(subject.data.train) // 2)
    width = max(1, min(16, int(1e8 / (steps * canaries))))
    indices, values = canary_supports(mechanism, coordinates, canaries, width, rng)
    slots = rng.permutation(len(subject.data.train))[:canaries]
    number = np.full(len(subject.data.train), -1)
    number[slots] = np.arange(canaries)
    included = rng.random(canaries) < 0.5
    replaced = mechanism.sampling.shift == 2
    audited = _WithCanaries(subject.algorithm, coordinates, indices, values)

    def batches(drawn: np.ndarray) -> Iterator[Batch]:
        yield from micro_batches(subject.data.train, drawn[number[drawn] < 0], subject.config, subject.device)
        here = number[drawn][number[drawn] >= 0]
        amounts = np.where(included[here], 1.0, -1.0 if replaced else 0.0)
        audited.drawn = torch.from_numpy(here), torch.from_numpy(amounts)
        yield audited.drawn

    releases = _train(subject, audited, steps, batches)
    scores = _gradient_scores(torch.stack(audited.seen).double(), audited, mechanism.sampling.sample_rate, replaced)
    delta = subject.config.privacy.delta
    bound, evidence = guess(scores, included, delta, confidence)
    return _finding(
        f"{subject.config.recipe}: run, gradient canaries",
        _run_claim(releases, subject.plan.steps),
        tight_epsilon(mechanism, releases, delta),
        bound,
        delta,
        confidence,
        "passes",
        evidence,
    )


def _run_claim(releases: int, planned: int) -> str:
    first = "" if releases == planned else f"the first {releases:,} of "
    return f"tight ε of {first}{planned:,} steps"


def _gradient_scores(seen: Tensor, audited: _WithCanaries, rate: float, replaced: bool) -> np.ndarray:
    """Log-likelihood ratios of 'in' over 'out', summed over steps: [steps, canaries, width] -> [canaries].

    At each step a canary is there with probability q: log(1 − q + q·exp(x − μ/2)), x the release along it over the noise's
    variance, μ its squared length over the same. The variance is what was seen, by block and part, not what was declared.
    """
    kinds = audited.coordinates.kinds()[audited.indices.numpy()]  # [canaries, width]
    variance = torch.empty(audited.values.shape, dtype=torch.float64)
    floor = 1e-12 * float(audited.values.square().max())
    for kind in np.unique(kinds):
        chosen = torch.from_numpy(kinds == kind)
        variance[chosen] = max(float(seen[:, chosen].square().flatten().median()) / 0.45494, floor)  # of N(0, 1)²
    along = (seen * audited.values / variance).sum(dim=2)  # [steps, canaries]
    length = (audited.values.square() / variance).sum(dim=1)  # [canaries]
    inside, outside = math.log(rate), math.log1p(-rate) if rate < 1 else -math.inf

    def likelihood(x: Tensor) -> Tensor:
        return torch.logaddexp(torch.full_like(x, outside), inside + x - length / 2)

    ratio = likelihood(along) - (likelihood(-along) if replaced else 0.0)
    return ratio.sum(dim=0).numpy()


@dataclass(frozen=True)
class _WrongTargets:
    """Records of which some carry another one's target."""

    of: Source
    partner: Tensor  # [n]: whose target a record carries

    @property
    def groups(self) -> Tensor | None:
        return self.of.groups

    @property
    def by_chance(self) -> bool:
        return self.of.by_chance

    def __len__(self) -> int:
        return len(self.of)

    def batch(self, indices: Tensor, chance: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.of.batch(indices, chance)[0], self.of.batch(self.partner[indices], chance)[1]


def attack_with_inputs(subject: Subject, confidence: float, canaries: int, steps: int) -> Finding:
    """The whole run with input canaries (black box): training records with another record's target; how far did their loss fall?

    Out of the set a canary is not there, or, where neighbours differ by a replaced record, has its own target.
    """
    rng = subject.rng("inputs")
    train = subject.data.train
    steps = min(steps, subject.plan.steps)
    canaries = min(canaries, max(2, len(train) // 5))
    slots = rng.permutation(len(train))[:canaries]
    included = rng.random(canaries) < 0.5
    wrong = torch.arange(len(train))
    wrong[slots] = torch.from_numpy(np.roll(slots, 1))
    partner = torch.arange(len(train))
    partner[slots[included]] = wrong[slots[included]]
    out = np.zeros(len(train), dtype=bool)
    if subject.mechanism.sampling.shift == 1:
        out[slots[~included]] = True
    trained_on, judged = _WrongTargets(train, partner), _WrongTargets(train, wrong)

    def losses() -> np.ndarray:
        with torch.no_grad():
            parts = [
                subject.task.loss(subject.model(x), y).cpu()
                for x, y in micro_batches(judged, slots, subject.config, subject.device)
            ]
        return torch.cat(parts).double().numpy()

    before = losses()
    releases = _train(
        subject,
        subject.algorithm,
        steps,
        lambda drawn: micro_batches(trained_on, drawn[~out[drawn]], subject.config, subject.device),
    )
    delta = subject.config.privacy.delta
    bound, evidence = guess(np.nan_to_num(before - losses()), included, delta, confidence)
    return _finding(
        f"{subject.config.recipe}: run, input canaries",
        _run_claim(releases, subject.plan.steps),
        tight_epsilon(subject.mechanism, releases, delta),
        bound,
        delta,
        confidence,
        "passes",
        evidence,
    )


def _train(subject: Subject, algorithm: Algorithm, steps: int, batches: Callable[[np.ndarray], Iterable[Batch]]) -> int:
    """`steps` steps through the engine, with a ledger of their own; how many releases it counted."""
    with tempfile.TemporaryDirectory() as folder:
        ledger = Ledger(Path(folder) / "ledger.jsonl", algorithm.mechanism(), subject.noise.repeatable)
        training = Training(algorithm, subject.model, subject.optimizer, subject.noise, ledger)
        for step in range(steps):
            drawn, divisor = subject.plan.draw(subject.config.seed, step, subject.config.privacy.secure)
            private_step(training, step, batches(drawn), divisor)
        ledger.close()
        return ledger.releases


# -------------------------------------------------------------------------------------------------------------- all of it


def audit(
    config: Run, cases: str = "all", confidence: float = 0.99, canaries: int = 1000, steps: int = 1000
) -> Iterator[Finding]:
    """The attacks on a recipe and on the built-in cases, one finding after the other; the same for the same seed.

    Args:
        cases: all; recipe, for the recipe's own attacks alone; or names of built-in cases, comma-separated.
        canaries: of the attacks on a whole run; fewer where the model or the data has no room for so many.
        steps: at most so many steps of the run are made, and the ε of so many is held against the attack.

    Raises:
        UserError: a value or a name is wrong, or the recipe cannot be audited.
    """
    require(0.5 <= confidence < 1, "--confidence", confidence, "must lie in [0.5, 1)")
    require(canaries >= 10, "--canaries", canaries, "must be at least 10")
    require(steps >= 1, "--steps", steps, "must be at least 1")
    known = {case.name: case for case in CASES}
    chosen = [*known] if cases == "all" else [] if cases == "recipe" else cases.split(",")
    for name in chosen:
        if name not in known:
            raise unknown("case", name, ["all", "recipe", *known])
    if cases in ("all", "recipe"):
        yield from attack_recipe_release(Subject.of(config), confidence)
        yield attack_with_gradients(Subject.of(config), confidence, canaries, steps)
        yield attack_with_inputs(Subject.of(config), confidence, canaries, steps)
    for name in chosen:
        yield known[name].audit(config.seed, confidence)
