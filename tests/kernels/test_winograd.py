"""Winograd's convolutions equal torch's complex convolution, in value and every gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.kernels.exact_convolution import close, convolve, needs_avx512, needs_kernels
from zdp_bench.kernels import winograd
from zdp_bench.nn.convolution import ComplexConv2d
from zdp_bench.nn.memory_format import channels_last

# Outputs, channels, padding, examples and sizes of maps: odd sizes, no padding and too much, fewer
# tiles than a product takes, more than a thread holds, more than a part has, several slices.
PROBLEMS = [
    (16, 16, (1, 1), 3, (8, 6)),
    (32, 16, (0, 0), 2, (7, 9)),
    (16, 48, (2, 1), 3, (5, 12)),
    (16, 16, (3, 4), 2, (2, 3)),
    (16, 32, (1, 1), 1, (1, 1)),
    (16, 16, (1, 0), 2, (67, 65)),
    (16, 16, (1, 1), 1, (95, 90)),
    (144, 16, (1, 1), 2, (4, 5)),
    (32, 144, (1, 1), 1, (3, 4)),
    (128, 160, (1, 1), 2, (9, 11)),
    (256, 64, (1, 1), 3, (18, 17)),
]


def _problem(
    outputs: int, channels: int, padding: tuple[int, int], examples: int, size: tuple[int, int]
) -> tuple[winograd.Shape, Tensor, Tensor, Tensor, Tensor]:
    """The kernel's shape, and x, weight, bias and output gradient in complex64."""
    shape = winograd.shape_of((outputs, channels, 3, 3), (1, 1), padding, (1, 1), False, 1)
    assert shape is not None
    torch.manual_seed(outputs + channels)
    sizes = (
        (examples, channels, *size),
        (outputs, channels, 3, 3),
        (outputs,),
        (examples, outputs, *shape.output_size(*size)),
    )
    x, w, bias, g = (torch.randn(each, dtype=torch.complex64) for each in sizes)
    return shape, channels_last(x), w, bias, channels_last(g)


@needs_avx512
@pytest.mark.parametrize("numbers", PROBLEMS, ids=str)
def test_equal_torchs_complex_convolution(numbers) -> None:
    shape, x, w, bias, g = _problem(*numbers)
    y, of_x, of_w = convolve(x, w, bias, g, shape.padding)
    close(winograd.convolve(shape, x, winograd.transform_weight(w), bias), y)
    close(winograd.convolve(shape, x, winograd.transform_weight(w), None), y - bias.view(-1, 1, 1))
    close(winograd.input_gradient(shape, g, winograd.transform_weight_backward(w)), of_x)
    rows, squares = winograd.per_sample_gradients(shape, x, g)
    close(rows, of_w)
    assert torch.allclose(
        squares, torch.view_as_real(rows).double().square().flatten(1).sum(dim=1), rtol=1e-12
    )
    close(winograd.weight_gradient(shape, x, g), of_w.sum(0))


@needs_avx512
@pytest.mark.parametrize("layout", ["channels first", "conjugated", "every second column"])
def test_any_layout_is_read_rightly(layout: str) -> None:
    shape, x, w, bias, g = _problem(*PROBLEMS[1])
    if layout == "channels first":
        x, g = x.contiguous(), g.contiguous()
    elif layout == "conjugated":
        x, g, w, bias = x.conj(), g.conj(), w.conj(), bias.conj()
    else:
        x = torch.stack([x, 1e9 * x], dim=-1).flatten(-2)[..., ::2]
        w = torch.stack([w, 1e9 * w], dim=-1).flatten(-2)[..., ::2]
    exact = (each.resolve_conj() for each in (x, w, bias, g))
    y, of_x, of_w = convolve(*exact, shape.padding)
    close(winograd.convolve(shape, x, winograd.transform_weight(w), bias), y)
    close(winograd.input_gradient(shape, g, winograd.transform_weight_backward(w)), of_x)
    close(winograd.per_sample_gradients(shape, x, g)[0], of_w)


@needs_avx512
def test_maps_are_channels_last_and_gradients_contiguous() -> None:
    """So that neither the next layer nor noise and optimizer need a copy."""
    shape, x, w, bias, g = _problem(*PROBLEMS[0])
    for found in (
        winograd.convolve(shape, x, winograd.transform_weight(w), bias),
        winograd.input_gradient(shape, g, winograd.transform_weight(w)),
    ):
        assert found.movedim(1, -1).is_contiguous()
    assert winograd.weight_gradient(shape, x, g).is_contiguous()
    assert winograd.per_sample_gradients(shape, x, g)[0].is_contiguous()


@needs_avx512
@pytest.mark.parametrize("numbers", [PROBLEMS[0], PROBLEMS[5], *PROBLEMS[-2:]], ids=str)
def test_any_number_of_threads_gives_the_same_bits(
    numbers, set_threads: Callable[[int], None]
) -> None:
    shape, x, w, bias, g = _problem(*numbers)
    filters, back = winograd.transform_weight(w), winograd.transform_weight_backward(w)
    found = []
    for threads in (1, 2, 3):
        set_threads(threads)
        maps = winograd.convolve(shape, x, filters, bias), winograd.input_gradient(shape, g, back)
        found.append(
            [
                *maps,
                *winograd.per_sample_gradients(shape, x, g),
                winograd.weight_gradient(shape, x, g),
            ]
        )
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("tiles", [1, 6, 7, 100, 400, 1601, 25_600])
@pytest.mark.parametrize("threads", [1, 2, 3, 16])
@pytest.mark.parametrize(("outputs", "channels"), [(16, 16), (128, 64), (128, 128), (48, 1024)])
def test_threads_get_equally_many_chunks_that_fit_their_memory(
    tiles: int, threads: int, outputs: int, channels: int
) -> None:
    shape, product = winograd.Shape(outputs, channels, (1, 1)), winograd.POSITIONS
    chunks, held, slices = winograd._cut(tiles, shape, threads)
    assert chunks * slices % threads == 0 or chunks * product < tiles + product
    assert held % product == 0
    assert held <= (winograd.HELD if outputs * channels < 128 * 128 else winograd.HELD_OF_LARGE)
    assert outputs % (16 * slices) == 0
    assert slices == 1 or chunks <= threads // slices  # a weight is read from memory once
    assert chunks * held >= tiles > chunks * (held - product) - product  # and no more than needed


