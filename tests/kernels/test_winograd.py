"""Convolutions with fewer products: torch's own complex convolution, in value and every gradient, and silent where they are not
for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.nn.torchs_convolution import close, expected, needs_wide_vectors
from zdp_bench.kernels import winograd
from zdp_bench.kernels.memory_format import channels_last, rounded_alike
from zdp_bench.nn import convolution
from zdp_bench.nn.convolution import ComplexConv2d, weights_kept

# Outputs, channels, padding, records, and sizes of maps: odd ones, padding none and more than a kernel has use for, fewer tiles
# than a product takes, more than a thread holds, more than a part has, several slices of channels.
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
    outputs: int, channels: int, padding: tuple[int, int], records: int, size: tuple[int, int]
) -> tuple[winograd.Shape, Tensor, Tensor, Tensor, Tensor]:
    """The loops' shape, and x, weight, bias and output gradient in complex64."""
    shape = winograd.shape_of((outputs, channels, 3, 3), (1, 1), padding, (1, 1), False, 1)
    assert shape is not None
    torch.manual_seed(outputs + channels)
    sizes = (
        (records, channels, *size),
        (outputs, channels, 3, 3),
        (outputs,),
        (records, outputs, *shape.size(*size)),
    )
    x, w, bias, g = (torch.randn(each, dtype=torch.complex64) for each in sizes)
    return shape, channels_last(x), w, bias, channels_last(g)


def _expected(
    shape: winograd.Shape, x: Tensor, w: Tensor, bias: Tensor, g: Tensor
) -> tuple[Tensor, ...]:
    return expected(x, w, bias, g, (1, 1), shape.padding)


@needs_wide_vectors
@pytest.mark.parametrize("numbers", PROBLEMS, ids=str)
def test_equal_torchs_complex_convolution(numbers) -> None:
    shape, x, w, bias, g = _problem(*numbers)
    y, of_x, of_w, _ = _expected(shape, x, w, bias, g)
    close(winograd.convolved(shape, x, winograd.filters(w), bias), y)
    close(winograd.convolved(shape, x, winograd.filters(w), None), y - bias.view(-1, 1, 1))
    close(winograd.input_gradient(shape, g, winograd.backward_filters(w)), of_x)
    rows, squares = winograd.gradient_rows(shape, x, g)
    close(rows, of_w)
    assert torch.allclose(
        squares, torch.view_as_real(rows).double().square().flatten(1).sum(dim=1), rtol=1e-12
    )
    close(winograd.gradient(shape, x, g), of_w.sum(0))


@needs_wide_vectors
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
    y, of_x, of_w, _ = _expected(shape, *(each.resolve_conj() for each in (x, w, bias, g)))
    close(winograd.convolved(shape, x, winograd.filters(w), bias), y)
    close(winograd.input_gradient(shape, g, winograd.backward_filters(w)), of_x)
    close(winograd.gradient_rows(shape, x, g)[0], of_w)


@needs_wide_vectors
def test_what_comes_out_lies_as_others_want_it() -> None:
    """Maps channels-last; a weight's gradient as the weight, so that noise and optimizer need no copy."""
    shape, x, w, bias, g = _problem(*PROBLEMS[0])
    for found in (
        winograd.convolved(shape, x, winograd.filters(w), bias),
        winograd.input_gradient(shape, g, winograd.filters(w)),
    ):
        assert found.movedim(1, -1).is_contiguous()
    assert winograd.gradient(shape, x, g).is_contiguous()
    assert winograd.gradient_rows(shape, x, g)[0].is_contiguous()


@needs_wide_vectors
@pytest.mark.parametrize("numbers", [PROBLEMS[0], PROBLEMS[5], *PROBLEMS[-2:]], ids=str)
def test_any_number_of_threads_gives_the_same_bits(
    numbers, set_threads: Callable[[int], None]
) -> None:
    shape, x, w, bias, g = _problem(*numbers)
    filters, back = winograd.filters(w), winograd.backward_filters(w)
    found = []
    for threads in (1, 2, 3):
        set_threads(threads)
        maps = winograd.convolved(shape, x, filters, bias), winograd.input_gradient(shape, g, back)
        found.append([*maps, *winograd.gradient_rows(shape, x, g), winograd.gradient(shape, x, g)])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("tiles", [1, 6, 7, 100, 400, 1601, 25_600])
