"""Sums of outer products: the loop's are those of float64, to what float32 keeps of three products in the place of four."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.nn.torchs_convolution import needs_wide_vectors
from zdp_bench.gradients import clipped_sum, reference
from zdp_bench.gradients.clipping import groups
from zdp_bench.gradients.weighing import LARGE
from zdp_bench.kernels import outer_sums
from zdp_bench.kernels.outer_sums import LARGEST, PANEL, RECORDS, TOGETHER, Outer

# Records, outputs, inputs: the least of each, ends of all kinds, the most records.
SIZES = [
    (1, TOGETHER, PANEL),
    (2, 9, 33),
    (5, 21, 70),
    (7, 45, 64),
    (RECORDS, 16, 100),
    (64, 256, 784),
]


def pair(records: int, outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(records + outputs)
    return torch.randn(records, outputs, dtype=torch.complex64), torch.randn(
        records, inputs, dtype=torch.complex64
    )


def exact(g: Tensor, x: Tensor) -> Tensor:
    return torch.einsum("no,ni->oi", g.to(torch.complex128), x.to(torch.complex128).conj())


@needs_wide_vectors
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_equal_float64s_sums(sizes: tuple[int, int, int]) -> None:
    g, x = pair(*sizes)
    product, total = outer_sums._by_loop([Outer(g, x), Outer(g)], outer_sums._loop())
    assert not product.is_conj()  # it is the loop's, and no bar of BLAS's waits
    assert (product - exact(g, x)).norm() <= 4e-7 * exact(g, x).norm()
    torch.testing.assert_close(
        total, g.to(torch.complex128).sum(dim=0).to(g.dtype), rtol=1e-5, atol=1e-5
    )


@needs_wide_vectors
def test_errors_are_at_most_twice_those_of_blas() -> None:
    g, x = pair(64, 256, 784)
    ours, blas = (
        outer_sums._by_loop([Outer(g, x)], outer_sums._loop())[0],
        outer_sums.matrix_sum(g, x),
    )
    assert (ours - exact(g, x)).norm() <= 2 * (blas - exact(g, x)).norm()


@needs_wide_vectors
def test_several_at_once_and_any_number_of_threads_have_the_same_bits(
    set_threads: Callable[[int], None],
) -> None:
    pairs = [pair(*sizes) for sizes in SIZES]
    asked = [outer for g, x in pairs for outer in (Outer(g), Outer(g, x))]
    alone = [outer_sums.outer_sums([Outer(g, x), Outer(g)]) for g, x in pairs]
    for threads in (1, 2, 3):
        set_threads(threads)
        found = outer_sums.outer_sums(asked)
        assert all(
            torch.equal(mine, own) for (mine, _), own in zip(alone, found[1::2], strict=True)
        )
        assert all(torch.equal(mine, own) for (_, mine), own in zip(alone, found[::2], strict=True))


@pytest.mark.parametrize(
    ("records", "outputs", "inputs", "dtype"),
    [
        (RECORDS + 1, 16, 64, torch.complex64),
        (3, TOGETHER - 1, 64, torch.complex64),
        (3, 16, PANEL - 1, torch.complex64),
        (1, LARGEST // 64 + 1, 64, torch.complex64),
        (3, 16, 64, torch.complex128),
        (3, 16, 64, torch.float32),
    ],
)
def test_others_are_torchs(records: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    g, x = torch.randn(records, outputs, dtype=dtype), torch.randn(records, inputs, dtype=dtype)
    assert not outer_sums._served(g, x)
    product, total, again = outer_sums.outer_sums([Outer(g, x), Outer(g), Outer(g[:0], x[:0])])
    assert (product - exact(g, x)).norm() <= 1e-5 * exact(g, x).norm()
    torch.testing.assert_close(total, g.sum(dim=0))
    assert not again.any()


@pytest.mark.parametrize(
    "layout", [lambda x: x.conj(), lambda x: x.mT.contiguous().mT, lambda x: x[:, ::2]]
)
def test_inputs_in_any_layout(layout: Callable[[Tensor], Tensor]) -> None:
    g, x = pair(6, 16, 128)
    x = layout(x)
    assert not outer_sums._served(g, x)
    found = outer_sums.outer_sums([Outer(g, x)])[0].resolve_conj()
    torch.testing.assert_close(found, exact(g, x).to(g.dtype), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [1e-30, 1.0, 0.05 * LARGE, 2 * LARGE, 3e38])
def test_a_layers_sum_is_the_references_however_large_its_inputs(size: float) -> None:
    """The sums a ± b that spare a product leave float32 where the product does not: those are left to BLAS."""
    torch.manual_seed(0)
    model = nn.Linear(64, 16, dtype=torch.complex64)
    x = torch.randn(5, 64, dtype=torch.complex64)
    x[2] = torch.complex(torch.full((64,), size), torch.full((64,), 0.9 * size))

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs * targets).real.sum(dim=1)

    batch, bound = (x, 0.1 * torch.randn(5, 16, dtype=torch.complex64)), max(1.0, size / 100)
    found = clipped_sum(model, loss, batch, bound, engine="fast")
    expected, _ = reference.clip(
        reference.per_sample_gradients(model, loss, batch), groups(model, bound, per_layer=False)
    )
    assert math.isfinite(found.norms.max())
    for name, sum_ in found.sums.items():
        exact_sum = expected[name].to(torch.complex128).sum(dim=0)
        assert (sum_ - exact_sum).norm() <= 1e-5 * exact_sum.norm()
