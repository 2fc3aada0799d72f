"""The attack on one release of a recipe's own mechanism, in full size: by the worst contribution, and by hostile records."""

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


def attack_recipe_release(
    subject: Subject, confidence: float, trials: int = 10_000
) -> list[Finding]:
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
    lengths = (
        torch.zeros(len(numbers), dtype=torch.float64).index_add_(0, kind_of, moved.square()).sqrt()
    )
    along = (moved / lengths[kind_of].clamp(min=1e-300)).to(
        subject.device
    )  # a unit vector in each block and part
    kind_of = kind_of.to(subject.device)

    source = subject.noise(subject.key)
    pure = max(200, trials // 10)
    noise = torch.empty(pure + 2 * trials, len(kept) + len(numbers), dtype=torch.float64)
    for i in range(len(noise)):
        total = {
            block.name: torch.zeros(
                block.shape, dtype=getattr(torch, block.dtype), device=subject.device
            )
            for block in mechanism.blocks
        }
        drawn = coordinates.of(
            add_noise(total, mechanism, source, 10**9 + i)
        ).double()  # far from any run's steps
        projected = torch.zeros(
            len(numbers), dtype=torch.float64, device=subject.device
        ).index_add_(0, kind_of, along * drawn)
        noise[i] = torch.cat([drawn[kept], projected]).cpu()

    def attack(columns: slice, without: Tensor, with_it: Tensor) -> tuple[float, str]:
        def release(there: bool, count: int) -> Tensor:
            start = pure + trials * there
            return noise[start : start + count, columns] + (with_it if there else without)

        return attack_release(
            release, trials, RELEASE_DELTA, confidence, (with_it - without).numpy()
        )

    worst = torch.from_numpy(
        _worst_contribution(mechanism, watched, noise[:pure, : len(kept)].numpy())
    )
    absent = (
        -worst if mechanism.sampling.shift == 2 else torch.zeros_like(worst)
    )  # the opposite, where records are replaced
    by_worst = attack(slice(len(kept)), absent, worst)
    by_record = attack(slice(len(kept), None), torch.zeros_like(lengths), lengths)

    def against(
        case: str, z: float, claim: str, expected: Expected, found: tuple[float, str]
    ) -> Finding:
        claimed = gdp_epsilon(1 / z, RELEASE_DELTA)
        return Finding.of(
            f"{name}: {case}",
            claim,
            claimed,
            found[0],
            RELEASE_DELTA,
            confidence,
            expected,
            found[1],
        )

    name, z = subject.config.recipe, mechanism.z
    findings = [
        against(
            "release, worst contribution", z, f"its mechanism: z = {z:.4g}", "passes", by_worst
        ),
        against("release, hostile records", z, f"its mechanism: z = {z:.4g}", "passes", by_record),
    ]
    sigma = subject.algorithm.noise_multiplier
    if z < 0.9 * sigma:
        findings.append(
            against(
                "release, as claimed",
                sigma,
                f"its noise multiplier: z = {sigma:g}",
                "either",
                by_worst,
            )
        )
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


def _worst_contribution(
    mechanism: Mechanism, watched: list[np.ndarray], noise: np.ndarray
) -> np.ndarray:
    """The contribution within the bound that lies where the least noise was seen: over all watched coordinates, or per block."""
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
            block.name: torch.zeros(
                block.shape, dtype=getattr(torch, block.dtype), device=subject.device
            )
            for block in mechanism.blocks
        }
        subject.algorithm.accumulate(total, (x, y))
        return coordinates.of(total).double().cpu()

    def moves() -> Iterator[Tensor]:
        rest = summed(inputs[:4], targets[:4])
        scales = (
            (1e-2, 1.0, 1e2, 1e4)
            if inputs.dtype.is_floating_point or inputs.dtype.is_complex
            else (1,)
        )
        for scale in scales:
            for i in range(4, len(inputs)):
                x, y = (
                    torch.cat([inputs[:4], inputs[i : i + 1] * scale]),
                    torch.cat([targets[:4], wrong[i : i + 1]]),
                )
                yield summed(x, y) - rest
        for size in (
            (1e4, 1e10, 1e20) if len(scales) > 1 else ()
        ):  # all positions alike, so that a layer's terms may cancel
            alike = (
                inputs[4:5]
                .mean(dim=tuple(range(1, inputs.dim())), keepdim=True)
                .expand_as(inputs[4:5])
            )
            yield (
                summed(torch.cat([inputs[:4], alike * size]), torch.cat([targets[:4], wrong[4:5]]))
                - rest
            )

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
