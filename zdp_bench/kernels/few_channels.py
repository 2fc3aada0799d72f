"""Complex convolutions of few channels, as a network's first, by loops of our own (`tiles.py`): oneDNN's leave lanes idle.

Seen, 3 channels to 16 on 224²: forward 0.9 of its time, the weight's gradient 0.7, the input's 0.55. And the weight's is every
record's own for the same price: what clipping needs in a private step, of any number of channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from zdp_bench.kernels import conv_tiles
from zdp_bench.kernels.jit import Loop, compiled, task_of
from zdp_bench.kernels.memory_format import by_positions, lie_plainly, room_for
from zdp_bench.kernels.simd import LANES

FEW = 4  # complex channels of an input at most


@dataclass(frozen=True)
class Shape:
    """A 2-D convolution's numbers, of one group: `kernel` [*k], and those of torch."""

    outputs: int
    channels: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def reach(self) -> tuple[int, int]:
        """From the first to the last of a kernel's taps."""
        down, across = (
            step * (size - 1) for size, step in zip(self.kernel, self.dilation, strict=True)
        )
        return down, across

    @property
    def around(self) -> tuple[int, int, int, int]:
        """The padding: left, right, above and below."""
        down, across = self.padding
        return across, across, down, down

    def size(self, height: int, width: int) -> tuple[int, int]:
        """The output's, H' and W'."""
        down, across = (
            (size + 2 * around - reach - 1) // step + 1
            for size, around, reach, step in zip(
                (height, width), self.padding, self.reach, self.stride, strict=True
            )
        )
        return down, across

    def serves(self, x: Tensor, *others: Tensor) -> bool:
        """Whether a map of the input x [B, C, H, W], and gradients, are sooner computed by these loops: of few channels."""
        return self.channels <= FEW and self.outputs % LANES == 0 and self.serves_rows(x, *others)

    def serves_rows(self, x: Tensor, *others: Tensor) -> bool:
        """Whether each record's gradients are: of any channels, where rows of outputs are not shorter than a tile (seen: on 8²
        products of patches take half the time, on 16² as much or a third more, on 32² twice as much)."""
        if not lie_plainly(x, *others):
            return False
        height, width = self.size(*x.shape[2:])
        return height > 0 and width >= max(conv_tiles.POSITIONS.values())


