"""What Spectral-DP and GReDP release, in distribution: the covariance of the noise, and which of
them are DP-SGD in disguise.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.algorithms.test_properties import summed
from zdp_bench.algorithms import Algorithm, Problem
from zdp_bench.algorithms.spectral_dp import low_pass, one_sided
from zdp_bench.errors import UserError
from zdp_bench.nn.circulant import CirculantLinear
from zdp_bench.privacy.mechanism import Sampling
from zdp_bench.privacy.noise import SeededNoise, add_noise
from zdp_bench.registry import lookup
from zdp_bench.tasks.classification import Classification

POISSON = Sampling("poisson", 0.1, 1.0, 80)
SIGMA, BOUND, MANY = 1.5, 0.8, 100


def algorithm(name: str, layer: nn.Module | None = None, **options: Any) -> Algorithm:
    """On circulant blocks of five numbers, or on a convolution."""
    torch.manual_seed(0)
    first = layer or CirculantLinear(5 * MANY, 5, 5, bias=False)
    model = nn.Sequential(first, nn.Flatten()).double()
    shape = (0, first.in_channels, 3, 4) if isinstance(first, nn.Conv2d) else (0, 5 * MANY)
    like = torch.empty(shape, dtype=torch.float64)
    problem = Problem(model, Classification().loss, POISSON, like=like)
    make = lookup("algorithm", name)
    return make(problem, noise_multiplier=SIGMA, max_grad_norm=BOUND, **options)


def covariance(of: Algorithm, size: int) -> np.ndarray:
    """Of a block of the gradient of 20 empty batches, in units of (σC)²."""
    releases, mechanism = [], of.mechanism()
    for step in range(20):
        (gradient,) = of.postprocess(
            add_noise(summed(of), mechanism, SeededNoise(0), step), 1.0
        ).values()
        releases.append(gradient.reshape(MANY, size))
    rows = torch.cat(releases).numpy() / (SIGMA * BOUND)
    return rows.T @ rows / len(rows)


I5 = np.eye(5)
R5 = np.eye(5)[[0, 4, 3, 2, 1]]  # index reversal: n → −n mod 5


@pytest.mark.parametrize(
    ("noise", "expected"),
    # Theorem 1; Corollary 1, which prints ½I
    [
        ("sound", I5),
        ("complex", I5 / 2),
        ("real", (I5 + R5) / 2),
        ("as_published", (I5 + R5) / 2),
    ],
)
def test_gredps_noise_has_the_covariance_of_its_docstring(noise: str, expected: np.ndarray) -> None:
    assert np.abs(covariance(algorithm("gredp", noise=noise), 5) - expected).max() < 0.11


@pytest.mark.parametrize("noise", ["sound", "as_published"])
def test_spectral_dps_noise_is_filtered(noise: str) -> None:
    measured = covariance(algorithm("spectral_dp", noise=noise, filter_ratio=0.5), 5)
    # frequencies 0, 1 and 4 of 5: an orthogonal projection or, as published, with half the variance
    kept = np.fft.ifft(np.eye(5)[:, [0, 1, 4]], axis=0, norm="ortho")
    expected = (kept @ kept.conj().T).real * (1 if noise == "sound" else 0.5)
    assert np.abs(measured - expected).max() < 0.11


def test_a_filter_leaves_some_frequencies() -> None:
    with pytest.raises(UserError, match=r"filter_ratio=1.0: must lie in \[0, 1\)"):
        algorithm("spectral_dp", filter_ratio=1.0)


def test_a_convolutions_noise_is_white_after_the_crop() -> None:
    conv = nn.Conv2d(MANY, 1, (2, 3), bias=False)
    for name, options in (("gredp", {"spectrum": "padded"}), ("spectral_dp", {"filter_ratio": 0})):
        measured = covariance(algorithm(name, conv, **options), 6)
        assert np.abs(measured - np.eye(6)).max() < 0.13


@pytest.mark.parametrize("noise", ["sound", "complex"])
def test_gredp_clips_as_per_layer_dp_sgd_does(noise: str) -> None:
    """With the noise above, it is per-layer DP-SGD: at σ where sound, at σ/√2 where complex."""
    batch = torch.randn(6, 1, 3, 4, dtype=torch.float64), torch.arange(6)
    conv = nn.Conv2d(1, 2, 2)
    both = algorithm("gredp", conv, noise=noise), algorithm("dp_sgd", conv, per_layer=True)
    ours, theirs = (algorithm.postprocess(summed(algorithm, batch), 6.0) for algorithm in both)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(
    ("sizes", "ratio"), [((8,), 0.5), ((5, 5), 0.5), ((6, 7), 0.75), ((4, 4), 0.0)]
)
def test_the_low_pass_keeps_a_frequency_with_its_mirror(
    sizes: tuple[int, ...], ratio: float
) -> None:
    kept, dims = low_pass(sizes, ratio), list(range(len(sizes)))
    assert torch.equal(kept, kept.flip(dims).roll([1] * len(sizes), dims))
    assert kept.flatten()[0]
    assert 1 - ratio <= kept.float().mean() <= 1 - ratio + 0.35


def test_the_published_filter_is_one_sided_and_keeps_the_last_frequency() -> None:
    assert one_sided((8,), 0.5).tolist() == [True] * 4 + [False] * 3 + [True]


@pytest.mark.parametrize(
    ("sizes", "ratio", "kept"),
    [
        ((8,), 0.5, [0, 1, 2, 6, 7]),  # of frequencies at the same distance, both or none
        ((8,), 0.6, [0, 1, 2, 6, 7]),
        ((8,), 0.7, [0, 1, 7]),
        ((8,), 0.99, [0]),
        ((2, 4), 0.5, [0, 1, 2, 3, 4]),
        ((3, 2), 0.5, [0, 2, 4]),
    ],
)
def test_the_low_pass_keeps_the_lowest_frequencies(
    sizes: tuple[int, ...], ratio: float, kept: list[int]
) -> None:
    assert low_pass(sizes, ratio).flatten().nonzero().flatten().tolist() == kept


@pytest.mark.parametrize(
    ("size", "ratio", "kept"), [(8, 0.0, 8), (8, 0.25, 7), (8, 0.99, 2), (5, 0.5, 3)]
)
def test_the_published_filter_keeps_the_first_frequencies(
    size: int, ratio: float, kept: int
) -> None:
    is_kept = one_sided((3, size), ratio)
    expected = [index < kept - 1 or index == size - 1 for index in range(size)]
    assert is_kept.tolist() == [expected] * 3
