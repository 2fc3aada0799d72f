"""What Spectral-DP and GReDP release, in distribution: the covariance of the noise, and which of
them are DP-SGD in disguise.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import ks_2samp
from torch import Tensor, nn

from zdp_bench.algorithms import Algorithm, Problem
from zdp_bench.algorithms.spectral_dp import low_pass, one_sided
from zdp_bench.errors import UserError
from zdp_bench.gradients import Batch
from zdp_bench.nn.circulant import CirculantLinear
from zdp_bench.privacy.accounting import tight_epsilon
from zdp_bench.privacy.mechanism import Sampling
from zdp_bench.privacy.noise import SeededNoise, add_noise
from zdp_bench.registry import lookup
from zdp_bench.tasks.classification import Classification
from zdp_bench.training.step import Total

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


def test_gredps_real_noise_leaves_the_odd_part_bare() -> None:
    odd = (I5 - R5)[1] / math.sqrt(2)
    assert np.abs(releases(algorithm("gredp", noise="real"), 50).numpy() @ odd).max() < 1e-12


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


def test_gredp_with_complex_noise_is_dp_sgd_with_less_of_it() -> None:
    """Per-layer DP-SGD at σ/√2: the same releases in distribution, and the same tight ε.

    Theorem 1 claims σ.
    """
    for layer, records in (
        (CirculantLinear(5, 5, 5), torch.randn(3, 5)),
        (nn.Conv2d(1, 2, 2), torch.randn(3, 1, 3, 4)),
    ):
        batch = 3 * records.double(), torch.tensor([1, 2, 0])
        ours = algorithm("gredp", layer, noise="complex")
        theirs = algorithm("dp_sgd", layer, SIGMA / math.sqrt(2), per_layer=True)
        # it has no spectrum: GReDP noises it at σ, so it is left out of the comparison
        if layer.bias is not None:
            width = sum(p.numel() for p in layer.parameters()) - layer.bias.numel()
        a, b = (
            releases(x, 900, batch, seed)[:, :width].numpy() for x, seed in ((ours, 1), (theirs, 2))
        )
        rng = np.random.default_rng(0)
        directions = np.concatenate([np.eye(width)[:4], rng.standard_normal((6, width))]).T
        p_values = [
            ks_2samp(x, y).pvalue
            for x, y in zip((a @ directions).T, (b @ directions).T, strict=True)
        ]
        assert min(p_values) > 1e-3
        other = releases(algorithm("dp_sgd", layer, SIGMA, per_layer=True), 900, batch, 3)[
            :, :width
        ].numpy()
        assert (
            min(
                ks_2samp(x, y).pvalue
                for x, y in zip((a @ directions).T, (other @ directions).T, strict=True)
            )
            < 1e-4
        )
        assert ours.mechanism().z == pytest.approx(theirs.mechanism().z, rel=1e-12)
        assert tight_epsilon(ours.mechanism(), 20, 1e-5) == pytest.approx(
            tight_epsilon(theirs.mechanism(), 20, 1e-5), rel=1e-9
        )


def test_sound_gredp_clips_as_per_layer_dp_sgd_does() -> None:
    batch = torch.randn(6, 1, 3, 4, dtype=torch.float64), torch.arange(6)
    conv = nn.Conv2d(1, 2, 2)
    ours, theirs = algorithm("gredp", conv), algorithm("dp_sgd", conv, per_layer=True)
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


def test_a_filter_of_everything_is_refused() -> None:
    with pytest.raises(UserError, match=r"algorithm\.filter_ratio=1: must lie in \[0, 1\)"):
        algorithm("spectral_dp", filter_ratio=1)
