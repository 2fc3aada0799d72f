"""A record whose terms cancel has a gradient of norm 0, and may move the sum no further than any other: as it is COMPUTED.

A norm is measured exactly; a sum is one contraction in float32, in which what cancels leaves rounding errors behind.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.gradients.harness import CASES, Case
from zdp_bench.gradients import fast, reference
from zdp_bench.gradients.clipping import MOST, guarded
from zdp_bench.gradients.rules import convolution, linear
from zdp_bench.nn.convolution import ComplexConv1d, ComplexConv2d

BOUND = 0.5
ROUTES = ("as it comes", "formed", "ghost")


def take(route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the fast engine sum gradients by one route."""
    if route == "ghost":
        for rules in (linear, convolution):
            monkeypatch.setattr(rules, "ghost_is_cheaper", lambda *_: True)
    if route == "formed":
        settle = fast._settle
        monkeypatch.setattr(
            fast, "_settle", lambda of, records, replaced, allowance: settle(of, records, (), 0)
        )


def weighed(outputs: Tensor, weights: Tensor) -> Tensor:
    """Σ w·y of each record: an output's gradient is its weight."""
    rows = outputs.flatten(1)
    rows = rows.real + rows.imag if rows.is_complex() else rows
    return (rows * weights[:, : rows.shape[1]]).sum(dim=1)


def signs(count: int, half: bool) -> Tensor:
    """±1 that add up to 0: by turns, or one half after the other."""
    ones = torch.ones(count)
    ones[count // 2 :] = -1
    return ones if half else torch.where(torch.arange(count) % 2 == 0, 1.0, -1.0)


def moved(
    engine: Any, module: nn.Module, rest: tuple[Tensor, Tensor], hostile: tuple[Tensor, Tensor]
) -> float:
    """How far one record moves the sum, as it is computed, beside others that come first."""
    both = torch.cat([rest[0], hostile[0]]), torch.cat([rest[1], hostile[1]])
    without, with_it = (
        engine.clipped_sum(module, weighed, batch, BOUND).sums for batch in (rest, both)
    )
    squares = [
        (with_it[name].to(torch.complex128) - without[name]).abs().square().sum()
        for name in without
    ]
    return float(torch.stack(squares).sum().sqrt())


def hostile_records(case: Case, scale: float, outputs: int) -> list[tuple[Tensor, Tensor]]:
    """Records of one size whose terms cancel, in the input or in the output gradient."""
    like = case.batch(1, torch.float32)[0]
    made = []
    for half in (False, True):
        flat, steep = (
            torch.full_like(like, 1.0),
            signs(like.numel(), half).to(like.dtype).view_as(like),
        )
        even, odd = torch.ones(1, outputs), signs(outputs, half).view(1, -1)
        for x, w in ((flat, odd), (steep, even), (steep, odd)):
            made += [(x * scale**0.5, w * scale**0.5), (x * scale, w), (x, w * scale)]
    return made


LAYERS = [
    case
    for case in CASES
    if case.kind != "index" and not case.name.startswith(("model ", "activation "))
]


@pytest.mark.parametrize("case", LAYERS, ids=lambda case: case.name)
@pytest.mark.parametrize("route", [*ROUTES, "reference"])
def test_what_cancels_stays_within_the_bound(
    case: Case, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(route, monkeypatch)
    module = case.module(torch.float32)
    engine = reference if route == "reference" else fast
    inputs, _ = case.batch(2, torch.float32)
    with torch.no_grad():
        outputs = module(inputs)[:1].numel()
    rest = inputs, torch.randn(2, outputs, generator=torch.Generator().manual_seed(0))
    large = inputs.numel() > 10_000
    for scale, every in ((1e10, 9),) if large else ((1e3, 7), (1e10, 2), (1e18, 7), (1e30, 5)):
        for record in hostile_records(case, scale, outputs)[::every]:
            assert moved(engine, module, rest, record) <= BOUND * (1 + 1e-3)


CANCELLING = {
    "Linear over 4 positions": (nn.Linear(1, 1, bias=False), (4, 1)),
    "Conv1d of one tap": (nn.Conv1d(1, 1, 1, bias=False), (1, 4)),
    "Conv2d": (nn.Conv2d(2, 3, 3, bias=False), (2, 12, 12)),
    "complex Conv1d": (ComplexConv1d(1, 1, 1, bias=False), (1, 4)),
    "complex Conv2d": (ComplexConv2d(16, 16, 3, bias=False), (16, 10, 10)),
    "complex Linear": (nn.Linear(2, 2, bias=False, dtype=torch.complex64), (8, 2)),
}


@pytest.mark.parametrize("name", CANCELLING)
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("scale", [1e3, 1e6, 1e10, 1e14, 1e20, 1e25, 1e30])
def test_a_record_of_norm_zero_leaves_no_more_than_its_bound(
    name: str, route: str, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by an attack: at A = 1e10 one record moved the sum by 200 bounds, at 1e20 by 2·10¹²."""
    take(route, monkeypatch)
    module, shape = CANCELLING[name]
    torch.manual_seed(3)
    kind = torch.complex64 if next(module.parameters()).is_complex() else torch.float32
    x = torch.randn(1, *shape, dtype=kind)
    outputs = module(x).detach()
    rest = torch.randn(8, *shape, dtype=kind), torch.randn(8, outputs.numel())
    flat = torch.ones_like(x) * torch.randn((), dtype=kind)
    for share in (0.5, 1.0, 0.0):
        hostile = (
            flat * scale**share,
            scale ** (1 - share) * torch.randn(1) * signs(outputs.numel(), half=True).view(1, -1),
        )
        assert moved(fast, module, rest, hostile) <= BOUND * (1 + 1e-3)


@pytest.mark.parametrize("route", ROUTES)
def test_natural_records_lose_next_to_nothing(route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The norms that clip, against those of torch.func."""
    take(route, monkeypatch)
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
        engine.clipped_sum(module, weighed, batch, BOUND).norms for engine in (fast, reference)
    )
    assert float(((ours - exact) / exact).max()) < 1e-3


def test_a_guarded_norm_is_never_below_the_norm_and_bounds_the_mass() -> None:
    squares = torch.tensor([0.0, 1.0, 4.0], dtype=torch.float64)
    for mass in (0.0, 1.0, 1e3, 1e30, 1e60):
        for dtype in (torch.float32, torch.float64):
            lengths = guarded(squares, torch.full((3,), mass, dtype=torch.float64), 9, dtype).sqrt()
            assert (lengths >= squares.sqrt()).all()
            assert (lengths * MOST >= mass * (1 - 1e-12)).all()
            unit = torch.finfo(dtype).eps / 2
            assert (lengths >= (squares.sqrt() + 17.5 * unit * mass) * (1 - 1e-12)).all()
