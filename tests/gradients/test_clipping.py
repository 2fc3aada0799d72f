"""Norms and clip factors: right in any size, layout and dtype."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.gradients.harness import LAYERS, Case, loss
from tests.gradients.test_harness import norm, of_cases
from tests.gradients.zoo import model_case
from zdp_bench.config import configured
from zdp_bench.errors import UserError
from zdp_bench.gradients import clipped_sum, clipping, fast, reference
from zdp_bench.gradients.clipping import (
    MAX_CANCELLATION,
    SAFETY,
    clip_factors,
    cover_rounding,
    groups,
    squared_norms,
)
from zdp_bench.gradients.layer_gradient import (
    LayerGradient,
    ParameterGradient,
    add_calls,
    apply_factors,
    bound_summands,
    gram_norms,
    summands_of,
    transform,
)
from zdp_bench.gradients.rules import convolution, linear


def exact(rows: Tensor) -> Tensor:
    wide = rows.to(torch.complex128)
    squares = wide.real.square() + wide.imag.square()
    return squares.unsqueeze(1).flatten(1).sum(dim=1)


@pytest.mark.parametrize("length", [1, 1023, 3_000_001])
def test_long_rows_are_not_too_small(length: int) -> None:
    rows = torch.full((2, length), 0.1)
    expected = length * rows[:, 0].double().square()
    torch.testing.assert_close(squared_norms(rows), expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("value", [1e30, 1e-30, 1e-44])
def test_nothing_overflows_or_is_lost(value: float) -> None:
    rows = torch.full((2, 2000), value)
    expected = 2000 * rows[:, 0].double().square()
    torch.testing.assert_close(squared_norms(rows), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128])
@pytest.mark.parametrize(
    "rows",
    [
        lambda x: x,
        lambda x: x[::2],
        lambda x: x[:, :, 1:],
        lambda x: x.transpose(1, 3),
        lambda x: x.permute(3, 0, 1, 2),
        lambda x: x.flatten(1)[:, ::3],
        lambda x: x.flatten(1).T,
        lambda x: x[:1].expand(4, -1, -1, -1),
        lambda x: x.conj(),
        lambda x: x[:0],
        lambda x: x[:, :0],
        lambda x: x.flatten(),
    ],
)
def test_rows_in_any_layout(rows: object, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    given = rows(torch.randn(6, 5, 4, 7, dtype=dtype))  # type: ignore[operator]
    torch.testing.assert_close(squared_norms(given), exact(given), rtol=1e-12, atol=0)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_noticed(value: float) -> None:
    rows = torch.ones(3, 2**15)
    rows[1, -1] = value
    squares = squared_norms(rows)
    assert torch.isfinite(squares).tolist() == [True, False, True]
    assert not clipping.all_finite(squares)
    assert clipping.all_finite(squares[::2])
    assert not clipping.all_finite(squares[1:2])
    assert clipping.all_finite(squares[:0])
    factor = 0.5 * SAFETY / 2**7.5
    assert clip_factors(squares.sqrt(), 0.5).tolist() == pytest.approx([factor, 0, factor])


def test_what_is_not_finite_goes_to_the_innermost_flag_until_it_is_left() -> None:
    broken = torch.tensor([1.0, math.nan])
    outer, inner = torch.tensor(True), torch.tensor(True)
    with clipping.defer_finite(outer):
        with clipping.defer_finite(inner):
            assert clipping.all_finite(broken)
        assert (bool(outer), bool(inner)) == (True, False)
        assert clipping.all_finite(broken)
    assert not outer
    assert not clipping.all_finite(broken)


def test_norms_record_no_graph_on_any_thread(set_threads: Callable[[int], None]) -> None:
    set_threads(2)
    with torch.no_grad():
        assert not squared_norms(torch.ones(64, 3000, requires_grad=True)).requires_grad


def test_factors_and_products_too_small_for_float32_are_zero() -> None:
    """Rounded up, they would exceed the bound: see `flush_subnormals` and `flush_factors`."""
    norms = torch.tensor([1e45, 1.0, 1e-45, 0.0], dtype=torch.float64)
    factors = clip_factors(norms, 1e-5)
    assert factors.tolist() == pytest.approx([0.0, 1e-5 * SAFETY, 1.0, 1.0], rel=1e-12)
    weighted = apply_factors(torch.tensor([[1e30, 1.0], [1.0, 1e-38]]), factors[:2])
    assert weighted.flatten().tolist() == pytest.approx([0.0, 0.0, 1e-5 * SAFETY, 0.0], rel=1e-6)
    assert weighted[1, 1] == 0


BOUND, GAMMA = 0.5, 0.01
STYLES: list[dict[str, Any]] = [{}, {"per_layer": True}, {"gamma": GAMMA}]
STYLES += [{"per_layer": True, "gamma": GAMMA}]


@pytest.mark.parametrize("style", STYLES, ids=str)
@pytest.mark.parametrize("engine", ["fast", "reference"])
@pytest.mark.parametrize("name", ["real_cnn", "complex_cnn"])
def test_no_example_adds_more_than_the_bound(name: str, engine: Any, style: dict[str, Any]) -> None:
    """Losses from 10⁻²⁵ to 10²⁵ times as large, and one that is not finite: with and without an
    example, the sums are at most C apart."""
    case = model_case(name)
    model, (inputs, targets) = case.module(torch.float32), case.batch(5, torch.float32)
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


@pytest.mark.parametrize("gamma", ["0.0", "1e13"])
def test_other_gammas_are_refused(gamma: str) -> None:
    with pytest.raises(UserError, match=r"algorithm\.gamma=.*must be "):
        configured(["recipe=quickstart", f"algorithm.gamma={gamma}"])


@pytest.fixture(params=["formed", "ghost"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the fast engine takes norms: `ParameterGradient.measure`."""
    measure = ParameterGradient.measure
    if request.param == "ghost":
        for rules in (linear, convolution):
            monkeypatch.setattr(rules, "ghost_is_cheaper", lambda *_: True)
    else:
        formed = lambda of, examples, *_: measure(of, examples, 0, 0)  # noqa: E731
        monkeypatch.setattr(ParameterGradient, "measure", formed)
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


