"""Shares of several examples: clipped as one gradient, that of their mean loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.gradients.harness import CASES, LAYERS, Case, loss
from tests.gradients.test_clipping import signs, way, weighted_outputs
from tests.gradients.test_harness import TOLERANCE, assert_same, norm
from tests.gradients.zoo import MODELS
from zdp_bench.gradients import ClippedSum, fast, reference
from zdp_bench.gradients.clipping import SAFETY, groups, trainable

__all__ = ["way"]
SHARES = (3, 1, 2)
ENGINES = pytest.mark.parametrize("engine", [fast, reference], ids=["fast", "reference"])
of_way = pytest.mark.usefixtures("way")


def gradients_by_autograd(
    module: nn.Module, batch: tuple[Tensor, Tensor]
) -> list[dict[str, Tensor]]:
    """One plain backward pass for each share's mean loss; complex parts halved."""
    parameters, gradients = trainable(module), []
    for inputs, targets in zip(batch[0].split(SHARES), batch[1].split(SHARES), strict=True):
        mean = loss(module(inputs), targets).mean()
        gradients_of_mean = torch.autograd.grad(
            mean, list(parameters.values()), allow_unused=True, materialize_grads=True
        )
        halved = (g / 2 if g.is_complex() else g for g in gradients_of_mean)
        gradients.append(dict(zip(parameters, halved, strict=True)))
    return gradients


def clip_each(
    module: nn.Module,
    gradients: list[dict[str, Tensor]],
    bound: float,
    per_layer: bool = False,
    gamma: float | None = None,
) -> ClippedSum:
    sums = {name: torch.zeros_like(g) for name, g in gradients[0].items()}
    together, norms = groups(module, bound * SAFETY, per_layer), []
    for each in gradients:
        for names, limit in together:
            norms.append(norm({name: each[name] for name in names}))
            factor = min(1.0, limit / norms[-1]) if gamma is None else limit / (norms[-1] + gamma)
            for name in names:
                sums[name] += each[name] * factor
    every = torch.tensor(norms, dtype=torch.float64).view(len(gradients), len(together))
    return ClippedSum(sums, every if per_layer else every[:, 0])


def check_against_autograd(case: Case) -> None:
    module, batch = case.module(torch.float64), case.batch(sum(SHARES), torch.float64)
    gradients = gradients_by_autograd(module, batch)
    bound = float(clip_each(module, gradients, 1e30).norms.median())
    right = clip_each(module, gradients, bound)
    ours = fast.clipped_sum(module, loss, batch, bound, complex_scale=0.5, shares=SHARES)
    assert_same(ours, right, TOLERANCE[torch.float64])


@pytest.mark.parametrize("case", [*CASES, *MODELS], ids=lambda case: case.name)
def test_a_share_is_the_gradient_of_its_mean_loss(case: Case) -> None:
    check_against_autograd(case)


@of_way
@pytest.mark.parametrize("case", LAYERS[::3], ids=lambda case: case.name)
def test_however_norms_are_taken(case: Case) -> None:
    check_against_autograd(case)


@ENGINES
@pytest.mark.parametrize("case", LAYERS[::7], ids=lambda case: case.name)
@pytest.mark.parametrize(("per_layer", "gamma"), [(True, None), (False, 0.01), (True, 0.01)])
def test_every_way_of_clipping(
    engine: Any, case: Case, per_layer: bool, gamma: float | None
) -> None:
    module, batch = case.module(torch.float64), case.batch(sum(SHARES), torch.float64)
    how = {"per_layer": per_layer, "gamma": gamma}
    right = clip_each(module, gradients_by_autograd(module, batch), 0.1, **how)
    ours = engine.clipped_sum(module, loss, batch, 0.1, complex_scale=0.5, shares=SHARES, **how)
    assert_same(ours, right, 1e-10)


