"""Winograd's convolutions equal torch's complex convolution, in value and every gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

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
@pytest.mark.parametrize("numbers", [PROBLEMS[0], PROBLEMS[5], PROBLEMS[-1]], ids=str)
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


@pytest.mark.parametrize("tiles", [1, 7, 400, 25_600])
@pytest.mark.parametrize("threads", [1, 3, 16])
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
def test_a_layer_uses_them_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    called: set[str] = set()
    for name in ("convolve", "weight_gradient", "input_gradient"):
        its = getattr(winograd, name)
        monkeypatch.setattr(
            winograd, name, lambda *given, name=name, its=its: called.add(name) or its(*given)
        )
    x = torch.randn(2, 16, 9, 15, dtype=torch.complex64, requires_grad=True)
    ComplexConv2d(16, 16, 3)(x).abs().sum().backward()
    assert called == {"convolve", "weight_gradient", "input_gradient"}


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
