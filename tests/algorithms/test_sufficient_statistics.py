"""Least squares from noisy statistics: what one share may move, what it costs, what it solves."""

from __future__ import annotations

import math
from pathlib import Path

import dp_accounting
import pytest
import torch
from torch import Tensor

from tests.algorithms.test_properties import examples, make, summed
from tests.training.test_run import carry_out
from zdp_bench.algorithms import Problem
from zdp_bench.algorithms.sufficient_statistics import (
    MOMENTS,
    WITH_TARGETS,
    SufficientStatistics,
)
from zdp_bench.config import configured
from zdp_bench.errors import UserError
from zdp_bench.privacy.mechanism import Sampling
from zdp_bench.privacy.noise import SeededNoise, draw
from zdp_bench.registry import lookup
from zdp_bench.tasks.classification import Classification

ONCE = Sampling("poisson", 1.0, 200.0, 200)
CASE = ("sufficient_statistics", {}, "linear")
RUN = ["dataset=phase_digits", "model=real_linear", "model.complex_as=channels"]
RUN += ["algorithm=sufficient_statistics", "trainer.sample_rate=1", "trainer.epochs=1"]
RUN += ["optimizer=sgd", "optimizer.lr=1"]


def test_one_share_moves_both_statistics_by_root_two_at_most() -> None:
    algorithm, _, kind = make(CASE)
    for scale in (1e-30, 1.0, 1e30):
        inputs, targets = examples(50, kind, scale)
        each = algorithm.contributions((inputs, targets))
        squares = sum(rows.square().flatten(1).sum(dim=1) for rows in each.values())
        assert isinstance(squares, Tensor)
        assert float(squares.max()) <= algorithm.mechanism().blocks[0].bound ** 2
        # u uᵀ has norm 1; y, a column less its mean, √(2/3)
        torch.testing.assert_close(squares, torch.full_like(squares, 1 + 2 / 3))


def test_epsilon_is_that_of_one_gaussian_release(tmp_path: Path) -> None:
    record = carry_out(tmp_path, *RUN, "privacy.target_epsilon=2").record
    privacy = record["privacy"]
    z, delta = privacy["noise_multiplier"], privacy["delta"]
    assert privacy["steps"] == 1
    exact = dp_accounting.get_epsilon_gaussian(z, delta)
    assert privacy["epsilon_tight"] == pytest.approx(exact, rel=1e-6)
    assert 1.999 < privacy["epsilon_tight"] <= 2.0
    assert record["stopped_by"] == "epochs"


def test_the_step_arrives_at_the_ridge_solution() -> None:
    algorithm, model, kind = make((CASE[0], {"noise_multiplier": 0.0}, CASE[2]))
    inputs, targets = examples(200, kind)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.3)
    total = summed(algorithm, (inputs[:90], targets[:90]), (inputs[90:], targets[90:]))
    gradients = algorithm.postprocess(total, 200.0)
    u = inputs / inputs.norm(dim=1, keepdim=True)
    y = torch.nn.functional.one_hot(targets, 3).double() - 1 / 3
    expected = torch.linalg.solve(u.T @ u + 2e-4 * torch.eye(5).double(), u.T @ y).T
    found = {name: p - gradients[name] for name, p in model.named_parameters()}
    torch.testing.assert_close(found["linear.weight"], expected)
    assert not found["linear.bias"].any()


def test_noise_leaves_no_direction_with_less_than_the_penalty() -> None:
    """The largest eigenvalue of the noise is about the one that the penalty is meant for."""
    algorithm = SufficientStatistics(
        Problem(lookup("model", "real_linear")((300,), 3), Classification().loss, ONCE),
        noise_multiplier=5.0,
        ridge=1.0,
    )
    block = algorithm.mechanism().blocks[0]
    noise = draw(block, SeededNoise(2), 0, torch.device("cpu"))
    largest = float(torch.linalg.eigvalsh((noise + noise.T) / 2)[-1])
    assert largest == pytest.approx(block.std * math.sqrt(2 * 300), rel=0.1)
    noisy = {MOMENTS: noise, WITH_TARGETS: torch.ones(300, 3, dtype=torch.float64)}
    weights = -algorithm.postprocess(noisy, 200.0)["linear.weight"]
    assert float(weights.norm()) <= math.sqrt(900) / (block.std * math.sqrt(600))


@pytest.mark.parametrize(
    "words",
    [["trainer.epochs=2"], ["optimizer.lr=0.5"], ["optimizer=adam"], ["scheduler=step_lr"]],
    ids=lambda words: words[0],
)
def test_more_than_the_one_step_that_solves_is_refused(words: list[str]) -> None:
    configured(["recipe=quickstart", *RUN])
    with pytest.raises(UserError, match="has one step"):
        configured(["recipe=quickstart", *RUN, *words])


def test_what_is_no_linear_layer_or_class_is_refused() -> None:
    for model, own in (("real_mlp", {"hidden": [4]}), ("complex_linear", {})):
        problem = Problem(lookup("model", model)((5,), 3, **own), Classification().loss, ONCE)
        with pytest.raises(UserError, match="take model=real_linear"):
            SufficientStatistics(problem, noise_multiplier=1.0)
    algorithm, _, kind = make(CASE)
    with pytest.raises(UserError, match="takes a class for each example"):
        algorithm.contributions((examples(4, kind)[0], torch.randn(4)))