ARITHMETIC = [case for case in LAYERS if case.kind != "index"]


def assert_bounded(case: Case, engine: Any) -> None:
    """No example moves the computed sum of others that come first by more than the bound."""
    module = case.module(torch.float32)
    inputs, _ = case.batch(2, torch.float32)
    with torch.no_grad():
        outputs = module(inputs)[:1].numel()
    others = inputs, torch.randn(2, outputs, generator=torch.Generator().manual_seed(0))
    without = engine.clipped_sum(module, weighted_outputs, others, BOUND).sums
    large = inputs.numel() > 10_000
    for scale, every in ((1e10, 9),) if large else ((1e3, 7), (1e10, 2), (1e18, 7), (1e30, 5)):
        for hostile in hostile_examples(case, scale, outputs)[::every]:
            both = torch.cat([others[0], hostile[0]]), torch.cat([others[1], hostile[1]])
            with_it = engine.clipped_sum(module, weighted_outputs, both, BOUND).sums
            moved = {name: with_it[name].to(torch.complex128) - without[name] for name in without}
            assert norm(moved) <= BOUND * (1 + 1e-3)


@of_cases(ARITHMETIC)
def test_what_cancels_stays_within_the_bound(case: Case) -> None:
    assert_bounded(case, fast)


@of_cases(ARITHMETIC[::6])
def test_what_cancels_stays_within_the_bound_however_norms_are_taken(case: Case, way: str) -> None:
    assert_bounded(case, fast)


@of_cases(ARITHMETIC[3::6])
def test_what_cancels_stays_within_the_bound_of_the_reference(case: Case) -> None:
    assert_bounded(case, reference)