@pytest.mark.parametrize("threads", [1, 2, 3, 16])
@pytest.mark.parametrize(("outputs", "channels"), [(16, 16), (128, 64), (128, 128), (48, 1024)])
def test_every_thread_has_as_many_shares_and_none_has_more_than_is_held(
    tiles: int, threads: int, outputs: int, channels: int
) -> None:
    shares, room, slices = winograd._shares(
        tiles, winograd.Shape(outputs, channels, (1, 1)), threads
    )
    assert (
        shares * slices % threads == 0 or shares * winograd.POSITIONS < tiles + winograd.POSITIONS
    )  # or a product each
    assert room % winograd.POSITIONS == 0
    assert room <= (winograd.HELD if outputs * channels < 128 * 128 else winograd.HELD_OF_LARGE)
    assert outputs % (16 * slices) == 0
    assert slices == 1 or shares <= threads // slices  # a weight comes from memory once
    assert (
        shares * room >= tiles > shares * (room - winograd.POSITIONS) - winograd.POSITIONS
    )  # and no more than it needs


@needs_wide_vectors
def test_no_record_sees_another() -> None:
    """Neither one that is not finite, nor how many there are: a record's outputs and gradients keep their bits."""
    shape, x, w, bias, g = _problem(*PROBLEMS[0])
    spoilt, spoilt_g = x.clone(), g.clone()
    spoilt[1], spoilt_g[1] = float("nan"), float("inf")
    filters, back = winograd.filters(w), winograd.backward_filters(w)

    def answers(x: Tensor, g: Tensor) -> list[Tensor]:
        maps = [
            winograd.convolved(shape, x, filters, bias),
            winograd.input_gradient(shape, g, back),
        ]
        return [*maps, *winograd.gradient_rows(shape, x, g)]

    for clean, other, alone in zip(
        answers(x, g), answers(spoilt, spoilt_g), answers(x[2:], g[2:]), strict=True
    ):
        assert torch.equal(clean[[0, 2]], other[[0, 2]])
        assert not other[1].isfinite().all()
        assert torch.equal(clean[2:], alone)


@needs_wide_vectors
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
    monkeypatch.setattr(winograd, "MANY_TILES", 10**9)
    assert all(mine <= 1.2 * oneDNNs for mine, oneDNNs in zip(ours, errors(), strict=True))


@needs_wide_vectors
def test_a_layer_takes_them_forward_and_backward_and_keeps_its_filters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[str] = []
    for name in ("convolved", "gradient", "input_gradient", "filters", "backward_filters"):
        its = getattr(winograd, name)
        monkeypatch.setattr(
            winograd, name, lambda *given, name=name, its=its: called.append(name) or its(*given)
        )
    layer = ComplexConv2d(16, 16, 3)
    x = torch.randn(2, 16, 9, 15, dtype=torch.complex64)
    layer(x).abs().sum().backward()
    assert called == [
        "filters",
        "convolved",
        "gradient",
    ]  # a network's first layer has no use for its input's gradient
    called.clear()
    with weights_kept(layer):
        for _ in range(2):
            layer(x.requires_grad_()).abs().sum().backward()
        once = ["filters", "convolved", "backward_filters", "filters", "input_gradient", "gradient"]
        assert called == [*once, "convolved", "input_gradient", "gradient"]
        with torch.no_grad():
            layer.weight.mul_(2)
        layer(x)
        assert called[-2:] == ["filters", "convolved"]
    assert not convolution._kept


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


@needs_wide_vectors
def test_other_tensors_are_not_theirs() -> None:
    shape, x, w, *_ = _problem(*PROBLEMS[0])
    with torch.no_grad():
        assert not shape.serves(x, w)  # 12 tiles of one record's outputs
        x = channels_last(torch.cat([x, x], dim=2))
        assert shape.serves(x, w)
        assert shape.serves(x[:1], w)  # as one record of many
        assert not shape.serves(x.to(torch.complex128), w)
        assert not shape.serves(x.to("meta"), w)
        assert not winograd.Shape(16, 16, (0, 0)).serves(x[..., :2], w)  # nothing comes out
        with torch.autocast("cpu"):
            assert not shape.serves(x, w)
        with rounded_alike(), rounded_alike():
            assert not shape.serves(x, w)
        assert shape.serves(x, w)
    with torch.enable_grad():
        assert not shape.serves(x, w)  # a gradient of theirs has none
