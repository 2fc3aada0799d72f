"""Norms and clip factors: the compiled loop does what torch does, whatever it is given."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from zdp_bench.gradients.clipping import SAFETY, clip_factors
from zdp_bench.gradients.layer_gradient import weigh
from zdp_bench.gradients.weighing import A_SHARE, Term, _by_torch, clipping

HOSTILE = [0.0, 1e-44, 1e-38, 1e-20, 1.0, 1e19, 3e38, math.inf, -math.inf, math.nan]


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("bound", [1e-30, 1.0, 1e30, math.inf])
def test_norms_and_factors_are_torchs(bound: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    sizes = torch.tensor(HOSTILE)
    g, x, rows = (
        torch.randn(10, 7, dtype=dtype),
        torch.randn(10, 33, dtype=dtype),
        torch.randn(10, 2, 3),
    )
    g, squares = g * sizes.view(-1, 1), torch.rand(10, dtype=torch.float64)
    terms = [
        Term((g, x)),
        Term((g,)),
        Term((rows,), scale=0.5),
        Term((), squares, 0.5),
    ]
    found, expected = clipping(terms, bound), _by_torch(terms, bound)
    same(found.norms, expected.norms)
    same(found.factors, expected.factors)
    assert not found.finite
    by_hand = (g.abs().double().square().sum(1) * (x.abs().double().square().sum(1) + 1)).add(
        rows.double().square().sum((1, 2)) / 4 + squares / 4
    )
    torch.testing.assert_close(
        found.norms[3:6], by_hand.sqrt()[3:6], rtol=1e-6, atol=0
    )  # and torch's own are the formula's


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_broken_record_has_factor_zero_and_is_told(value: float) -> None:
    g = torch.ones(4, 3)
    g[2, 1] = value
    found = clipping([Term((g,))], 1.0)
    assert not found.finite
    assert found.factors.tolist() == pytest.approx(
        [SAFETY / 3**0.5] * 2 + [0.0] + [SAFETY / 3**0.5]
    )
    assert clipping([Term((g[:2],))], 1.0).finite


def test_factors_too_small_for_float32_and_products_too_small_are_zero() -> None:
    """See `clipping.flushed` and `held`: rounded upwards they would lift a record over its bound."""
    g = torch.tensor([[1e30, 1e-8], [1.0, 1e-38], [1.0, 0.5]])
    found = clipping([Term((g,)), Term((), torch.tensor([1e90, 0.0, 0.0]).double())], 1e-5)
    assert found.factors[0] == 0
    assert (found.factors[1:] > 0).all()
    weighed = weigh(g, found.factors)
    assert weighed[1].tolist() == pytest.approx([1e-5 * SAFETY, 0.0], rel=1e-6)
    assert weighed[1, 1] == 0
    same(found.factors, clip_factors(found.norms, 1e-5))


@pytest.mark.parametrize(
    "layout",
    [
        lambda x: x,
        lambda x: x.conj(),
        lambda x: x.mT.contiguous().mT,
        lambda x: x[:, ::2],
        lambda x: x[::3],
        lambda x: x[:1].expand(5, -1),
        lambda x: x[:0],
        lambda x: x[:, :0],
        lambda x: x.imag,
        lambda x: x.conj().imag,  # a sign that waits
    ],
)
def test_parts_in_any_layout(layout: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    g = layout(torch.randn(8, 6, dtype=torch.complex64))
    found, expected = clipping([Term((g,))], 1.0), _by_torch([Term((g,))], 1.0)
    same(found.norms, expected.norms)
    same(found.factors, expected.factors)
    assert found.finite


def test_rows_that_lie_otherwise_in_memory_are_measured_too() -> None:
    maps = torch.randn(5, 3, 4, 6).to(memory_format=torch.channels_last)
    same(clipping([Term((maps,))], 1.0).norms, maps.double().flatten(1).norm(dim=1))


@pytest.mark.parametrize("records", [1, 2, 400])
@pytest.mark.parametrize("threads", [2, 3])
def test_any_number_of_threads_finds_the_same(
    threads: int, records: int, set_threads: Callable[[int], None]
) -> None:
    torch.manual_seed(0)
    parts = [torch.randn(records, n) for n in (10, 3 * A_SHARE, *range(1, 21))]
    terms = [Term((part,)) for part in parts]
    alone = clipping(terms, 1.0)
    set_threads(threads)
    shared = clipping(terms, 1.0)
    assert torch.equal(alone.norms, shared.norms)
    assert torch.equal(alone.factors, shared.factors)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128, torch.bfloat16])
def test_other_precisions_are_torchs(dtype: torch.dtype) -> None:
    g, x = torch.randn(5, 3).to(dtype), torch.randn(5, 4)
    found = clipping([Term((g, x))], 1.0)
    assert found.finite
    expected = g.to(torch.complex128).abs().norm(dim=1) * x.double().norm(dim=1)
    torch.testing.assert_close(found.norms, expected, rtol=1e-6, atol=0)
    same(found.factors, clip_factors(found.norms, 1.0))
