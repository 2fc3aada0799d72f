"""Norms and clip factors: right in any size, layout and dtype."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from zdp_bench.gradients.clipping import SAFETY, clip_factors
from zdp_bench.gradients.layer_gradient import weigh
from zdp_bench.gradients.norms import all_finite, squared_norms


def exact(rows: Tensor) -> Tensor:
    wide = rows.to(torch.complex128)
    return (wide.real.square() + wide.imag.square()).flatten(1).sum(dim=1)


@pytest.mark.parametrize("length", [1, 7, 1023, 2**15 + 1, 3_000_001])
def test_long_rows_are_not_too_small(length: int) -> None:
    rows = torch.full((2, length), 0.1)
    expected = length * float(rows[0, 0].double()) ** 2
    torch.testing.assert_close(
        squared_norms(rows), torch.full((2,), expected, dtype=torch.float64), rtol=1e-9, atol=0
    )


@pytest.mark.parametrize("value", [1e30, 1e-30, 1e-44])
def test_nothing_overflows_or_is_lost(value: float) -> None:
    rows = torch.full((2, 2000), value)
    torch.testing.assert_close(
        squared_norms(rows), 2000 * rows[:, 0].double().square(), rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64, torch.complex128])
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
    given = given.unsqueeze(1) if given.dim() == 1 else given
    torch.testing.assert_close(squared_norms(given), exact(given), rtol=1e-12, atol=0)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_noticed(value: float) -> None:
    rows = torch.ones(3, 2**15)
    rows[1, -1] = value
    squares = squared_norms(rows)
    assert torch.isfinite(squares).tolist() == [True, False, True]
    assert not all_finite(squares)
    assert all_finite(squares[::2])
    assert all_finite(squares[:0])
    factor = 0.5 * SAFETY / 2**7.5
    assert clip_factors(squares.sqrt(), 0.5).tolist() == pytest.approx([factor, 0, factor])


def test_factors_and_products_too_small_for_float32_are_zero() -> None:
    """See `clipping.flushed` and `held`: rounded upwards they would exceed the bound."""
    norms = torch.tensor([1e45, 1.0, 1e-45, 0.0], dtype=torch.float64)
    factors = clip_factors(norms, 1e-5)
    assert factors.tolist() == pytest.approx([0.0, 1e-5 * SAFETY, 1.0, 1.0], rel=1e-12)
    weighted = weigh(torch.tensor([[1e30, 1.0], [1.0, 1e-38]]), factors[:2])
    assert weighted.flatten().tolist() == pytest.approx([0.0, 0.0, 1e-5 * SAFETY, 0.0], rel=1e-6)
    assert weighted[1, 1] == 0
