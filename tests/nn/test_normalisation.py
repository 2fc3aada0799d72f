"""Complex norms against the paper's listing by SVD, finite differences, and degenerate groups."""

import pytest
import torch
from torch import Tensor, nn

from zdp_bench.errors import UserError
from zdp_bench.nn.memory_format import channels_last
from zdp_bench.nn.normalisation import (
    EPS,
    ComplexGroupNorm,
    ComplexInstanceNorm,
    ComplexLayerNorm,
    normalise,
    per_sample_norm,
)

SHAPES = [(3, 6, 5, 4), (2, 6, 7), (2, 6, 3, 2, 4)]


def whitened_by_svd(x: Tensor, groups: int, eps: float = EPS) -> Tensor:
    """The paper's listing, one group after another (Riess et al. 2024, section 4)."""
    flat = x.reshape(len(x) * groups, -1)
    rows = []
    for group in flat:
        centred = group - group.mean()
        pairs = torch.stack([centred.real, centred.imag])
        u, eigenvalues, _ = torch.linalg.svd(torch.cov(pairs))
        whitened = u @ torch.diag(1 / torch.sqrt(eigenvalues + eps)) @ u.T @ pairs
        rows.append(torch.complex(whitened[0], whitened[1]))
    return torch.stack(rows).reshape(x.shape)


def correlated(shape: tuple[int, ...], dtype: torch.dtype = torch.complex128) -> Tensor:
    """Numbers whose parts are correlated and of unequal size, off the origin."""
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.complex128)
    return (x * (3 + 1j) + 2 * x.roll(1).real + (0.5 - 4j)).to(dtype)


@pytest.mark.parametrize(
    ("shape", "groups", "dtype", "tolerance"),
    [
        *((shape, groups, torch.complex128, 1e-12) for shape in SHAPES for groups in (1, 2, 6)),
        (SHAPES[0], 2, torch.complex64, 1e-5),
    ],
    ids=str,
)
def test_equals_the_papers_listing(shape, groups, dtype, tolerance) -> None:
    x = correlated(shape, dtype)
    for arranged in (x, channels_last(x)):
        normalised, expected = normalise(arranged, groups), whitened_by_svd(x, groups)
        torch.testing.assert_close(normalised, expected, rtol=0, atol=tolerance, check_stride=False)


def test_affine_parameters_start_as_in_the_paper_and_multiply_as_complex_numbers() -> None:
    norm, x = ComplexGroupNorm(2, 4, dtype=torch.complex128), correlated((2, 4, 5, 5))
    torch.testing.assert_close(norm.weight, torch.full_like(norm.weight, (1 + 1j) / 2**0.5))
    assert not norm.bias.any()
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([1j, 2, 0.5 - 1j, -1]))
        norm.bias.copy_(torch.tensor([0, 1 + 1j, 2, -1j]))
    y = norm.weight.view(-1, 1, 1) * whitened_by_svd(x, 2) + norm.bias.view(-1, 1, 1)
    torch.testing.assert_close(norm(x), y, check_stride=False)
    assert [p.shape for p in ComplexGroupNorm(2, 4, affine=False).parameters()] == []


def test_instance_and_layer_norm_are_its_ends() -> None:
    x = correlated((2, 4, 5, 3), torch.complex64)
    torch.testing.assert_close(ComplexInstanceNorm(4)(x), ComplexGroupNorm(4, 4)(x))
    torch.testing.assert_close(ComplexLayerNorm(4)(x), ComplexGroupNorm(1, 4)(x))


def test_backward_near_a_singular_group_is_the_finite_difference() -> None:
    along_a_line = torch.randn(2, 4, 6, dtype=torch.float64) * (2 - 1j)
    x = (along_a_line + 1e-3 * torch.randn(2, 4, 6, dtype=torch.complex128)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: normalise(x, 2, eps=1e-4), (x,), fast_mode=True)


DEGENERATE = {
    "zeros": lambda z: 0 * z,
    "one number": lambda z: torch.full_like(z, 3 + 4j),
    "a line": lambda z: z.real * (1 + 2j),
    "the real axis": lambda z: z.real + 0j,
    "a long line": lambda z: 1e6 * z.real * (1 + 2j),
    "far from the origin": lambda z: z + 1e6,
    "tiny": lambda z: 1e-25 * z,
    "large": lambda z: 1e15 * z,
    "as small as can be": lambda z: 1e-44 * z,
    "as large as can be": lambda z: 7e18 * z / z.flatten(1).norm(dim=1).max(),
}


@pytest.mark.parametrize("what", DEGENERATE)
def test_degenerate_groups_are_finite_and_so_are_their_gradients(what) -> None:
    x = DEGENERATE[what](torch.randn(2, 4, 6, 6, dtype=torch.complex64)).requires_grad_()
    y = normalise(x, 2)
    (gradient,) = torch.autograd.grad(torch.view_as_real(y * y.detach().roll(1)).sum(), x)
    assert torch.isfinite(torch.view_as_real(y)).all()
    assert torch.isfinite(torch.view_as_real(gradient)).all()
    # white numbers have Σ|ŷ|² = 2(n − 1), and eps only takes from it
    powers = y.detach().reshape(2, 2, -1).abs().square().sum(dim=2)
    assert float(powers.max()) <= 2 * 71 * (1 + 1e-3)


def test_a_record_alone_comes_out_as_among_others() -> None:
    x = correlated((4, 6, 5, 4), torch.complex64)
    whole = normalise(x, 3)
    torch.testing.assert_close(normalise(x[2:3], 3), whole[2:3], rtol=0, atol=0)
    assert normalise(x[:0], 3).shape == (0, 6, 5, 4)


def test_norms_by_name() -> None:
    assert per_sample_norm(None, 8, torch.complex64) == []
    for how, groups in (("group", 12), ("instance", 24)):
        (norm,) = per_sample_norm(how, 24, torch.complex64)
        assert (norm.groups, norm.channels) == (groups, 24)
    (norm,) = per_sample_norm("group", 32, torch.float32)
    assert isinstance(norm, nn.GroupNorm)
    assert norm.num_groups == 16


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="is complex"):
        ComplexGroupNorm(2, 4, dtype=torch.float32)
    with pytest.raises(ValueError, match="groups"):
        ComplexGroupNorm(3, 4)
    with pytest.raises(UserError, match=r"model\.normalisation.*group"):
        per_sample_norm("grup", 4, torch.complex64)
    with pytest.raises(ValueError, match="positive"):
        ComplexGroupNorm(2, 4, eps=0)
