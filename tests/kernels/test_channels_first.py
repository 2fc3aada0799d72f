"""Per-sample gradients of real convolutions by a loop of our own: torch's own, record by record, and no record sees another."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from zdp_bench.kernels import channels_first

pytestmark = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512",
    reason="the loop is for processors with AVX-512",
)
# Weight [O, C, *k], padding, dilation, size of maps: outputs and entries that tiles do not divide, rows shorter than a vector and
# longer, taps far apart, one dimension and two.
SHAPES = [
    ((4, 5, 1, 1), (0, 0), (1, 1), (3, 3)),
    ((6, 1, 5, 5), (2, 2), (1, 1), (28, 28)),
    ((7, 3, 3, 3), (0, 0), (1, 1), (32, 35)),
    ((9, 2, 3, 2), (1, 4), (2, 3), (9, 11)),
    ((5, 17, 3, 3), (1, 1), (1, 1), (4, 1)),
    ((4, 3, 7), (3,), (1,), (50,)),
    ((16, 1, 80), (0,), (2,), (300,)),
]


def _problem(weight: tuple[int, ...], padding, dilation, size) -> tuple[Tensor, Tensor, tuple]:
    """Input, output gradient, and the numbers the loop is called with."""
    torch.manual_seed(sum(weight))
    x = torch.randn(5, weight[1], *size)
    convolution = F.conv2d if len(size) == 2 else F.conv1d
    g = torch.randn_like(convolution(x, torch.randn(weight), None, 1, padding, dilation))
    return x, g, (weight[2:], padding, dilation)


def _expected(x: Tensor, g: Tensor, weight: tuple[int, ...], padding, dilation) -> Tensor:
    of = torch.nn.grad.conv2d_weight if x.dim() == 4 else torch.nn.grad.conv1d_weight
    pairs = zip(x.double().split(1), g.double().split(1), strict=True)
    return torch.stack([of(one, weight, its, 1, padding, dilation) for one, its in pairs])


@pytest.mark.parametrize("numbers", SHAPES, ids=str)
def test_equal_torchs_gradients_of_every_record(numbers) -> None:
    weight, padding, dilation, size = numbers
    x, g, given = _problem(weight, padding, dilation, size)
    assert channels_first.serve(x, g, weight[2:], (1,) * len(size))
    of_weight, of_bias = channels_first.gradient_rows(x, g, *given)
    expected = _expected(x, g, weight, padding, dilation)
    assert of_weight.shape == expected.shape
    assert (of_weight - expected).norm() <= 1e-6 * expected.norm()
    torch.testing.assert_close(of_bias, g.flatten(2).sum(dim=2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spoilt", [float("nan"), float("inf")])
def test_no_record_sees_another(spoilt: float) -> None:
    x, g, given = _problem(*SHAPES[2])
    clean = channels_first.gradient_rows(x, g, *given)
    x[1], g[1], x[4, :, -1, -1] = spoilt, spoilt, spoilt
    found = channels_first.gradient_rows(x, g, *given)
    for before, after in zip(clean, found, strict=True):
        assert torch.equal(before[[0, 2, 3]], after[[0, 2, 3]])
        assert not after[1].isfinite().any()
    assert not found[0][4].isfinite().all()


def test_any_number_of_threads_gives_the_same_bits(set_threads: Callable[[int], None]) -> None:
    x, g, given = _problem(*SHAPES[1])
    found = []
    for threads in (1, 2, 3):
        set_threads(threads)
        found.append(channels_first.gradient_rows(x, g, *given))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_other_maps_are_not_its() -> None:
    x, g = torch.randn(2, 3, 8, 8), torch.randn(2, 4, 6, 6)
    assert channels_first.serve(x, g, (3, 3), (1, 1))
    assert not channels_first.serve(x, g, (3, 3), (1, 2))
    assert not channels_first.serve(x.double(), g.double(), (3, 3), (1, 1))
    assert not channels_first.serve(
        x.contiguous(memory_format=torch.channels_last), g, (3, 3), (1, 1)
    )
    assert not channels_first.serve(x, g[:, :3].contiguous(), (3, 3), (1, 1))
    assert not channels_first.serve(
        x[:, :1].contiguous(), g, (2, 2), (1, 1)
    )  # fewer entries than a tile's
    assert not channels_first.serve(torch.randn(2, 32, 8, 8), g, (3, 3), (1, 1))  # more than pay
    assert not channels_first.serve(
        torch.randn(2, 3, 96, 96), g, (3, 3), (1, 1)
    )  # long sums would lose digits
    assert not channels_first.serve(x[:0], g[:0], (3, 3), (1, 1))