@cache
def shape_of(
    weight: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    transposed: bool,
    groups: int,
) -> Shape | None:
    """Of a convolution with a weight [O, C, *k] of this shape; None of one that these loops are not for: they are for 2-D
    convolutions, of whole vectors of outputs, on a processor with AVX-512."""
    if len(weight) != 4 or transposed or groups != 1 or weight[0] % (LANES // 2):
        return None
    if 2 * math.prod(weight[1:]) < conv_tiles.ENTRIES or not conv_tiles.have_their_registers():
        return None
    return Shape(weight[0], weight[1], weight[2:], stride, padding, dilation)


def convolved(shape: Shape, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Complex [B, C, H, W] -> complex [B, O, H', W'], channels-last."""
    return _convolved(shape, x, weight, bias, _convolver())


def gradient(shape: Shape, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Of weight [O, C, *k] and bias [O], from the input and the output gradient [B, O, H', W']."""
    return _folded(shape, _correlated(shape, x, g, _correlator()).sum(dim=(0, 1)))


def gradient_rows(shape: Shape, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Each record's gradients of weight, [B, O, C, *k], and bias, [B, O]."""
    return _folded(shape, _correlated(shape, x, g, _correlator()).sum(dim=1))


def input_gradient(shape: Shape, g: Tensor, weight: Tensor, size: tuple[int, ...]) -> Tensor:
    """[B, O, H', W'] -> [B, C, *size], channels-last; of a convolution with a stride of 1."""
    return _input_gradient(shape, g, weight, size, _distributor())


def _padded(x: Tensor, around: tuple[int, int, int, int]) -> Tensor:
    """As real positions [B, H, W, 2C], with so many zeros to the left, to the right, above and below."""
    reals = torch.view_as_real(by_positions(x).movedim(1, -1)).flatten(-2)
    return F.pad(reals, (0, 0, *around)) if any(around) else reals


def _entries(shape: Shape, padded: Tensor, multiple: int = 1) -> Tensor:
    """Where in a map [B, H, W, 2C] lies what an output position meets."""
    _, line, step, _ = padded.stride()
    return conv_tiles.places(
        (*shape.kernel, 2 * shape.channels),
        (shape.dilation[0] * line, shape.dilation[1] * step, 1),
        multiple,
    )


def _columns(weight: Tensor) -> Tensor:
    """Complex [O, C, *k] -> real [*k, 2C, 2O]: what a real part gives to every output, w, and an imaginary one, i·w."""
    w = weight.permute(2, 3, 1, 0)
    return torch.view_as_real(torch.stack([w, w * 1j], dim=-2)).flatten(-2).flatten(2, 3)


def _convolved(shape: Shape, x: Tensor, weight: Tensor, bias: Tensor | None, loop: Loop) -> Tensor:
    height, width = shape.size(*x.shape[2:])
    x, w = _padded(x, shape.around), _columns(weight)
    lanes = 2 * shape.outputs
    start = x.new_zeros(lanes) if bias is None else bias.resolve_conj().contiguous()
    y = room_for(len(x), shape.outputs, height, width)
    entries, rows = _entries(shape, x), len(x) * height
    words = [
        x.data_ptr(),
        w.data_ptr(),
        start.data_ptr(),
        y.data_ptr(),
        entries.data_ptr(),
        len(entries),
        lanes,
        rows,
        height,
    ]
    words += [width, x.stride(0), shape.stride[0] * x.stride(1), shape.stride[1] * x.stride(2)]
    loop.run(task_of([(-(-rows // conv_tiles.ROWS), words)]))
    return y


def _correlated(shape: Shape, x: Tensor, g: Tensor, loop: Loop) -> Tensor:
    """Real [B, parts, entries and 1, 2O]: what each entry and a one meet in each part of a record's rows."""
    x, g = _padded(x, shape.around), by_positions(g)
    (count, _, height, width), lanes = g.shape, 2 * shape.outputs
    entries = _entries(shape, x, conv_tiles.ENTRIES)
    parts = -(-height // conv_tiles.ROWS)
    m = x.new_zeros(count, parts, len(entries) + 1, lanes)
    words = [
        x.data_ptr(),
        g.data_ptr(),
        m.data_ptr(),
        _ONE.data_ptr(),
        entries.data_ptr(),
        len(entries),
        lanes,
        parts,
        height,
    ]
    words += [width, x.stride(0), shape.stride[0] * x.stride(1), shape.stride[1] * x.stride(2)]
    loop.run(task_of([(count * parts, words)]))
    return m


_ONE = torch.ones(1, device="cpu")


def _folded(shape: Shape, m: Tensor) -> tuple[Tensor, Tensor]:
    """Real [*, entries and 1, 2O] -> complex [*, O, C, *k] and [*, O]: x̄·g, of what the two parts of x have met."""
    met = torch.view_as_complex(m.unflatten(-1, (-1, 2)))  # [*, entries and 1, O]
    parts = met[..., : math.prod(shape.kernel) * 2 * shape.channels, :].unflatten(
        -2, (*shape.kernel, shape.channels, 2)
    )
    weight = parts.select(-2, 0) - parts.select(-2, 1) * 1j  # [*, *k, C, O]
    return weight.movedim((-1, -2), (-4, -3)), met[..., -1, :]


def _input_gradient(
    shape: Shape, g: Tensor, weight: Tensor, size: tuple[int, ...], loop: Loop
) -> Tensor:
    g = by_positions(g)
    (down, across), reals, lanes = shape.reach, 2 * shape.channels, 2 * shape.outputs
    count, height, width = len(g), g.shape[2] + down, g.shape[3] + across
    w = (
        _columns(weight).flip(0, 1).unflatten(-1, (-1, LANES)).movedim(-2, 2).contiguous()
    )  # [*k, L/16, 2C, 16]
    apart = shape.dilation[0] * (width + across) * lanes, shape.dilation[1] * lanes, LANES
    taps = conv_tiles.places((*shape.kernel, lanes // LANES), apart)
    x = room_for(count, shape.channels, height, width)
    parts = -(-height // conv_tiles.HELD)
    words = [
        g.data_ptr(),
        w.data_ptr(),
        x.data_ptr(),
        taps.data_ptr(),
        len(taps),
        lanes,
        reals,
        parts,
    ]
    words += [height, width, down, across]
    loop.run(task_of([(count * parts, words)]))
    # What was padded has a gradient, too.
    return by_positions(x[:, :, shape.padding[0] :, shape.padding[1] :][:, :, : size[0], : size[1]])


@cache
def _convolver() -> Loop:
    return compiled(conv_tiles.convolve)


@cache
def _correlator() -> Loop:
    return compiled(conv_tiles.correlate)


@cache
def _distributor() -> Loop:
    return compiled(conv_tiles.distribute)
