"""What Spectral-DP and GReDP release, in distribution: the covariance of the noise, and which of
them are DP-SGD in disguise.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from zdp_bench.algorithms import Algorithm, Problem
from zdp_bench.algorithms.spectral_dp import low_pass, one_sided
from zdp_bench.gradients import Batch
from zdp_bench.nn.circulant import CirculantLinear
from zdp_bench.privacy.mechanism import Sampling
from zdp_bench.privacy.noise import SeededNoise, add_noise
from zdp_bench.registry import lookup
from zdp_bench.tasks.classification import Classification
from zdp_bench.training.total import Total

POISSON = Sampling("poisson", 0.1, 1.0, 80)
SIGMA, BOUND = 1.5, 0.8
CPU = torch.device("cpu")


def algorithm(
    name: str, layer: nn.Module | None = None, sigma: float = SIGMA, **options: Any
) -> Algorithm:
    """On one circulant block, 5 → 5 of five numbers, or a 3×3 convolution."""
    torch.manual_seed(0)
    model = nn.Sequential(layer or CirculantLinear(5, 5, 5, bias=False), nn.Flatten()).double()
    shape = (0, 1, 3, 4) if isinstance(model[0], nn.Conv2d) else (0, 5)
    problem = Problem(
        model, Classification().loss, POISSON, like=torch.empty(shape, dtype=torch.float64)
    )
    return lookup("algorithm", name)(
        problem, noise_multiplier=sigma, max_grad_norm=BOUND, **options
    )


def releases(of: Algorithm, count: int, batch: Batch | None = None, seed: int = 0) -> Tensor:
    """[count, parameters]: what the optimiser would be given, of one fixed batch."""
    rows, mechanism = [], of.mechanism()
    summed = Total(mechanism, CPU)
    if batch is not None:
        of.accumulate(summed, batch)
    for step in range(count):
        total = {name: value.clone() for name, value in summed.whole().items()}
        gradients = of.postprocess(add_noise(total, mechanism, SeededNoise(seed), step), 1.0)
        rows.append(torch.cat([value.flatten() for value in gradients.values()]))
    return torch.stack(rows)


def covariance(of: Algorithm, count: int = 2000) -> np.ndarray:
    """In units of (σC)²."""
    rows = releases(of, count).numpy() / (SIGMA * BOUND)
    return rows.T @ rows / count


I5 = np.eye(5)
R5 = np.eye(5)[[0, 4, 3, 2, 1]]  # index reversal: n → −n mod 5


@pytest.mark.parametrize(
    ("noise", "expected"),
    # Theorem 1; Corollary 1, which prints ½I
    [("sound", I5), ("complex", I5 / 2), ("real", (I5 + R5) / 2)],
)
def test_gredps_noise_has_the_covariance_of_its_docstring(noise: str, expected: np.ndarray) -> None:
    assert np.abs(covariance(algorithm("gredp", noise=noise)) - expected).max() < 0.11


@pytest.mark.parametrize("noise", ["sound", "as_published"])
def test_spectral_dps_noise_is_filtered(noise: str) -> None:
    found = covariance(algorithm("spectral_dp", noise=noise, filter_ratio=0.5))
    if noise == "sound":  # frequencies 0, ±1 of 5: an orthogonal projection
        angle = 2 * np.pi * np.arange(5) / 5
        projection = (
            sum(
                np.cos(k * (angle[:, None] - angle[None, :])) * (1 if k == 0 else 2) for k in (0, 1)
            )
            / 5
        )
        assert np.abs(projection @ projection - projection).max() < 1e-12
        assert np.abs(found - projection).max() < 0.11
    else:  # frequencies 0, 1 and 4 of 5, each with half the variance: the real part
        kept = np.fft.ifft(np.eye(5)[:, [0, 1, 4]], axis=0, norm="ortho")
        assert np.abs(found - (kept @ kept.conj().T).real / 2).max() < 0.11


def test_a_convolutions_noise_is_white_after_the_crop() -> None:
    conv = nn.Conv2d(1, 1, (2, 3), bias=False)
    for name, options, scale in (
        ("gredp", {"spectrum": "padded"}, 1.0),
        ("spectral_dp", {"filter_ratio": 0.0}, 1.0),
    ):
        found = covariance(algorithm(name, conv, **options))
        assert np.abs(found - scale * np.eye(6)).max() < 0.13


@pytest.mark.parametrize("noise", ["sound", "complex"])
def test_gredp_clips_as_per_layer_dp_sgd_does(noise: str) -> None:
    """With the noise above, it is per-layer DP-SGD: at σ where sound, at σ/√2 where complex."""
    batch = torch.randn(6, 1, 3, 4, dtype=torch.float64), torch.arange(6)
    conv = nn.Conv2d(1, 2, 2)
    ours = algorithm("gredp", conv, noise=noise)
    theirs = algorithm("dp_sgd", conv, per_layer=True)
    totals = []
    for x in (ours, theirs):
        total = Total(x.mechanism(), CPU)
        x.accumulate(total, batch)
        totals.append(x.postprocess(total, 6.0))
    for name, value in totals[0].items():
        torch.testing.assert_close(value, totals[1][name], rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(
    ("sizes", "ratio"), [((8,), 0.5), ((5, 5), 0.5), ((6, 7), 0.75), ((4, 4), 0.0)]
)
def test_the_low_pass_keeps_a_frequency_with_its_mirror(
    sizes: tuple[int, ...], ratio: float
) -> None:
    kept = low_pass(sizes, ratio)
    mirrored = kept.flip(list(range(len(sizes)))).roll([1] * len(sizes), list(range(len(sizes))))
    assert torch.equal(kept, mirrored)
    assert kept.flatten()[0]
    assert kept.float().mean() >= 1 - ratio
    assert kept.float().mean() <= 1 - ratio + 0.35


def test_the_published_filter_is_one_sided_and_keeps_the_last_frequency() -> None:
    assert one_sided((8,), 0.5).tolist() == [True] * 4 + [False] * 3 + [True]
