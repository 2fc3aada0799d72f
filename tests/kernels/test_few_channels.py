"""Loops for few channels: torch's own complex convolution, in value and every gradient, and silent where they are not for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.nn.torchs_convolution import close, expected, needs_wide_vectors
from zdp_bench.kernels import conv_tiles, few_channels
from zdp_bench.kernels.memory_format import channels_last
from zdp_bench.nn.convolution import ComplexConv2d

# Outputs, channels, kernel, stride, padding, dilation, and sizes of maps: every tile, rows that end in the middle of one, maps of
# more rows than a share, taps far apart, entries that are no multiple of a tile's.
SHAPES = [
    ((8, 1, 3, 3), (1, 1), (0, 0), (1, 1), (3, 14)),
    ((16, 3, 3, 3), (1, 1), (1, 1), (1, 1), (40, 13)),
    ((32, 2, 3, 3), (1, 1), (2, 1), (2, 3), (9, 21)),
    ((56, 4, 5, 3), (1, 1), (0, 3), (1, 1), (67, 12)),
    ((24, 3, 1, 2), (1, 1), (0, 0), (1, 1), (1, 17)),
    ((16, 2, 7, 7), (2, 3), (3, 3), (1, 1), (70, 40)),
    ((8, 1, 5, 1), (3, 1), (4, 0), (2, 1), (8, 12)),
    ((8, 9, 3, 3), (2, 2), (1, 1), (1, 1), (7, 5)),
    ((64, 4, 3, 3), (1, 1), (1, 0), (1, 1), (7, 14)),
]


def _problem(
    weight: tuple[int, ...], stride, padding, dilation, size
) -> tuple[few_channels.Shape, Tensor, Tensor, Tensor, Tensor]:
    """The loops' shape, and x, weight, bias and output gradient in complex64."""
    shape = few_channels.shape_of(weight, stride, padding, dilation, False, 1)
    assert shape is not None
    torch.manual_seed(sum(weight))
    x, w = (
        torch.randn(3, weight[1], *size, dtype=torch.complex64),
        torch.randn(weight, dtype=torch.complex64),
    )
    bias, g = (
        torch.randn(n, dtype=torch.complex64)
        for n in (weight[0], (3, weight[0], *shape.size(*size)))
    )
    return shape, channels_last(x), w, bias, channels_last(g)


def _expected(
    shape: few_channels.Shape, x: Tensor, w: Tensor, bias: Tensor, g: Tensor
) -> tuple[Tensor, ...]:
    return expected(x, w, bias, g, shape.stride, shape.padding, shape.dilation)


@needs_wide_vectors
@pytest.mark.parametrize("numbers", SHAPES, ids=str)
def test_equal_torchs_complex_convolution(numbers) -> None:
    shape, x, w, bias, g = _problem(*numbers)
    y, of_x, of_w, of_bias = _expected(shape, x, w, bias, g)
    if shape.channels <= few_channels.FEW:
        close(few_channels.convolved(shape, x, w, bias), y)
        close(few_channels.convolved(shape, x, w, None), y - bias.view(-1, 1, 1))
    for found, exact in zip(few_channels.gradient_rows(shape, x, g), (of_w, of_bias), strict=True):
        close(found, exact)
    for found, exact in zip(
        few_channels.gradient(shape, x, g), (of_w.sum(0), of_bias.sum(0)), strict=True
    ):
        close(found, exact)
    if shape.stride == (1, 1):
        close(few_channels.input_gradient(shape, g, w, x.shape[2:]), of_x)


@needs_wide_vectors
@pytest.mark.parametrize("layout", ["channels first", "conjugated", "every second column"])
def test_any_layout_is_read_rightly(layout: str) -> None:
    shape, x, w, bias, g = _problem(*SHAPES[1])
    if layout == "channels first":
        x, g = x.contiguous(), g.contiguous()
    elif layout == "conjugated":
        x, g, w, bias = x.conj(), g.conj(), w.conj(), bias.conj()
    else:
        x = torch.stack([x, 1e9 * x], dim=-1).flatten(-2)[..., ::2]
    y, of_x, of_w, _ = _expected(shape, *(each.resolve_conj() for each in (x, w, bias, g)))
    close(few_channels.convolved(shape, x, w, bias), y)
    close(few_channels.gradient_rows(shape, x, g)[0], of_w)
    close(few_channels.input_gradient(shape, g, w, x.shape[2:]), of_x)


