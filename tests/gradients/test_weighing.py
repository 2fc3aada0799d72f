"""Norms and clip factors of terms of every kind, and of numbers of every size."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from zdp_bench.gradients.clipping import SAFETY, clip_factors
from zdp_bench.gradients.norms import all_finite
from zdp_bench.gradients.rules import weigh
from zdp_bench.gradients.weighing import Term, clipping


def exact(rows: Tensor) -> Tensor:
    """‖row‖² in float64."""
    return rows.resolve_conj().to(torch.complex128).abs().square().flatten(1).sum(dim=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bound", [1e-30, 1.0, 1e30, math.inf])
def test_norms_are_those_of_all_terms(bound: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    sizes = torch.tensor([0.0, 1e-38, 1e-20, 1.0, 1e19, math.inf, math.nan])
    g = (torch.randn(7, 5).to(dtype) * sizes.view(-1, 1)).to(dtype)
    x, rows = torch.randn(7, 33).to(dtype), torch.randn(7, 2, 3)
    squares = torch.rand(7, dtype=torch.float64)
    terms = [Term((g, x)), Term((g,)), Term((rows,), scale=0.5), Term((), squares, 0.5)]
    found = clipping(terms, bound)
    expected = (exact(g) * (exact(x) + 1) + exact(rows) / 4 + squares / 4).sqrt()
    torch.testing.assert_close(found.norms[:5], expected[:5], rtol=1e-6, atol=0)
    assert not found.norms[5:].isfinite().any()
    torch.testing.assert_close(found.factors, clip_factors(found.norms, bound), rtol=0, atol=0)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_an_example_that_is_not_finite_has_factor_zero(value: float) -> None:
    g = torch.ones(4, 3)
    g[2, 1] = value
    found = clipping([Term((g,))], 1.0)
    assert not all_finite(found.norms)
    factor = SAFETY / 3**0.5
    assert found.factors.tolist() == pytest.approx([factor, factor, 0.0, factor])


def test_factors_too_small_for_float32_and_products_too_small_are_zero() -> None:
    """See `clipping.flushed` and `held`: rounded upwards they would lift an example over its bound."""
    g = torch.tensor([[1e30, 1e-8], [1.0, 1e-38], [1.0, 0.5]])
    found = clipping([Term((g,)), Term((), torch.tensor([1e90, 0.0, 0.0]).double())], 1e-5)
    assert found.factors[0] == 0
    assert (found.factors[1:] > 0).all()
    assert weigh(g, found.factors)[1, 1] == 0


@pytest.mark.parametrize(
    "layout",
    [
        lambda x: x.conj(),
        lambda x: x.mT.contiguous().mT,
        lambda x: x[:, ::2],
        lambda x: x[:1].expand(5, -1),
        lambda x: x[:0],
        lambda x: x[:, :0],
        lambda x: x.conj().imag,
        lambda x: x.view(2, 4, 2, 3).contiguous(memory_format=torch.channels_last),
    ],
)
def test_parts_in_any_layout(layout: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    g = layout(torch.randn(8, 6, dtype=torch.complex64))
    torch.testing.assert_close(clipping([Term((g,))], 1.0).norms, exact(g).sqrt())
