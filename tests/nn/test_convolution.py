"""Complex convolutions equal torch's own in value, gradient, state and refusals."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

from zdp_bench.nn import convolution
from zdp_bench.nn.convolution import (
    ComplexConv1d,
    ComplexConv2d,
    ComplexConv3d,
    ComplexConvTranspose2d,
    weights_kept,
)
from zdp_bench.nn.memory_format import as_complex_channels, as_real_channels, channels_last

PAIRS = {
    ComplexConv1d: (nn.Conv1d, (4, 9)),
    ComplexConv2d: (nn.Conv2d, (4, 7, 8)),
    ComplexConv3d: (nn.Conv3d, (4, 5, 6, 5)),
    ComplexConvTranspose2d: (nn.ConvTranspose2d, (4, 5, 6)),
}
OPTIONS = [
    {},
    {"stride": 2, "padding": 1},
    {"dilation": 2, "padding": 2, "groups": 2},
    {"bias": False},
]


@pytest.mark.parametrize("ours", PAIRS, ids=lambda layer: layer.__name__)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_equals_torchs_complex_convolution(ours, options) -> None:
    theirs, shape = PAIRS[ours]
    torch.manual_seed(0)
    native = theirs(4, 6, 3, dtype=torch.complex128, **options)
    layer = ours(4, 6, 3, dtype=torch.complex128, **options)
    layer.load_state_dict(native.state_dict())  # same names, shapes and dtypes
    x = torch.randn(2, *shape, dtype=torch.complex128, requires_grad=True)
    expected, found = native(x), layer(x)
    torch.testing.assert_close(found, expected, check_stride=False)
    direction = torch.randn_like(expected)
    ours_of = torch.autograd.grad(found, [x, *layer.parameters()], direction)
    theirs_of = torch.autograd.grad(expected, [x, *native.parameters()], direction)
    for a, b in zip(ours_of, theirs_of, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("channels", "size"), [(1, (5, 15)), (16, (8, 9))])
def test_a_gradient_of_a_gradient_is_torchs(channels: int, size: tuple[int, int]) -> None:
    """Also where loops of our own go forward, which have no second derivative."""
    torch.manual_seed(0)
    layer, native = (
        ComplexConv2d(channels, 16, 3),
        nn.Conv2d(channels, 16, 3, dtype=torch.complex64),
    )
    native.load_state_dict(layer.state_dict())
    given, found = torch.randn(2, channels, *size, dtype=torch.complex64), []
    for each in (layer, native):
        x = given.clone().requires_grad_()
        (of_x,) = torch.autograd.grad(each(x).abs().square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(of_x.abs().square().sum(), each.weight)[0])
    assert (found[0] - found[1]).norm() <= 1e-5 * found[1].norm()


def test_output_padding() -> None:
    native = nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, dtype=torch.complex128)
    layer = ComplexConvTranspose2d(4, 6, 3, stride=2, output_padding=1, dtype=torch.complex128)
    layer.load_state_dict(native.state_dict())
    x = torch.randn(2, 4, 5, 6, dtype=torch.complex128)
    torch.testing.assert_close(layer(x), native(x), check_stride=False)


def test_initialisation_is_torchs_own() -> None:
    torch.manual_seed(0)
    layer = ComplexConv2d(16, 64, 3)
    parts = torch.view_as_real(layer.weight.detach())
    bound = 1 / (16 * 9) ** 0.5
    assert 0.98 * bound < float(parts.abs().max()) <= bound
    torch.testing.assert_close(parts.std(), torch.tensor(bound / 3**0.5), rtol=0.02, atol=0)


def test_interleaving_is_a_view_where_memory_is_channels_last() -> None:
    x = channels_last(torch.randn(2, 3, 4, 5, dtype=torch.complex64))
    real = as_real_channels(x)
    assert real.shape == (2, 6, 4, 5)
    assert real.data_ptr() == x.data_ptr()
    assert real.is_contiguous(memory_format=torch.channels_last)
    assert as_complex_channels(real).data_ptr() == x.data_ptr()
    torch.testing.assert_close(as_complex_channels(real), x)
    torch.testing.assert_close(real[:, 1::2], x.imag)


def test_real_dtypes_and_uneven_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="is complex"):
        ComplexConv2d(4, 4, 3, dtype=torch.float32)
    with pytest.raises(ValueError, match="groups"):
        ComplexConv2d(4, 6, 3, groups=4)


# ------------------------------------------------------------------------- weights that are kept


def _counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of weights as they are interleaved from now on."""
    made: list[tuple[int, ...]] = []
    real = convolution.interleaved_weight

    def count(weight: Tensor, transposed: bool) -> Tensor:
        made.append(tuple(weight.shape))
        return real(weight, transposed)

    monkeypatch.setattr(convolution, "interleaved_weight", count)
    return made