@needs_wide_vectors
def test_any_number_of_threads_gives_the_same_bits(set_threads: Callable[[int], None]) -> None:
    shape, x, w, bias, g = _problem(*SHAPES[1])
    found = []
    for threads in (1, 2, 3):
        set_threads(threads)
        of_x = few_channels.input_gradient(shape, g, w, x.shape[2:])
        found.append(
            [
                few_channels.convolved(shape, x, w, bias),
                of_x,
                *few_channels.gradient_rows(shape, x, g),
            ]
        )
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@needs_wide_vectors
def test_no_record_sees_another() -> None:
    """A record that is not finite leaves the others' outputs and gradients as they are."""
    shape, x, w, bias, g = _problem(*SHAPES[1])
    spoilt, spoilt_g = x.clone(), g.clone()
    spoilt[1], spoilt_g[1] = float("nan"), float("inf")
    kept = [0, 2]
    found = []
    for its_x, its_g in ((x, g), (spoilt, spoilt_g)):
        of_x = few_channels.input_gradient(shape, its_g, w, x.shape[2:])
        found.append(
            [
                few_channels.convolved(shape, its_x, w, bias),
                of_x,
                *few_channels.gradient_rows(shape, its_x, its_g),
            ]
        )
    for clean, other in zip(*found, strict=True):
        assert torch.equal(clean[kept], other[kept])
        assert not other[1].isfinite().all()


@needs_wide_vectors
def test_a_layer_takes_them_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    for name in ("convolved", "gradient", "input_gradient"):
        its = getattr(few_channels, name)
        monkeypatch.setattr(
            few_channels,
            name,
            lambda *given, name=name, its=its: called.append(name) or its(*given),
        )
    layer = ComplexConv2d(2, 16, 3)
    x = torch.randn(2, 2, 9, 15, dtype=torch.complex64)
    layer(x).abs().sum().backward()
    assert called == [
        "convolved",
        "gradient",
    ]  # a network's first layer has no use for its input's gradient
    layer(x.requires_grad_()).abs().sum().backward()
    assert called[2:] == ["convolved", "input_gradient", "gradient"]


@pytest.mark.parametrize(
    ("weight", "more"),
    [
        ((12, 2, 3, 3), (False, 1)),
        ((8, 2, 1, 1), (False, 1)),
        ((8, 2, 9), (False, 1)),
        ((8, 2, 3, 3), (True, 1)),
        ((8, 2, 3, 3), (False, 2)),
    ],
)
def test_other_convolutions_are_not_theirs(weight: tuple[int, ...], more: tuple[bool, int]) -> None:
    one, none = (1,) * (len(weight) - 2), (0,) * (len(weight) - 2)
    assert few_channels.shape_of(weight, one, none, one, *more) is None


@needs_wide_vectors
def test_other_tensors_are_not_theirs() -> None:
    shape, x, w, *_ = _problem(*SHAPES[1])
    with torch.no_grad():
        assert shape.serves(x, w)
        assert not shape.serves(x.to(torch.complex128), w)
        assert not shape.serves(x[:0], w)
        assert not few_channels.Shape(
            16, few_channels.FEW + 1, (3, 3), (1, 1), (1, 1), (1, 1)
        ).serves(x, w)
        assert not few_channels.Shape(8, 3, (3, 3), (1, 1), (1, 1), (1, 1)).serves(x, w)
        assert not shape.serves(
            x[..., : max(conv_tiles.POSITIONS.values()) - 3], w
        )  # narrower than a tile
        assert not shape.serves(x.to("meta"), w)
        assert (
            torch.func.vmap(lambda z: torch.tensor(shape.serves(z[None], w)))(x).logical_not().all()
        )
        with torch.autocast("cpu"):
            assert not shape.serves(x, w)
    with torch.enable_grad():
        assert not shape.serves(x, w)  # a gradient of theirs has none
