"""Complex convolutions equal torch's own in value, gradient, state and refusals."""

import re

import numpy as np
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
)

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
CASES = [(layer, options) for layer in PAIRS for options in OPTIONS]
CASES += [(ComplexConvTranspose2d, {"stride": 2, "output_padding": 1})]


@pytest.mark.parametrize(("ours", "options"), CASES, ids=str)
def test_equals_torchs_complex_convolution(ours, options) -> None:
    theirs, shape = PAIRS[ours]
    torch.manual_seed(0)
    native = theirs(4, 6, 3, dtype=torch.complex128, **options)
    layer = ours(4, 6, 3, dtype=torch.complex128, **options)
    layer.load_state_dict(native.state_dict())  # same names, shapes and dtypes
    x = torch.randn(2, *shape, dtype=torch.complex128, requires_grad=True)
    expected, outputs = native(x), layer(x)
    torch.testing.assert_close(outputs, expected, check_stride=False)
    direction = torch.randn_like(expected)
    ours_of = torch.autograd.grad(outputs, [x, *layer.parameters()], direction)
    theirs_of = torch.autograd.grad(expected, [x, *native.parameters()], direction)
    for a, b in zip(ours_of, theirs_of, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("channels", "size"), [(1, (5, 15)), (16, (8, 9))])
def test_a_gradient_of_a_gradient_is_torchs(channels: int, size: tuple[int, int]) -> None:
    """Also where loops of our own go forward, which have no second derivative."""
    layer = ComplexConv2d(channels, 16, 3)
    native = nn.Conv2d(channels, 16, 3, dtype=torch.complex64)
    native.load_state_dict(layer.state_dict())
    given, gradients = torch.randn(2, channels, *size, dtype=torch.complex64), []
    for each in (layer, native):
        x = given.clone().requires_grad_()
        (of_x,) = torch.autograd.grad(each(x).abs().square().sum(), x, create_graph=True)
        gradients.append(torch.autograd.grad(of_x.abs().square().sum(), each.weight)[0])
    assert (gradients[0] - gradients[1]).norm() <= 1e-5 * gradients[1].norm()


@pytest.mark.parametrize("layer", PAIRS)
def test_arguments_have_the_order_of_torchs(layer) -> None:
    """The sixth of a transposed convolution was its dilation."""
    torchs, _ = PAIRS[layer]
    values = (3, 2, 1, 1, 2, False) + ((2,) if layer is ComplexConvTranspose2d else ())
    ours, theirs = layer(4, 4, *values), torchs(4, 4, *values)
    for name in ("kernel_size", "stride", "padding", "output_padding", "dilation", "groups"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours.bias is theirs.bias is None


def test_initialisation_is_torchs_own() -> None:
    layer = ComplexConv2d(16, 64, 3)
    parts = torch.view_as_real(layer.weight.detach())
    bound = 1 / (16 * 9) ** 0.5
    assert 0.98 * bound < float(parts.abs().max()) <= bound
    torch.testing.assert_close(parts.std(), torch.tensor(bound / 3**0.5), rtol=0.02, atol=0)


def test_real_dtypes_and_uneven_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="is complex"):
        ComplexConv2d(4, 4, 3, dtype=torch.float32)
    with pytest.raises(ValueError, match="groups"):
        ComplexConv2d(4, 6, 3, groups=4)


def test_conjugated_weights_and_torchs_transforms_are_convolved_alike() -> None:
    model, other = ComplexConv2d(6, 5, 3, bias=False), ComplexConv2d(6, 5, 3, bias=False)
    x = torch.randn(2, 6, 5, 4, dtype=torch.complex64)

    def convolve(weight: Tensor) -> Tensor:
        return convolution._Convolve.apply(x, weight, None, model.arguments)

    conjugate = convolve(model.weight.conj())
    torch.testing.assert_close(conjugate, model(x.conj().resolve_conj()).conj().resolve_conj())
    rows = vmap(lambda example: model(example.unsqueeze(0))[0])(x)
    torch.testing.assert_close(rows, model(x))
    weights = torch.stack([model.weight.detach(), other.weight.detach()])
    torch.testing.assert_close(vmap(convolve)(weights), torch.stack([model(x), other(x)]))


# torch's compiler does so itself
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    "layer",
    [ComplexConv2d(16, 16, 3, padding=1), ComplexConvTranspose2d(4, 4, 2, stride=2)],
    ids=["loops", "transposed"],
)
def test_torch_compiles_it_in_one_piece(layer) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, layer.in_channels, 32, 32, dtype=torch.complex64)
    expected, outputs = layer(x), compiled(x)
    torch.testing.assert_close(outputs, expected, check_stride=False, rtol=1e-4, atol=1e-5)
    direction = torch.randn_like(expected)
    weights = list(layer.parameters())
    theirs, ours = (torch.autograd.grad(y, weights, direction) for y in (expected, outputs))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("layer", [*PAIRS])
@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"padding": "same"}, "padding='same' must be an integer of at least 0, or {n} of them"),
        ({"kernel_size": ()}, "kernel_size=() must be an integer of at least 1, or {n} of them"),
        ({"kernel_size": (3,) * 4}, "kernel_size=(3, 3, 3, 3) must be an integer of at least 1"),
        ({"stride": 0}, "stride=0 must be an integer of at least 1"),
        ({"dilation": 1.5}, "dilation=1.5 must be an integer of at least 1"),
        ({"groups": 0}, "4 and 6 channels do not divide into 0 groups"),
    ],
    ids=str,
)
def test_arguments_that_mean_nothing_are_refused_when_it_is_built(layer, options, error) -> None:
    with pytest.raises(ValueError, match=re.escape(error.format(n=layer.spatial))):
        layer(4, 6, **({"kernel_size": 3} | options))


def test_integers_of_numpy_and_layers_without_inputs_are_built_as_by_torch() -> None:
    two = np.int64(2)
    layer = ComplexConv2d(two, two, two, stride=(two, 1), padding=two, groups=two)
    assert layer(torch.zeros(1, 2, 5, 5, dtype=torch.complex64)).shape == (1, 2, 4, 8)
    layer = ComplexConv2d(2, 2, 3, stride=(2,), padding=[1])
    assert (layer.stride, layer.padding) == ((2, 2), (1, 1))
    assert ComplexConv2d(0, 2, 3).weight.shape == (2, 0, 3, 3)
    assert ComplexConv2d(2, 0, 3).weight.shape == (0, 2, 3, 3)