def _answers(layer: nn.Module, x: Tensor) -> list[Tensor]:
    y = layer(x)
    return [y, *torch.autograd.grad((y * y.conj()).real.sum(), [x, *layer.parameters()])]


@pytest.mark.parametrize(
    "layer", [lambda: ComplexConv2d(6, 5, 3), lambda: ComplexConvTranspose2d(6, 5, 3)]
)
def test_a_kept_weight_is_made_once_until_it_changes_and_not_kept_afterwards(
    layer: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, x = layer(), torch.randn(2, 6, 5, 4, dtype=torch.complex64, requires_grad=True)
    first = _answers(model, x)
    made = _counted(monkeypatch)
    with weights_kept(model):
        for _ in range(2):
            assert all(
                torch.equal(mine, before)
                for mine, before in zip(_answers(model, x), first, strict=True)
            )
        assert len(made) == 1
        with torch.no_grad():
            model.weight.mul_(2)
        second = _answers(model, x)
        assert len(made) == 2
        model.weight.data.mul_(0.5)  # which torch does not count
        assert all(
            torch.equal(mine, before)
            for mine, before in zip(_answers(model, x), first, strict=True)
        )
        assert len(made) == 3
        model.weight.data.mul_(2)
        _answers(model, x)
    outside = _answers(model, x)
    assert len(made) == 6  # forward and backward
    assert all(torch.equal(mine, before) for mine, before in zip(second, outside, strict=True))
    assert not torch.allclose(second[0], first[0])
    assert not convolution._kept


def test_other_weights_conjugates_and_torchs_transforms_make_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model, other = ComplexConv2d(6, 5, 3, bias=False), ComplexConv2d(6, 5, 3, bias=False)
    x = torch.randn(2, 6, 5, 4, dtype=torch.complex64)
    expected = (
        model(x),
        other(x),
        convolution._Convolve.apply(x, model.weight.conj(), None, model.geometry),
    )
    with weights_kept(model):
        model(x)
        assert torch.equal(other(x), expected[1])
        assert torch.equal(
            convolution._Convolve.apply(x, model.weight.conj(), None, model.geometry), expected[2]
        )
        assert torch.equal(model(x), expected[0])
        rows = vmap(lambda one: model(one.unsqueeze(0))[0])(x)
        torch.testing.assert_close(rows, expected[0])
        weights = torch.stack([model.weight.detach(), other.weight.detach()])
        both = vmap(lambda weight: convolution._Convolve.apply(x, weight, None, model.geometry))(
            weights
        )
        torch.testing.assert_close(both, torch.stack(expected[:2]))


def test_a_second_derivative_goes_through_a_kept_weight() -> None:
    torch.manual_seed(0)
    model = ComplexConv2d(2, 2, 2, dtype=torch.complex128)
    x = torch.randn(1, 2, 3, 3, dtype=torch.complex128)

    def penalty() -> Tensor:
        given = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(model(given).abs().square().sum(), given, create_graph=True)
        (of_weight,) = torch.autograd.grad(g.abs().square().sum(), model.weight)
        return of_weight

    expected = penalty()
    with weights_kept(model):
        torch.testing.assert_close(penalty(), expected)


@pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning"
)  # torch's compiler does so itself
@pytest.mark.parametrize(
    "layer",
    [
        ComplexConv2d(3, 32, 3),
        ComplexConv2d(16, 16, 3, padding=1),
        ComplexConvTranspose2d(4, 4, 2, stride=2),
    ],
    ids=["loops of few channels", "loops of many", "transposed"],
)
def test_torch_compiles_it_in_one_piece(layer) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, layer.in_channels, 32, 32, dtype=torch.complex64)
    expected, found = layer(x), compiled(x)
    torch.testing.assert_close(found, expected, check_stride=False, rtol=1e-4, atol=1e-5)
    direction = torch.randn_like(expected)
    theirs, ours = (
        torch.autograd.grad(y, list(layer.parameters()), direction) for y in (expected, found)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)
