"""Per-sample gradients of real convolutions equal torch's own, example by example."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels.exact_convolution import needs_avx512, needs_kernels
from zdp_bench.kernels import channels_first

pytestmark = needs_avx512
# Weight [O, C, *k], padding, dilation, size of maps: outputs and inputs that tiles do not divide,
# rows shorter than a vector and longer, taps far apart, one dimension and two.
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
    """Input, output gradient, and the numbers the kernel is called with."""
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
def test_equal_torchs_gradients_of_every_example(numbers) -> None:
    weight, padding, dilation, size = numbers
    x, g, given = _problem(weight, padding, dilation, size)
    found = channels_first.per_sample_gradients(x, g, *given)
    expected = _expected(x, g, weight, padding, dilation)
    assert found.shape == expected.shape
    assert (found - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize("spoilt", [float("nan"), float("inf")])
def test_no_example_sees_another(spoilt: float) -> None:
    x, g, given = _problem(*SHAPES[2])
    clean = channels_first.per_sample_gradients(x, g, *given)
    x[1], g[1], x[4, :, -1, -1] = spoilt, spoilt, spoilt
    found = channels_first.per_sample_gradients(x, g, *given)
    assert torch.equal(clean[[0, 2, 3]], found[[0, 2, 3]])
    assert not found[1].isfinite().any()
    assert not found[4].isfinite().all()


def test_any_number_of_threads_gives_the_same_bits(set_threads: Callable[[int], None]) -> None:
    x, g, given = _problem(*SHAPES[1])
    found = []
    for threads in (1, 2, 3):
        set_threads(threads)
        found.append(channels_first.per_sample_gradients(x, g, *given))
    assert all(torch.equal(found[0], other) for other in found[1:])


@needs_kernels
@torch.no_grad()
def test_other_maps_are_not_its() -> None:
    x, g = torch.randn(2, 3, 8, 8), torch.randn(2, 4, 6, 6)
    last = x.contiguous(memory_format=torch.channels_last)
    assert channels_first.serves(x, g, (3, 3), (1, 1))
    for x_, g_, kernel, stride in (
        (x, g, (3, 3), (1, 2)),
        (x.double(), g.double(), (3, 3), (1, 1)),
        (last, g, (3, 3), (1, 1)),
        (x, g[:, :3].contiguous(), (3, 3), (1, 1)),
        (x[:, :1].contiguous(), g, (2, 2), (1, 1)),  # fewer inputs than a tile's
        (torch.randn(2, 32, 8, 8), g, (3, 3), (1, 1)),  # more than pay
        (torch.randn(2, 3, 96, 96), g, (3, 3), (1, 1)),  # long sums would lose digits
        (x[:0], g[:0], (3, 3), (1, 1)),
    ):
        assert not channels_first.serves(x_, g_, kernel, stride)
