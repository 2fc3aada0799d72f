"""An example whose terms cancel has norm 0, yet moves the sum no further than any other.

A norm is measured exactly. A sum is one contraction in float32, in which what cancels leaves
rounding errors behind: they count, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.gradients.harness import LAYERS, Case
from zdp_bench.gradients import fast, reference
from zdp_bench.gradients.clipping import MOST, Batch, guarded
from zdp_bench.gradients.parameter_gradient import ParameterGradient
from zdp_bench.gradients.rules import convolution, linear
from zdp_bench.nn.convolution import ComplexConv1d, ComplexConv2d

BOUND = 0.5


@pytest.fixture(params=["as it comes", "formed", "ghost"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the fast engine takes norms: `ParameterGradient.measure`."""
    if request.param == "ghost":
        for rules in (linear, convolution):
            monkeypatch.setattr(rules, "ghost_is_cheaper", lambda *_: True)
    if request.param == "formed":
        measure = ParameterGradient.measure
        monkeypatch.setattr(
            ParameterGradient, "measure", lambda of, examples, *_: measure(of, examples, 0, 0)
        )
    return request.param


def weighted_outputs(outputs: Tensor, weights: Tensor) -> Tensor:
    """Σ w·y of each example: the gradient of an output is its weight."""
    flat = outputs.flatten(1)
    flat = flat.real + flat.imag if flat.is_complex() else flat
    return (flat * weights[:, : flat.shape[1]]).sum(dim=1)


def signs(count: int, half: bool) -> Tensor:
    """±1 that add up to 0: by turns, or one half after the other."""
    ones = torch.ones(count)
    ones[count // 2 :] = -1
    return ones if half else torch.where(torch.arange(count) % 2 == 0, 1.0, -1.0)


def distance_moved(
    engine: Any, module: nn.Module, others: Batch
) -> Callable[[tuple[Tensor, Tensor]], float]:
    """Return a function: how far an example moves the computed sum of others that come first."""
    without = engine.clipped_sum(module, weighted_outputs, others, BOUND).sums

    def distance(hostile: tuple[Tensor, Tensor]) -> float:
        both = torch.cat([others[0], hostile[0]]), torch.cat([others[1], hostile[1]])
        with_it = engine.clipped_sum(module, weighted_outputs, both, BOUND).sums
        moved = [with_it[name].to(torch.complex128) - without[name] for name in without]
        return float(sum(each.abs().square().sum() for each in moved) ** 0.5)

    return distance


def hostile_examples(case: Case, scale: float, outputs: int) -> list[tuple[Tensor, Tensor]]:
    """Examples of one size whose terms cancel, in the input or in the output gradient."""
    like = case.batch(1, torch.float32)[0]
    made = []
    for half in (False, True):
        flat = torch.full_like(like, 1.0)
        steep = signs(like.numel(), half).to(like.dtype).view_as(like)
        even, odd = torch.ones(1, outputs), signs(outputs, half).view(1, -1)
        for x, w in ((flat, odd), (steep, even), (steep, odd)):
            made += [(x * scale**0.5, w * scale**0.5), (x * scale, w), (x, w * scale)]
    return made


every_layer = pytest.mark.parametrize(
    "case", [case for case in LAYERS if case.kind != "index"], ids=lambda case: case.name
)


def assert_bounded(case: Case, engine: Any) -> None:
    module = case.module(torch.float32)
    inputs, _ = case.batch(2, torch.float32)
    with torch.no_grad():
        outputs = module(inputs)[:1].numel()
    others = inputs, torch.randn(2, outputs, generator=torch.Generator().manual_seed(0))
    distance = distance_moved(engine, module, others)
    large = inputs.numel() > 10_000
    for scale, every in ((1e10, 9),) if large else ((1e3, 7), (1e10, 2), (1e18, 7), (1e30, 5)):
        for example in hostile_examples(case, scale, outputs)[::every]:
            assert distance(example) <= BOUND * (1 + 1e-3)


@every_layer
def test_what_cancels_stays_within_the_bound(case: Case, way: str) -> None:
    assert_bounded(case, fast)


@every_layer
def test_what_cancels_stays_within_the_bound_of_the_reference(case: Case) -> None:
    assert_bounded(case, reference)


CANCELLING = {
    "Linear over 4 positions": (nn.Linear(1, 1, bias=False), (4, 1)),
    "Conv1d of one tap": (nn.Conv1d(1, 1, 1, bias=False), (1, 4)),
    "Conv2d": (nn.Conv2d(2, 3, 3, bias=False), (2, 12, 12)),
    "complex Conv1d": (ComplexConv1d(1, 1, 1, bias=False), (1, 4)),
    "complex Conv2d": (ComplexConv2d(16, 16, 3, bias=False), (16, 10, 10)),
    "complex Linear": (nn.Linear(2, 2, bias=False, dtype=torch.complex64), (8, 2)),
}


@pytest.mark.parametrize("name", CANCELLING)
def test_an_example_of_norm_zero_leaves_no_more_than_its_bound(name: str, way: str) -> None:
    """Found by an attack: at 1e10 one example moved the sum by 200 bounds, at 1e20 by 2·10¹²."""
    module, shape = CANCELLING[name]
    torch.manual_seed(3)
    dtype = torch.complex64 if next(module.parameters()).is_complex() else torch.float32
    x = torch.randn(1, *shape, dtype=dtype)
    outputs = module(x).numel()
    others = torch.randn(8, *shape, dtype=dtype), torch.randn(8, outputs)
    distance = distance_moved(fast, module, others)
    flat = torch.ones_like(x) * torch.randn((), dtype=dtype)
    weights = torch.randn(1) * signs(outputs, half=True).view(1, -1)
    for scale in (1e3, 1e6, 1e10, 1e14, 1e20, 1e25, 1e30):
        for in_input in (0.5, 1.0, 0.0):
            hostile = flat * scale**in_input, weights * scale ** (1 - in_input)
            assert distance(hostile) <= BOUND * (1 + 1e-3)


def test_natural_examples_lose_next_to_nothing(way: str) -> None:
    """The norms that clip, against those of torch.func."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(1, 6, 5),
        nn.ReLU(),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 20 * 20, 10),
    )
    batch = torch.rand(6, 1, 28, 28), torch.randn(6, 10)
    ours, exact = (
        engine.clipped_sum(module, weighted_outputs, batch, BOUND).norms
        for engine in (fast, reference)
    )
    assert float(((ours - exact) / exact).max()) < 1e-3


def test_a_guarded_norm_is_never_below_the_norm_and_bounds_the_mass() -> None:
    squares = torch.tensor([0.0, 1.0, 4.0], dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    assert float(guarded(0 * one, one, 9, torch.float32).sqrt()) == 1 / 4096
    long = float(guarded(one, one, 100, torch.float32).sqrt())
    assert (long - 1) * 2**24 == pytest.approx(16 + 5)
    for mass in (0.0, 1.0, 1e3, 1e30, 1e60):
        for dtype in (torch.float32, torch.float64):
            lengths = guarded(squares, torch.full((3,), mass, dtype=torch.float64), 9, dtype).sqrt()
            assert (lengths >= squares.sqrt()).all()
            assert (lengths * MOST >= mass * (1 - 1e-12)).all()
            unit = torch.finfo(dtype).eps / 2
            assert (lengths >= (squares.sqrt() + 17.5 * unit * mass) * (1 - 1e-12)).all()
