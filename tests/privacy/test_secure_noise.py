"""The secure source: what its releases show of the sum, what it draws from, and its uniform numbers
and samples.

Apart from the laws that it shares with the seeded one (`test_noise.py`): these are of the operating
system's randomness alone.
"""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from tests.privacy.test_noise import (
    MECHANISM,
    SAMPLES,
    P,
    assert_covariance,
    coordinates,
    white,
    zero,
)
from zdp_bench.privacy import noise, sampling
from zdp_bench.privacy.mechanism import Block, Mechanism, Sampling
from zdp_bench.privacy.noise import (
    SecureNoise,
    SecureRandom,
    SeededNoise,
    add_noise,
    round_to_grid,
    widen,
)

SECURE = Mechanism(
    (
        Block("real", (301,), "float32", 1.0, 0.7, "real"),
        Block("double", (301,), "float64", 1.0, 3.0, "real"),
        Block("circular", (7, 9), "complex64", 1.0, 1.5, "circular"),
        Block("correlated", (7, 9), "complex64", 1.0, 1.5, "correlated", rho=0.3),
        Block("hermitian", (3, 5), "complex64", 1.0, 1.5, "hermitian", fft_dims=(1,)),
        Block("half", (7,), "complex64", 1.0, 1.5, "real_on_complex"),
    ),
    Sampling("poisson", 0.1, 10.0, 100),
)


def sum_of(seed: int) -> dict[str, Tensor]:
    """Sums as examples make them: numbers of every size, with digits of their own."""
    generator = torch.Generator().manual_seed(seed)
    return {
        b.name: torch.randn(b.shape, dtype=getattr(torch, b.dtype), generator=generator).mul_(
            10.0 ** (seed - 2)
        )
        for b in SECURE.blocks
    }


def off_the_grid(release: dict[str, Tensor]) -> dict[str, float]:
    """By block, the share of coordinates that are no multiple of 2⁻¹⁶ of the largest power of two
    below std.
    """
    steps = {b.name: 2.0 ** (math.floor(math.log2(b.std)) - 16) for b in SECURE.blocks}
    whole = {name: coordinates(value.unsqueeze(0)) / steps[name] for name, value in release.items()}
    return {name: float((value != value.round()).double().mean()) for name, value in whole.items()}


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_the_digits_of_a_secure_release_tell_nothing_of_the_sum(seed: int) -> None:
    """Every number that can come out can come out whatever the sum was. In float32 alone, sum and
    noise leave traces: of the sum in the coordinates where they cancel, of the noise where it is
    large."""
    bare = add_noise(sum_of(seed), SECURE, SecureNoise(), 0)
    assert off_the_grid(bare)["real"] > 0.01  # what this test would see
    release = round_to_grid(
        add_noise(widen(sum_of(seed), SecureNoise()), SECURE, SecureNoise(), 0),
        SECURE,
        SecureNoise(),
    )
    assert set(off_the_grid(release).values()) == {0.0}
    assert {name: str(value.dtype) for name, value in release.items()} == {
        b.name: f"torch.{b.dtype}" for b in SECURE.blocks
    }


def test_what_several_ranks_reduce_is_rounded_as_a_whole() -> None:
    """The noise-free share of another rank brings its own digits."""
    first, second = (widen(sum_of(seed), SecureNoise()) for seed in (2, 1))
    reduced = {
        name: value + second[name]
        for name, value in add_noise(first, SECURE, SecureNoise(), 0).items()
    }
    assert set(off_the_grid(round_to_grid(reduced, SECURE, SecureNoise())).values()) == {0.0}


def test_rounding_leaves_a_secure_release_its_law() -> None:
    one = Mechanism((Block("w", (SAMPLES, 2), "complex64", 1.0, 2.5, "circular"),), SECURE.sampling)
    sum_ = {"w": torch.full((SAMPLES, 2), 0.3 - 70j, dtype=torch.complex64)}
    release = round_to_grid(
        add_noise(widen(dict(sum_), SecureNoise()), one, SecureNoise(), 0), one, SecureNoise()
    )
    assert_covariance(
        coordinates(release["w"] - sum_["w"]), 2.5**2 * torch.eye(4, dtype=torch.float64)
    )


def test_seeded_releases_are_neither_widened_nor_rounded() -> None:
    total = zero()
    assert widen(total, SeededNoise(3))["w"] is total["w"]
    assert round_to_grid(total, MECHANISM, SeededNoise(3))["w"] is total["w"]


def test_secure_noise_takes_four_draws_from_the_operating_system(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = []
    real = os.urandom

    def spy(count: int) -> bytes:
        taken.append(count)
        return real(count)

    monkeypatch.setattr(noise.os, "urandom", spy)
    white(SecureNoise(), 1000)
    assert sum(taken) == 4 * 8 * 1000


def test_secure_noise_needs_no_generator_of_torch_or_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("not a cryptographic source")

    for name in ("randn", "normal"):
        monkeypatch.setattr(torch, name, forbidden)
    monkeypatch.setattr(np.random, "Generator", forbidden)
    monkeypatch.setattr(np.random, "default_rng", forbidden)
    white(SecureNoise(), 10)
    SecureRandom().random(10)


@pytest.mark.parametrize("fill", [b"\x00", b"\xff"])
def test_the_extreme_random_words_stay_inside_the_open_interval(
    monkeypatch: pytest.MonkeyPatch, fill: bytes
) -> None:
    monkeypatch.setattr(noise.os, "urandom", lambda count: fill * count)
    uniform = SecureRandom().random(4)
    assert (uniform > 0).all()
    assert (uniform < 1).all()
    assert torch.isfinite(white(SecureNoise(), 4, torch.float64)).all()


def test_secure_uniform_numbers_are_uniform() -> None:
    uniform = SecureRandom().random(SAMPLES)
    assert stats.kstest(uniform, "uniform").pvalue > P


def test_secure_sampling_draws_each_example_at_its_rate() -> None:
    """Each count against the exact binomial tails: at a small rate they are wider than a normal
    law's.
    """
    random, records, draws = SecureRandom(), 200, 2000
    counts, pairs = np.zeros(records), 0
    for _ in range(draws):
        taken = sampling.poisson(records, 0.05, random)
        counts[taken] += 1
        pairs += {0, 1} <= set(taken.tolist())

    def likely(count: np.ndarray | int, probability: float) -> bool:
        tails = np.minimum(
            stats.binom.cdf(count, draws, probability),
            stats.binom.sf(np.asarray(count) - 1, draws, probability),
        )
        return bool((tails > P).all())

    assert likely(counts, 0.05)
    assert likely(pairs, 0.05**2)  # independent of one another
    spread = ((counts - 100) ** 2 / (draws * 0.05 * 0.95)).sum()
    assert stats.chi2.sf(spread, records) > P
    assert stats.chi2.cdf(spread, records) > P
    fixed = np.zeros(50)
    for _ in range(draws):
        batch = sampling.uniform(50, 10, random)
        assert len(set(batch.tolist())) == 10
        fixed[batch] += 1
    assert likely(fixed, 0.2)
    assert len(sampling.poisson(records, 1.0, random)) == records
