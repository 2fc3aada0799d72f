"""Every complex activation: its formula, its Wirtinger gradient, and no NaN anywhere."""

import cmath
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from zdp_bench.errors import UserError
from zdp_bench.nn.activations import IGaussian, activation
from zdp_bench.registry import names

COMPLEX = [name for name in names("activation") if name not in ("relu", "mish", "sigmoid", "tanh")]


def logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def mish(x: float) -> float:
    return x * math.tanh(math.log1p(math.exp(x)))


def relu(x: float) -> float:
    return max(x, 0.0)


def shrunk(z: complex) -> complex:
    return relu(abs(z) - 0.1) * z / abs(z)


# Written from the papers' formulas with Python's own complex numbers.
FORMULAS: dict[str, Callable[[complex], complex]] = {
    "crelu": lambda z: complex(relu(z.real), relu(z.imag)),
    "separable_sigmoid": lambda z: complex(logistic(z.real), logistic(z.imag)),
    "zrelu": lambda z: z if 0 < cmath.phase(z) < math.pi / 2 else 0j,
    "siglog": lambda z: z / (1 + abs(z)),
    "igaussian": lambda z: (1 - math.exp(-(abs(z) ** 2) / 2)) * z / abs(z),
    "cardioid": lambda z: 0.5 * (1 + math.cos(cmath.phase(z))) * z,
    "cardioid_trained": lambda z: 0.5 * (1 + math.cos(cmath.phase(z))) * z,
    "cardioid_per_feature": lambda z: 0.5 * (1 + math.cos(cmath.phase(z))) * z,
    "modrelu": shrunk,
    "modrelu_per_feature": shrunk,
    "conjmish": lambda z: (1 + 1j) * mish(z.real) - (1 - 1j) * mish(z.imag),
}
POINTS = [1 + 2j, -0.3 + 0.7j, 0.5 - 1.5j, -2 - 0.1j, 3 + 0j, -1 + 0j, 0.05 + 0.02j, 2j, -0.4j]


def test_every_activation_has_its_formula_here() -> None:
    assert set(COMPLEX) == set(FORMULAS)


