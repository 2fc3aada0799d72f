"""Attack one release of a recipe's own mechanism, in full size."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from zdp_bench.audit.coordinates import Coordinates
from zdp_bench.audit.finding import Expected, Finding
from zdp_bench.audit.release import RELEASE_DELTA, attack_release
from zdp_bench.audit.subject import Subject
from zdp_bench.privacy.accounting import gdp_epsilon
from zdp_bench.privacy.mechanism import Mechanism
from zdp_bench.privacy.noise import add_noise
from zdp_bench.training.step import Total

MOST_RECORDS = 12  # of a hostile patient


def attack_recipe_release(
    subject: Subject, confidence: float, trials: int = 10_000
) -> list[Finding]:
    """Attack one release of the recipe's own mechanism, with noise drawn as in a private step.

    Two contributions are tried:
    - the worst one: the adversary first watches pure noise, then chooses a vector of exactly the
      bound in the direction where it saw the least;
    - a hostile example's: of training examples, scaled up or not, with another example's target,
      the one that moves the algorithm's own sum furthest. It finds a clipper that lets more through
      than the bound. With `privacy.unit=patient` it is a hostile patient's, all of whose records
      come at once: a clipper of single records is found.

    If the recipe's noise multiplier promises more than its mechanism gives, a third finding
    compares the first with that promise. Either verdict is expected: the tight ε beside the claim
    says what is true.
    """
    mechanism = subject.mechanism
    coordinates = Coordinates(mechanism)
    trials = max(200, min(trials, int(2e8 / coordinates.size)))
    watched = _choose_watched(coordinates, subject.rng("release"))
    kept = torch.from_numpy(np.concatenate(watched)).to(subject.device)
    moved = _furthest_move(subject, coordinates)
    kinds = torch.from_numpy(coordinates.kinds())
    numbers, kind_of = torch.unique(kinds, return_inverse=True)
    lengths = (
        torch.zeros(len(numbers), dtype=torch.float64).index_add_(0, kind_of, moved.square()).sqrt()
    )
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
    worst = torch.from_numpy(_worst_contribution(mechanism, watched, seen))
    # the opposite, if neighbours differ by a replaced example
    absent = -worst if mechanism.sampling.shift == 2 else torch.zeros_like(worst)
    by_worst = attack(slice(len(kept)), absent, worst)
    by_example = attack(slice(len(kept), None), torch.zeros_like(lengths), lengths)

    def compare(
        case: str, z: float, claim: str, expected: Expected, found: tuple[float, str]
    ) -> Finding:
        named, claimed = f"{subject.config.recipe}: {case}", gdp_epsilon(1 / z, RELEASE_DELTA)
        bound, evidence = found
        return Finding.of(
            named, claim, claimed, bound, RELEASE_DELTA, confidence, expected, evidence
        )

    z, sigma = mechanism.z, subject.algorithm.noise_multiplier
    claim = f"its mechanism: z = {z:.4g}"
    hostile = "records" if subject.patients is None else "patients"
    findings = [
        compare("release, worst contribution", z, claim, "passes", by_worst),
        compare(f"release, hostile {hostile}", z, claim, "passes", by_example),
    ]
    if z < 0.9 * sigma:
        claim = f"its noise multiplier: z = {sigma:g}"
        findings.append(compare("release, as claimed", sigma, claim, "either", by_worst))
    return findings


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
    """Return the contribution of exactly the bound in the direction that got the least noise,
    jointly or per block.
    """
    ends = np.cumsum([len(chosen) for chosen in watched])
    parts = [(0, int(ends[-1]), mechanism.blocks[0].bound)]
    if not mechanism.joint:
        parts = [
            (end - len(chosen), end, b.bound)
            for chosen, end, b in zip(watched, ends, mechanism.blocks, strict=True)
        ]
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
    weight = torch.cat(
        [
            torch.full((size,), 1 / (block.weakest_std or 1.0), dtype=torch.float64)
            for block, size in zip(coordinates.blocks, coordinates.sizes, strict=True)
        ]
    )
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
