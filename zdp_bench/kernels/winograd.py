"""Complex 3×3 convolutions of many channels by Winograd's minimal filtering F(2×2, 3×3).

A tile of 2×2 outputs meets a tile d of 4×4 inputs, with 16 products instead of 36 (Lavin & Gray
2016, "Fast algorithms for convolutional neural networks", section 4.1). With ∘ for the product
entry by entry, summed over channels:

    the outputs             Aᵀ [ (G w Gᵀ) ∘ (Bᵀ d B) ] A
    the input's gradient    the same, of output gradient and rotated conjugate filter
    the weight's gradient   Gᵀ [ Σ_tiles (A g Aᵀ) ∘ (Bᵀ d B)‾ ] G

The loops (`loops.py`) transform as many tiles as fit a core's cache, multiply 16 matrices
and transform back, so that only the weight is ever transformed in memory. A weight's gradient costs
the same for each example as for their sum. Errors are half those of oneDNN's real convolution of
interleaved channels, because fewer numbers are summed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from zdp_bench.kernels import may_run

PANEL = 32  # real numbers of an output position that are computed together
HELD = 60  # tiles that a thread transforms before it multiplies them, to fit its cache
POSITIONS = 6  # tiles that a product takes at once; HELD is a multiple
MIN_TILES = 16  # of one example's outputs: below, transforming the weight costs more than it saves
SLICE = 128  # channels and outputs of a chunk of a weight's gradient at most
LARGE = 2 * 2**20  # bytes of a transformed weight that do not stay in a core's cache
HELD_OF_LARGE = 204  # tiles that are transformed at once for such a weight
TILES_A_PART = 1024  # tiles whose gradients are summed by themselves, at least
MAX_PARTS = 8


@dataclass(frozen=True)
class Shape:
    """A 3×3 convolution with a stride and a dilation of 1, in one group."""

    outputs: int
    channels: int
    padding: tuple[int, ...]

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """H' and W' for an input of this size."""
        return height + 2 * self.padding[0] - 2, width + 2 * self.padding[1] - 2

    def backward(self) -> Shape:
        """The convolution that turns an output's gradient into the input's."""
        return Shape(self.channels, self.outputs, tuple(2 - size for size in self.padding))

    def serves(self, x: Tensor, *others: Tensor) -> bool:
        """True if this kernel may run on the input x [B, C, H, W] and these gradients, and pays.

        Ignores the batch size on purpose: one example's rounding must not depend on who else is in
        the batch.
        """
        large = min(self.output_size(*x.shape[2:])) > 0 and self.tiles(x) >= MIN_TILES
        return large and may_run(torch.complex64, x, *others)

    def tiles(self, x: Tensor) -> int:
        """The number of tiles of one example's outputs."""
        return math.prod(-(-size // 2) for size in self.output_size(*x.shape[2:]))


@cache
def shape_of(
    weight: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    transposed: bool,
    groups: int,
) -> Shape | None:
    """The shape of a convolution with a weight [O, C, *k], or None if this kernel cannot do it.

    Outputs and channels must be multiples of 16.
    """
    plain = stride == dilation == (1, 1) and weight[2:] == (3, 3) and not transposed and groups == 1
    whole = plain and 2 * weight[0] % PANEL == 0 and 2 * weight[1] % PANEL == 0
    return Shape(weight[0], weight[1], padding) if whole else None


_G = torch.tensor([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1]], device="cpu")
_OF_FILTER = torch.kron(_G, _G)  # [16, 9]


def transform_weight(weight: Tensor) -> Tensor:
    """G w Gᵀ of a complex weight [O, C, 3, 3], as `convolve` takes it: [16, O/16, C, 16]."""
    panels = weight.unflatten(0, (-1, PANEL // 2)).permute(3, 4, 0, 2, 1).contiguous()
    numbers = torch.view_as_real(panels.resolve_conj())  # [3, 3, O/16, C, 16, 2]
    transformed = _OF_FILTER @ numbers.view(9, -1)
    return torch.view_as_complex(transformed.view(16, *numbers.shape[2:]))


def transform_weight_backward(weight: Tensor) -> Tensor:
    """The transformed weight as `input_gradient` takes it."""
    return transform_weight(weight.conj().transpose(0, 1).flip(2, 3))


def convolve(shape: Shape, x: Tensor, transformed: Tensor, bias: Tensor | None) -> Tensor:
    """Complex [B, C, H, W] -> complex [B, O, H', W'], channels-last.

    Args:
        transformed: `transform_weight(weight)`.
    """
    height, width = shape.output_size(*x.shape[2:])
    tiles, x = len(x) * shape.tiles(x), _channels_last(x)
    start = x.new_zeros(shape.outputs) if bias is None else bias.resolve_conj().contiguous()
    y = torch.empty(
        (len(x), shape.outputs, height, width),
        dtype=x.dtype,
        device="cpu",
        memory_format=torch.channels_last,
    )
    chunks, held, slices = _cut(tiles, shape, torch.get_num_threads())
    words = [x.data_ptr(), transformed.data_ptr(), start.data_ptr(), y.data_ptr()]
    words += [2 * shape.channels, 2 * shape.outputs, *x.shape[2:], *shape.padding, height, width]
    _loop("convolve").run(chunks * slices, [*words, tiles, chunks, held, slices])
    return y


def input_gradient(shape: Shape, g: Tensor, transformed: Tensor) -> Tensor:
    """[B, O, H', W'] -> [B, C, H, W], channels-last.

    Args:
        transformed: `transform_weight_backward(weight)`.
    """
    return convolve(shape.backward(), g, transformed, None)


def weight_gradient(shape: Shape, x: Tensor, g: Tensor) -> Tensor:
    """The gradient [O, C, 3, 3], from the input and the output gradient [B, O, H', W']."""
    return _weight_gradients(shape, x, g, 1)[0][0]


def per_sample_gradients(shape: Shape, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Each example's gradient, [B, O, C, 3, 3], and its squared norm, [B] in float64."""
    return _weight_gradients(shape, x, g, len(x))


def _weight_gradients(shape: Shape, x: Tensor, g: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """[groups, O, C, 3, 3], each of as many examples, and squared norms [groups]."""
    tiles, x, g = len(x) // groups * shape.tiles(x), _channels_last(x), _channels_last(g)
    parts = _parts(tiles)
    slices, others = _slices(shape.channels), _slices(shape.outputs)
    chunks = groups * parts * slices * others
    gradients = x.new_empty(groups, shape.outputs, shape.channels, 3, 3)
    sums = done = gradients[:0]
    if parts > 1:  # with one part a thread keeps its sums in its own memory
        entries = shape.channels // slices * (shape.outputs // others) + PANEL // 4
        sums = x.new_empty(chunks, 16, entries)
        done = x.new_zeros(chunks // parts, dtype=torch.int64)
    tiles_a_part = -(-tiles // parts)
    held = tiles_a_part if tiles_a_part <= 2 * HELD else HELD
    squares = x.new_empty(groups, slices * others, dtype=torch.float64)
    words = [x.data_ptr(), g.data_ptr(), sums.data_ptr(), done.data_ptr(), gradients.data_ptr()]
    words += [2 * shape.channels, 2 * shape.outputs, *x.shape[2:], *shape.padding, *g.shape[2:]]
    words += [tiles, parts, slices, others, held, squares.data_ptr()]
    _loop("correlate").run(chunks, words)
    return gradients, squares.sum(dim=1)


def _channels_last(x: Tensor) -> Tensor:
    return x.resolve_conj().contiguous(memory_format=torch.channels_last)


def _cut(tiles: int, shape: Shape, threads: int) -> tuple[int, int, int]:
    """Return (chunks of tiles, most tiles of a chunk, slices of the outputs).

    No bit of the result depends on it. Every thread gets as many chunks as another. A weight that
    is larger than a cache is read from memory with every chunk, so then chunks are few, and where
    there would be only one for each thread, each takes all tiles and a slice of the weight.
    """
    large = 16 * 8 * shape.outputs * shape.channels >= LARGE
    held = HELD_OF_LARGE if large else HELD
    products, panels = -(-tiles // POSITIONS), 2 * shape.outputs // PANEL
    slices = math.gcd(panels, threads) if large and tiles <= held else 1
    threads //= slices
    chunks = min(products, threads * -(-products * POSITIONS // (held * threads)))
    return chunks, -(-products // chunks) * POSITIONS, slices


def _parts(tiles: int) -> int:
    """The number of parts that tiles are summed in: a power of two, which threads share evenly."""
    return next(n for n in (1, 2, 4, 8) if n == MAX_PARTS or n * TILES_A_PART >= tiles)


def _slices(channels: int) -> int:
    """The number of slices of whole panels that channels are cut into."""
    panels = 2 * channels // PANEL
    return next(n for n in range(-(-channels // SLICE), panels + 1) if panels % n == 0)


@cache
def _loop(name: str) -> Any:
    """The compiled loop of this name; numba is imported here, at a kernel's first call."""
    from zdp_bench.kernels import loops
    from zdp_bench.kernels.jit import compile_loop

    return compile_loop(getattr(loops, name))