@needs_avx512
def test_no_example_sees_another() -> None:
    """An example's bits depend neither on others that are not finite nor on how many there are."""
    shape, x, w, bias, g = _problem(*PROBLEMS[0])
    spoilt, spoilt_g = x.clone(), g.clone()
    spoilt[1], spoilt_g[1] = float("nan"), float("inf")
    filters, back = winograd.transform_weight(w), winograd.transform_weight_backward(w)

    def answers(x: Tensor, g: Tensor) -> list[Tensor]:
        maps = [winograd.convolve(shape, x, filters, bias), winograd.input_gradient(shape, g, back)]
        return [*maps, *winograd.per_sample_gradients(shape, x, g)]

    for clean, other, alone in zip(
        answers(x, g), answers(spoilt, spoilt_g), answers(x[2:], g[2:]), strict=True
    ):
        assert torch.equal(clean[[0, 2]], other[[0, 2]])
        assert not other[1].isfinite().all()
        assert torch.equal(clean[2:], alone)


@needs_avx512
@needs_kernels
def test_errors_are_no_larger_than_those_of_the_real_convolution(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    layer, x = (
        ComplexConv2d(64, 64, 3, padding=1),
        torch.randn(2, 64, 24, 24, dtype=torch.complex64),
    )
    exact = ComplexConv2d(64, 64, 3, padding=1, dtype=torch.complex128)
    exact.load_state_dict(layer.state_dict())

    def answers(layer: nn.Module, x: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        y = layer(x)
        return [
            y.detach(),
            *torch.autograd.grad(y.real.square().sum() + y.imag.sum(), [x, layer.weight]),
        ]

    def errors() -> list[float]:
        pairs = zip(answers(layer, x), answers(exact, x.to(torch.complex128)), strict=True)
        return [float((found - true).norm() / true.norm()) for found, true in pairs]

    ours = errors()
    monkeypatch.setattr(winograd, "MIN_TILES", 10**9)
    assert all(mine <= 1.2 * oneDNNs for mine, oneDNNs in zip(ours, errors(), strict=True))


@needs_avx512
@needs_kernels
def test_a_layer_uses_them_forward_and_backward_and_keeps_its_transformed_weight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[str] = []
    for name in (
        "convolve",
        "weight_gradient",
        "input_gradient",
        "transform_weight",
        "transform_weight_backward",
    ):
        its = getattr(winograd, name)
        monkeypatch.setattr(
            winograd, name, lambda *given, name=name, its=its: called.append(name) or its(*given)
        )
    layer = ComplexConv2d(16, 16, 3)
    x = torch.randn(2, 16, 9, 15, dtype=torch.complex64)
    layer(x).abs().sum().backward()
    # A network's first layer does not need its input's gradient.
    assert called == ["transform_weight", "convolve", "weight_gradient"]
    called.clear()
    layer(x.requires_grad_()).abs().sum().backward()
    backward = ["transform_weight_backward", "transform_weight", "convolve", "input_gradient"]
    assert [name for name in called if name != "transform_weight_backward"][:2] == [
        "transform_weight",
        "convolve",
    ]
    assert set(backward) <= set(called)


@pytest.mark.parametrize(
    ("weight", "numbers"),
    [
        ((24, 16, 3, 3), ((1, 1), (1, 1), (1, 1), False, 1)),
        ((16, 8, 3, 3), ((1, 1), (1, 1), (1, 1), False, 1)),
        ((16, 16, 3, 1), ((1, 1), (1, 1), (1, 1), False, 1)),
        ((16, 16, 3), ((1,), (1,), (1,), False, 1)),
        ((16, 16, 3, 3), ((2, 1), (1, 1), (1, 1), False, 1)),
        ((16, 16, 3, 3), ((1, 1), (1, 1), (1, 2), False, 1)),
        ((16, 16, 3, 3), ((1, 1), (1, 1), (1, 1), True, 1)),
        ((16, 16, 3, 3), ((1, 1), (1, 1), (1, 1), False, 2)),
    ],
)
def test_other_convolutions_are_not_theirs(weight, numbers) -> None:
    assert winograd.shape_of(weight, *numbers) is None


@needs_avx512
@needs_kernels
def test_small_maps_are_not_theirs() -> None:
    shape, x, w, *_ = _problem(*PROBLEMS[0])
    with torch.no_grad():
        assert not shape.serves(x, w)  # 12 tiles of one example's outputs
        x = channels_last(torch.cat([x, x], dim=2))
        assert shape.serves(x, w)
        assert shape.serves(x[:1], w)  # as one example of many
        assert not winograd.Shape(16, 16, (0, 0)).serves(x[..., :2], w)  # nothing comes out