@pytest.mark.parametrize("name", COMPLEX)
def test_the_formula(name: str) -> None:
    z = torch.tensor(POINTS, dtype=torch.complex128).view(1, -1)
    layer = activation(name, len(POINTS)).to(torch.float64)
    expected = torch.tensor([FORMULAS[name](point) for point in POINTS], dtype=torch.complex128)
    # a trained −0.1 starts in float32
    torch.testing.assert_close(layer(z)[0], expected, rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("name", COMPLEX)
def test_nothing_is_nan_at_the_origin_on_the_axes_or_far_away(name: str) -> None:
    edges = [0.0, 1e-37, -1e-37, 1e-30, -1e-30, 1.0, -1.0, 1e3, -1e3, 1e15, -1e15, 7e18, -7e18]
    points = [[complex(x, y) for x in edges for y in edges]]
    z = torch.tensor(points, dtype=torch.complex64, requires_grad=True)
    layer = activation(name, z.shape[1])
    out = layer(z)
    assert torch.isfinite(torch.view_as_real(out)).all()
    out.abs().sum().backward()
    assert torch.isfinite(torch.view_as_real(z.grad)).all()
    for parameter in layer.parameters():
        assert torch.isfinite(parameter.grad).all()


@pytest.mark.parametrize("name", COMPLEX)
def test_a_lazily_conjugated_input_gives_what_its_copy_does(name: str) -> None:
    layer = activation(name, 3)
    z = torch.randn(2, 3, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(layer(z.conj()), layer(z.conj().resolve_conj()))


@pytest.mark.parametrize("name", COMPLEX)
def test_maps_keep_their_layout_forward_and_backward(name: str) -> None:
    """Or the next convolution copies the map, and the one before the gradient."""
    layer = activation(name, 3)
    z = torch.randn(2, 3, 4, 5, dtype=torch.complex128)
    g = torch.randn_like(z)
    results = []
    for layout in (torch.contiguous_format, torch.channels_last):
        put = z.clone(memory_format=layout).requires_grad_()
        out = layer(put)
        (gradient,) = torch.autograd.grad(out, put, g.clone(memory_format=layout))
        assert out.is_contiguous(memory_format=layout)
        assert gradient.is_contiguous(memory_format=layout)
        results.append((out.detach(), gradient))
    torch.testing.assert_close(*results)


def test_trained_biases_are_one_or_one_a_feature_and_do_what_they_say() -> None:
    for name, biases in (("cardioid_trained", 1), ("cardioid_per_feature", 6)):
        assert sum(p.numel() for p in activation(name, 6).parameters()) == biases
    layer = activation("cardioid_per_feature", 2).to(torch.float64)
    with torch.no_grad():
        layer.bias.copy_(torch.tensor([0.0, math.pi]))
    z = torch.full((1, 2, 3, 3), 2.0 + 0j, dtype=torch.complex128)
    out = layer(z)
    torch.testing.assert_close(out[0, 0], z[0, 0])
    assert out[0, 1].abs().max() < 1e-12  # turned by half a circle: the positive axis is blocked
    shrunk_to = activation("modrelu_per_feature", 2).to(torch.float64)
    with torch.no_grad():
        shrunk_to.bias.copy_(torch.tensor([-0.5, -5.0]))
    out = shrunk_to(z)
    assert out[0, :, 0, 0].tolist() == [1.5, 0]


@pytest.mark.parametrize("name", ["cardioid_trained", "cardioid_per_feature"])
@pytest.mark.parametrize("first", [-4.0, -0.7, 0.0, 0.3, math.pi / 2, 3.0])
def test_a_trained_cardioid_and_its_gradients_turn_with_the_bias(name: str, first: float) -> None:
    """At z = r·exp(iφ): f = ½(1 + cos(φ + b))·z, ∂f/∂b = −½ sin(φ + b)·z, ∂f/∂φ = i·f + ∂f/∂b."""
    layer = activation(name, len(POINTS))
    bias = first + 0.4 * torch.arange(layer.bias.numel(), dtype=torch.float64)
    z = torch.tensor(POINTS, dtype=torch.complex128)

    def parts(bias: Tensor, modulus: Tensor, phase: Tensor) -> Tensor:
        out = functional_call(layer, {"bias": bias}, torch.polar(modulus, phase)[None])
        return torch.view_as_real(out[0])  # [points, 2]

    slopes = torch.autograd.functional.jacobian(parts, (bias, z.abs(), z.angle()))
    by_bias, by_modulus, by_phase = (
        torch.view_as_complex(slope.movedim(1, -1).contiguous()) for slope in slopes
    )  # [points, biases], and [points, points] twice

    angle = z.angle() + bias
    value = 0.5 * (1 + angle.cos()) * z
    turning = -0.5 * angle.sin() * z
    close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-12)
    close(torch.view_as_complex(parts(bias, z.abs(), z.angle())), value)
    close(by_bias, turning[:, None] if len(bias) == 1 else turning.diag())
    close(by_modulus, (value / z.abs()).diag())
    close(by_phase, (1j * value + turning).diag())


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("siglog", 1.0),
        ("igaussian", 0.0),
        ("modrelu", 0.0),
        ("crelu", 0.0),
        ("zrelu", 0.0),
        ("cardioid", 0.5),
        ("separable_sigmoid", 0.25),
    ],
)
def test_the_gradient_at_the_origin(name: str, factor: float) -> None:
    """df = factor·dz there; for the cardioid, without derivative at 0, the mean over directions."""
    z = torch.zeros(1, 1, dtype=torch.complex128, requires_grad=True)
    activation(name, 1).to(torch.float64)(z).backward(torch.full_like(z, 3 - 4j))
    assert z.grad.item() == pytest.approx(factor * (3 - 4j))


@pytest.mark.parametrize("sigma", [0.4, 3.0])
def test_the_inverted_gaussian_has_a_width(sigma: float) -> None:
    z = torch.tensor(POINTS, dtype=torch.complex128).view(1, -1)
    expected = [(1 - math.exp(-(abs(p) ** 2) / (2 * sigma**2))) * p / abs(p) for p in POINTS]
    got = IGaussian(sigma)(z)[0]
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.complex128))
    with pytest.raises(UserError, match=r"sigma=0\.0: must be positive"):
        IGaussian(0.0)
