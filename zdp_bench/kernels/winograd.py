"""Complex 3×3 convolutions of many channels with 16 products where there are 36: Winograd's minimal filtering, F(2×2, 3×3).

A tile of 2×2 outputs meets a tile d of 4×4 inputs (Lavin & Gray 2016, "Fast algorithms for convolutional neural networks",
section 4.1). With ∘ for the product entry by entry, summed over channels:

    the outputs             Aᵀ [ (G w Gᵀ) ∘ (Bᵀ d B) ] A
    the input's gradient    the same, of the output gradient and the filter turned around, its channels exchanged and conjugated
    the weight's            Gᵀ [ Σ_tiles (A g Aᵀ) ∘ (Bᵀ d B)‾ ] G

Between the transforms, sums and differences of few numbers, lie 16 products of matrices, of as many tiles as a thread's cache
holds (`winograd_tiles.py`): nothing transformed goes to memory but the weight. oneDNN has no such convolution.

Seen, against oneDNN's real one of interleaved channels: 0.55 of its time from 64 channels on, 0.65 for 32, 0.75 for 16, forward
and for either gradient, and half its error, for there are fewer sums. A weight's gradient is every record's own for the same
price, as with `few_channels.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from zdp_bench.kernels import conv_tiles, winograd_tiles
from zdp_bench.kernels.jit import Loop, compiled, task_of
from zdp_bench.kernels.memory_format import by_positions, lie_plainly, room_for
from zdp_bench.kernels.simd import LANES
from zdp_bench.kernels.winograd_tiles import HELD, PANEL, POSITIONS

MANY_TILES = (
    16  # of a record's outputs: below, transforming the weight costs what fewer products spare
)
SLICE = 128  # channels and outputs of a share of a weight's gradient at most
LARGE = (
    2 * 2**20
)  # bytes of a transformed weight that do not stay in a thread's cache, and the tiles that meet it at once
HELD_OF_LARGE = 204
A_PART, PARTS = (
    1024,
    8,
)  # tiles, at least, whose gradients are summed by themselves, and such parts at most


@dataclass(frozen=True)
class Shape:
    """A 3×3 convolution's numbers: with a stride and a dilation of 1, of one group."""

    outputs: int
    channels: int
    padding: tuple[int, ...]

    def size(self, height: int, width: int) -> tuple[int, int]:
        """The output's, H' and W'."""
        return height + 2 * self.padding[0] - 2, width + 2 * self.padding[1] - 2

    def backward(self) -> Shape:
        """Of the convolution that makes an input's gradient of an output's."""
        return Shape(self.channels, self.outputs, tuple(2 - around for around in self.padding))

    def serves(self, x: Tensor, *others: Tensor) -> bool:
        """Whether a map of the input x [B, C, H, W], and gradients, are sooner computed this way. How many records there are
        has no say: what is computed for one would be rounded otherwise if another came."""
        return (
            min(self.size(*x.shape[2:])) > 0
            and self.tiles(x) >= MANY_TILES
            and lie_plainly(x, *others)
        )

    def tiles(self, x: Tensor) -> int:
        """Of one record."""
        return math.prod(-(-size // 2) for size in self.size(*x.shape[2:]))


@cache
def shape_of(
    weight: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    transposed: bool,
    groups: int,
) -> Shape | None:
    """Of a convolution with a weight [O, C, *k] of this shape; None of one that these loops are not for: they are for whole
    panels of outputs and of channels, on a processor with AVX-512."""
    plain = stride == dilation == (1, 1) and weight[2:] == (3, 3) and not transposed and groups == 1
    whole = plain and 2 * weight[0] % PANEL == 0 and 2 * weight[1] % PANEL == 0
    return (
        Shape(weight[0], weight[1], padding)
        if whole and conv_tiles.have_their_registers()
        else None
    )


_G = torch.tensor([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]], device="cpu")
OF_FILTER = torch.kron(_G, _G)  # [16, 9]


def filters(weight: Tensor) -> Tensor:
    """G w Gᵀ of a complex weight [O, C, 3, 3] as `convolved` takes it, complex [16, O/16, C, 16]."""
    panels = (
        weight.unflatten(0, (-1, PANEL // 2)).permute(3, 4, 0, 2, 1).contiguous()
    )  # [3, 3, O/16, C, 16]
    numbers = torch.view_as_real(panels.resolve_conj())
    return torch.view_as_complex((OF_FILTER @ numbers.view(9, -1)).view(16, *numbers.shape[2:]))


def backward_filters(weight: Tensor) -> Tensor:
    """Likewise, as `input_gradient` takes it."""
    return filters(weight.conj().transpose(0, 1).flip(2, 3))


def convolved(shape: Shape, x: Tensor, filters: Tensor, bias: Tensor | None) -> Tensor:
    """Complex [B, C, H, W] -> complex [B, O, H', W'], channels-last."""
    return _convolved(shape, x, filters, bias, _convolver())


def input_gradient(shape: Shape, g: Tensor, backward_filters: Tensor) -> Tensor:
    """[B, O, H', W'] -> [B, C, H, W], channels-last."""
    return _convolved(shape.backward(), g, backward_filters, None, _convolver())


def gradient(shape: Shape, x: Tensor, g: Tensor) -> Tensor:
    """Of the weight, [O, C, 3, 3], from the input and the output gradient [B, O, H', W']."""
    return _gradients(shape, x, g, 1, _parts(len(x) * shape.tiles(x)), _correlator())[0][0]


def gradient_rows(shape: Shape, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Each record's gradient of the weight, [B, O, C, 3, 3], and its squared norm, [B] in float64."""
    return _gradients(shape, x, g, len(x), _parts(shape.tiles(x)), _correlator())


def _convolved(shape: Shape, x: Tensor, filters: Tensor, bias: Tensor | None, loop: Loop) -> Tensor:
    height, width = shape.size(*x.shape[2:])
    every, x = len(x) * shape.tiles(x), by_positions(x)
    lanes, reals = 2 * shape.outputs, 2 * shape.channels
    start = x.new_zeros(shape.outputs) if bias is None else bias.resolve_conj().contiguous()
    y = room_for(len(x), shape.outputs, height, width)
    shares, room, slices = _shares(
        every, shape, torch.get_num_threads()
    )  # no number depends on those beside it
    words = [x.data_ptr(), filters.data_ptr(), start.data_ptr(), y.data_ptr(), reals, lanes]
    words += [*x.shape[2:], *shape.padding, height, width, every, shares, room, slices]
    loop.run(task_of([(shares * slices, words)]))
    return y


def _gradients(
    shape: Shape, x: Tensor, g: Tensor, groups: int, parts: int, loop: Loop
) -> tuple[Tensor, Tensor]:
    """[groups, O, C, 3, 3], of as many records each, and squared norms [groups]."""
    a_group, (x, g) = len(x) // groups * shape.tiles(x), (by_positions(x), by_positions(g))
    slices, others = _slices(shape.channels), _slices(shape.outputs)
    a_part = -(-a_group // parts)
    shares = groups * parts * slices * others
    to = x.new_empty(groups, shape.outputs, shape.channels, 3, 3)
    m = done = to[:0]
    if parts > 1:  # else a thread keeps what it makes
        m = x.new_empty(
            shares, 16, shape.channels // slices * (shape.outputs // others) + LANES // 2
        )
        done = x.new_zeros(shares // parts, dtype=torch.int64)
    words = [
        x.data_ptr(),
        g.data_ptr(),
        m.data_ptr(),
        done.data_ptr(),
        to.data_ptr(),
        2 * shape.channels,
        2 * shape.outputs,
    ]
    held = a_part if a_part <= 2 * HELD else HELD  # at once: few are transformed together
    squares = x.new_empty(groups, slices * others, dtype=torch.float64)
    words += [
        *x.shape[2:],
        *shape.padding,
        *g.shape[2:],
        a_group,
        parts,
        slices,
        others,
        held,
        squares.data_ptr(),
    ]
    loop.run(task_of([(shares, words)]))
    return to, squares.sum(dim=1)


def _shares(tiles: int, shape: Shape, threads: int) -> tuple[int, int, int]:
    """Into how many shares so many tiles are cut, as many for one thread as for another; how many one has at most, whole ones of
    a product; and into how many slices outputs are cut.

    A weight that is larger than a cache comes from memory with every share. So those are few, and where there would be one to a
    thread, each thread takes all tiles, and a slice of the weight.
    """
    large = 16 * 8 * shape.outputs * shape.channels >= LARGE
    held, products, panels = (
        HELD_OF_LARGE if large else HELD,
        -(-tiles // POSITIONS),
        2 * shape.outputs // PANEL,
    )
    slices = math.gcd(panels, threads) if large and tiles <= held else 1
    threads //= slices
    shares = min(products, threads * -(-products * POSITIONS // (held * threads)))
    return shares, -(-products // shares) * POSITIONS, slices


def _parts(tiles: int) -> int:
    """Into how many parts so many tiles are cut: a power of two, which threads share evenly."""
    return next(count for count in (1, 2, 4, 8) if count == PARTS or count * A_PART >= tiles)


def _slices(channels: int) -> int:
    """Into how many slices of whole panels channels are cut."""
    panels = 2 * channels // PANEL
    return next(count for count in range(-(-channels // SLICE), panels + 1) if panels % count == 0)


@cache
def _convolver() -> Loop:
    return compiled(winograd_tiles.convolve)


@cache
def _correlator() -> Loop:
    return compiled(winograd_tiles.correlate)