@ENGINES
def test_chunks_and_parts_add_up(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = LAYERS[0]
    module, (inputs, targets) = case.module(torch.float64), case.batch(6, torch.float64)
    whole = engine.clipped_sum(module, loss, (inputs, targets), 0.1, shares=SHARES)
    monkeypatch.setattr(reference, "CHUNK_BYTES", 1)  # one example at a time
    into: dict[str, Tensor] = {}
    for own, shares in ((slice(0, 3), (3,)), (slice(3, 3), ()), (slice(3, 6), (1, 2))):
        batch = inputs[own], targets[own]
        part = engine.clipped_sum(module, loss, batch, 0.1, shares=shares, into=into)
        assert len(part.norms) == len(shares)
    assert_same(ClippedSum(into, whole.norms), whole, 1e-12)


@ENGINES
def test_a_share_with_a_broken_example_contributes_nothing(engine: Any) -> None:
    module, (inputs, targets) = LAYERS[0].module(torch.float64), LAYERS[0].batch(6, torch.float64)
    broken = inputs.clone()
    broken[1] = torch.nan
    ours = engine.clipped_sum(module, loss, (broken, targets), 0.1, shares=SHARES)
    rest = engine.clipped_sum(module, loss, (inputs[3:], targets[3:]), 0.1, shares=SHARES[1:])
    assert not ours.norms[0].isfinite()
    assert_same(ClippedSum(ours.sums, ours.norms[1:]), rest, 1e-12)


@of_way
@ENGINES
@pytest.mark.parametrize("case", LAYERS[::6], ids=lambda case: case.name)
def test_a_share_moves_the_sum_by_the_bound_at_most(engine: Any, case: Case) -> None:
    module = case.module(torch.float32)
    inputs, targets = case.batch(6, torch.float32)
    for scale in (1.0, 1e3):
        x = inputs if case.kind == "index" else inputs * scale
        with_it, without = (
            engine.clipped_sum(module, loss, batch, 0.5, shares=shares).sums
            for batch, shares in (((x, targets), SHARES), ((x[3:], targets[3:]), SHARES[1:]))
        )
        moved = {name: with_it[name] - without[name] for name in without}
        assert norm(moved) <= 0.5 * (1 + 1e-5)


@of_way
@pytest.mark.parametrize("scale", [1.0, 1e8])
def test_examples_of_a_share_that_cancel_stay_within_the_bound(scale: float) -> None:
    """Their mean is 0, and what is summed up is not."""
    torch.manual_seed(0)
    module = nn.Linear(40, 30)
    x = torch.randn(1, 40).expand(8, 40) * scale
    w = signs(8, half=True).unsqueeze(1) * torch.randn(1, 30) * scale
    clipped = fast.clipped_sum(module, weighted_outputs, (x, w), 0.5, gamma=None, shares=(8,))
    assert norm(clipped.sums) <= 0.5


@of_way
def test_numbers_too_small_to_hold_stay_within_the_bound() -> None:
    """Output gradients of 1e-39 with inputs of 1e38: a factor above 1 must not wake them."""
    module = nn.Linear(4, 3)
    x, w = torch.full((3, 4), 1e38), torch.full((3, 3), 1e-39)
    clipped = fast.clipped_sum(module, weighted_outputs, (x, w), 1.0, gamma=1e-4, shares=(3,))
    assert norm(clipped.sums) <= 1.0


class Conjugated(nn.Module):
    """A layer whose output gradient is lazily conjugated."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3, dtype=torch.complex64)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).conj() + 1


def test_shares_of_lazily_conjugated_gradients() -> None:
    torch.manual_seed(0)
    model = Conjugated()
    batch = torch.randn(5, 4, dtype=torch.complex64), torch.randn(5)
    clipped, expected = (
        engine.clipped_sum(model, loss, batch, 0.5, shares=(2, 3)).sums
        for engine in (fast, reference)
    )
    torch.testing.assert_close(clipped, expected)
