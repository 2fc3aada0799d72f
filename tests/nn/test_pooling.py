"""Pooling of complex maps: values, gradients, and no example sees another."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from zdp_bench.nn.pooling import AdaptiveMagnitudeMaxPool2d, ComplexAvgPool2d, MagnitudeMaxPool2d

MAPS = torch.randn(2, 3, 7, 8, dtype=torch.complex128, generator=torch.Generator().manual_seed(0))


def test_the_largest_modulus_goes_on_whole() -> None:
    x = MAPS
    pooled = MagnitudeMaxPool2d(2)(x)
    assert pooled.shape == (2, 3, 3, 4)
    for i in range(3):
        for j in range(4):
            window = x[:, :, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2].flatten(2)  # [B, C, 4]
            best = window.gather(2, window.abs().argmax(dim=2, keepdim=True)).squeeze(2)
            assert torch.equal(pooled[:, :, i, j], best)
    hand = torch.tensor([[[[3 + 0j, -4j], [1 + 1j, -3 - 3j]]]])
    assert MagnitudeMaxPool2d(2)(hand).item() == -3 - 3j  # by the larger real part it would be 3


@pytest.mark.parametrize("size", [1e-18, 1e18])
def test_the_largest_of_small_and_of_large_moduli_is_found(size: float) -> None:
    x = size * torch.tensor([[[[1j, 2 + 0j], [-7 + 0j, 3j]]]], dtype=torch.complex64)
    assert MagnitudeMaxPool2d(2)(x).item() == x[0, 0, 1, 0].item()


def test_the_adaptive_windows_are_pytorchs() -> None:
    for size in (1, 3):
        pool, expected = AdaptiveMagnitudeMaxPool2d(size), nn.AdaptiveMaxPool2d(size)
        torch.testing.assert_close(pool(MAPS).abs(), expected(MAPS.abs()))


def test_only_the_chosen_entry_has_a_gradient_and_of_equal_ones_the_first() -> None:
    x = torch.tensor([[[[1j, 1 + 0j], [-1 + 0j, 0.5 + 0j]]]], requires_grad=True)
    out = MagnitudeMaxPool2d(2)(x)
    out.backward(torch.full_like(out, 2 - 3j))
    assert out.item() == 1j
    assert x.grad.flatten().tolist() == [2 - 3j, 0, 0, 0]
    zeros = torch.zeros(1, 1, 2, 2, dtype=torch.complex64, requires_grad=True)
    MagnitudeMaxPool2d(2)(zeros).abs().sum().backward()
    assert torch.isfinite(torch.view_as_real(zeros.grad)).all()


def test_a_mean_of_lines_is_torchs_mean_of_each_part() -> None:
    """Also of sizes that windows do not divide, of one record, and of none."""
    pool = ComplexAvgPool2d(3)
    for shape in ((2, 5, 7, 11), (1, 5, 9, 8), (0, 5, 6, 6), (3, 1, 4, 4), (1, 2, 3, 3)):
        x = torch.randn(shape, dtype=torch.complex64)
        expected = torch.complex(F.avg_pool2d(x.real, 3), F.avg_pool2d(x.imag, 3))
        assert torch.allclose(pool(x), expected, atol=1e-6)
    with pytest.raises(ValueError, match="no window of 3×3 fits into a map of 2×9"):
        pool(torch.randn(1, 1, 2, 9, dtype=torch.complex64))