def test_natural_examples_lose_next_to_nothing(way: str) -> None:
    """The norms that clip, against those of torch.func."""
    torch.manual_seed(0)
    convolutions = nn.Conv2d(1, 6, 5), nn.ReLU(), nn.Conv2d(6, 16, 5), nn.ReLU()
    module = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(16 * 20 * 20, 10))
    batch = torch.rand(6, 1, 28, 28), torch.randn(6, 10)
    ours, exact = (
        engine.clipped_sum(module, weighted_outputs, batch, BOUND).norms
        for engine in (fast, reference)
    )
    assert float(((ours - exact) / exact).max()) < 1e-3


def test_the_mass_of_an_embeddings_summands_is_that_of_as_many_equal_ones() -> None:
    index, g = torch.randint(0, 7, (2, 5)), torch.tensor([3.0, 4.0]).expand(2, 5, 2)
    mass, number = summands_of(linear.embedding(nn.Embedding(7, 2), index, g)["weight"])
    assert (number, mass.tolist()) == (5, pytest.approx([25.0, 25.0]))


def test_summands_are_those_of_all_calls_times_the_gain_of_a_map() -> None:
    """A gradient that is there is one term. Products at T positions are bounded by ‖g‖‖x‖√uses."""
    g = torch.tensor([3.0, 4.0]).expand(2, 2)
    call = LayerGradient.from_gradients(g)
    for each, length, terms in (
        (call, 5.0, 1),
        (add_calls([call, call]), 10.0, 2),
        (transform(call, lambda value: 3 * value, 3.0, 4), 15.0, 5),
    ):
        mass, number = summands_of(each)
        assert (number, mass.tolist()) == (terms, pytest.approx([length, length]))
    for uses, length in (({}, 25.0), ({"uses": 9}, 75.0)):
        mass, number = bound_summands(g, g, 7, **uses)
        assert (number, mass.tolist()) == (7, pytest.approx([length, length]))


def test_the_squared_norm_of_terms_that_cancel_is_never_below_0() -> None:
    """It is a sum of products, whose rounding has either sign, and the root of less is NaN."""
    g = torch.randn(50, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    g[:, 2] = -(g[:, 0] + g[:, 1])
    squares = gram_norms(g, torch.ones(50, 3, 2, dtype=torch.float64))
    assert float(squares.min()) == 0
    assert float(squares.max()) < 1e-12


def test_an_enlarged_norm_is_never_below_the_norm_and_bounds_the_mass() -> None:
    squares = torch.tensor([0.0, 1.0, 4.0], dtype=torch.float64)
    unity = torch.ones(1, dtype=torch.float64)
    assert float(cover_rounding(0 * unity, unity, 9, torch.float32).sqrt()) == 1 / 4096
    long = float(cover_rounding(unity, unity, 100, torch.float32).sqrt())
    assert (long - 1) * 2**24 == pytest.approx(16 + 5)
    for mass in (0.0, 1.0, 1e3, 1e30, 1e60):
        for dtype in (torch.float32, torch.float64):
            lengths = cover_rounding(
                squares, torch.full((3,), mass, dtype=torch.float64), 9, dtype
            ).sqrt()
            assert (lengths >= squares.sqrt()).all()
            assert (lengths * MAX_CANCELLATION >= mass * (1 - 1e-12)).all()
            unit = torch.finfo(dtype).eps / 2
            assert (lengths >= (squares.sqrt() + 17.5 * unit * mass) * (1 - 1e-12)).all()


def test_the_margin_of_clipping_is_a_hundred_thousandth() -> None:
    factors = clip_factors(torch.tensor([2.0], dtype=torch.float64), 1.0)
    assert (SAFETY, float(factors)) == pytest.approx((0.99999, 0.499995), rel=1e-12)


def test_weight_and_bias_of_a_layer_are_clipped_together() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1, bias=False))
    (first, bound), (second, _) = groups(model, 1.0, per_layer=True)
    assert (first, second) == (["0.weight", "0.bias"], ["1.weight"])
    assert bound == pytest.approx(0.5**0.5)
