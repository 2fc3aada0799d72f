"""Flat, per layer and automatic clipping: what one example adds, and the ε that follows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gradients.harness import loss
from tests.gradients.zoo import MODELS
from zdp_bench.algorithms import Problem
from zdp_bench.config import configured
from zdp_bench.errors import UserError
from zdp_bench.gradients import clipped_sum, reference
from zdp_bench.privacy.mechanism import Sampling
from zdp_bench.registry import lookup

BOUND, GAMMA = 0.7, 0.01
STYLES: list[dict[str, Any]] = [
    {},
    {"per_layer": True},
    {"gamma": GAMMA},
    {"per_layer": True, "gamma": GAMMA},
]
CASES = {
    name: case
    for name in ("real_cnn", "complex_cnn", "resnet20")
    for case in MODELS
    if case.name == f"model {name}"
}


def norm(share: dict[str, Tensor]) -> float:
    return math.sqrt(sum(float(part.abs().double().square().sum()) for part in share.values()))


@pytest.mark.parametrize("style", STYLES, ids=str)
@pytest.mark.parametrize("engine", ["fast", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_no_example_adds_more_than_the_bound(name: str, engine: Any, style: dict[str, Any]) -> None:
    """Losses from 10⁻²⁵ to 10²⁵ times as large, and one that is not finite: with and without an
    example, the sums are at most C apart."""
    model = CASES[name].module(torch.float32)
    inputs, targets = CASES[name].batch(5, torch.float32)
    scales = torch.tensor([1e-25, 1e-3, 1.0, 1e25, math.nan])

    def scaled(outputs: Tensor, rows: Tensor) -> Tensor:
        return loss(outputs, rows[:, 0]) * rows[:, 1]

    rows = torch.stack([targets, scales], dim=1)

    def sum_of(chosen: list[int]) -> dict[str, Tensor]:
        batch = inputs[chosen], rows[chosen]
        return clipped_sum(model, scaled, batch, BOUND, engine=engine, **style).sums

    shares = [norm(sum_of([i])) for i in range(5)]
    assert all(share <= BOUND for share in shares)
    assert shares[3] == pytest.approx(BOUND, rel=1e-2 if style.get("gamma") else 1e-4)
    assert shares[4] == 0.0
    whole, without = sum_of([0, 1, 2, 3, 4]), sum_of([0, 1, 2, 4])
    moved = {name: whole[name] - without[name] for name in whole}
    assert norm(moved) <= BOUND * (1 + 1e-5)


@pytest.mark.parametrize("name", CASES)
def test_automatic_clipping_is_its_formula(name: str) -> None:
    model = CASES[name].module(torch.float64)
    batch = CASES[name].batch(4, torch.float64)
    each = reference.per_sample_gradients(model, loss, batch)
    lengths = [norm({k: v[i] for k, v in each.items()}) for i in range(4)]
    for engine in ("fast", "reference"):
        found = clipped_sum(model, loss, batch, BOUND, gamma=0.3, engine=engine).sums  # type: ignore[arg-type]
        for key, value in found.items():
            expected = sum(g * BOUND / (n + 0.3) for g, n in zip(each[key], lengths, strict=True))
            assert torch.allclose(value, expected, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("style", STYLES, ids=str)
@pytest.mark.parametrize("name", ["dp_sgd", "zeta_dp_sgd"])
def test_every_style_is_as_private_as_its_noise(name: str, style: dict[str, Any]) -> None:
    """z = σ: the noise over the most that one example moves the sum."""
    case = CASES["real_cnn" if name == "dp_sgd" else "complex_cnn"]
    model = case.module(torch.float32)
    problem = Problem(model, loss, Sampling("poisson", 0.1, 10, 100))
    algorithm = lookup("algorithm", name)(
        problem, noise_multiplier=1.3, max_grad_norm=BOUND, **style
    )
    assert algorithm.mechanism().z == pytest.approx(1.3)
    batch = case.batch(3, torch.float32)
    total: dict[str, Tensor] = {}
    algorithm.accumulate(total, batch)
    shares = algorithm.contributions(batch)
    for i in range(3):
        assert norm({key: value[i] for key, value in shares.items()}) <= BOUND
    for key, value in shares.items():
        assert torch.allclose(value.sum(dim=0), total[key], atol=1e-4)


@pytest.mark.parametrize("gamma", ["0.0", "-0.1", "1e13"])
def test_other_gammas_are_refused(gamma: str) -> None:
    with pytest.raises(UserError, match=r"algorithm\.gamma=.*must lie in 1e-12 to 1e\+12"):
        configured(["recipe=quickstart", f"algorithm.gamma={gamma}"])
