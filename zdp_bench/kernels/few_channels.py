"""Complex convolutions of few channels, as a network's first, by loops of our own (`tiles.py`): oneDNN's leave lanes idle.

Seen, 3 channels to 16 on 224²: forward 0.9 of its time, the weight's gradient 0.7, the input's 0.55. And the weight's is every
record's own for the same price: what clipping needs in a private step, of any number of channels. Forward, 3×3 convolutions of 3
and 4 channels have fewer products than that (`winograd_rows.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from zdp_bench.kernels import conv_tiles, winograd, winograd_rows
from zdp_bench.kernels.jit import Loop, compiled, task_of
from zdp_bench.kernels.memory_format import by_positions, lie_plainly, room_for
from zdp_bench.kernels.simd import LANES
from zdp_bench.kernels.winograd_tiles import PANEL

FEW = 4  # complex channels of an input at most
PAST = 2**27  # bytes of an output that no cache holds until it is read


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

    @property
    def fewer_products(self) -> bool:
        """Whether outputs are sooner computed by Winograd's minimal filtering: plain 3×3 convolutions, of whole panels of outputs
        (seen, over the direct loop: 0.7 to 0.8 of its time for 3 and 4 channels, 0.95 for 2 and 1.3 for 1)."""
        plain = self.kernel == (3, 3) and self.stride == self.dilation == (1, 1)
        return plain and self.channels in (3, 4) and 2 * self.outputs % PANEL == 0

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
    if shape.fewer_products:
        return _convolved_by_fewer_products(shape, x, weight, bias, _minimal_convolver(), PAST)
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


def _convolved_by_fewer_products(
    shape: Shape, x: Tensor, weight: Tensor, bias: Tensor | None, loop: Loop, past: int
) -> Tensor:
    """Outputs of `past` bytes and more are stored past the cache."""
    (height, width), (down, across) = shape.size(*x.shape[2:]), shape.padding
    reals, lanes, rows = 2 * shape.channels, 2 * shape.outputs, -(-height // 2)
    x = _padded(x, (across, across + width % 2, down, down + height % 2))  # whole tiles of outputs
    filters = (_FILTERS @ _columns(weight).view(9, -1)).view(16, reals, -1, PANEL)
    w = filters.permute(2, 0, 1, 3).contiguous()  # [2O/32, 16, 2C, 32]
    start = x.new_zeros(4, lanes)
    if bias is not None:
        start[1] = torch.view_as_real(
            bias.resolve_conj()
        ).flatten()  # a product that goes to every output of a tile
    y = room_for(len(x), shape.outputs, height, width)
    words = [
        x.data_ptr(),
        w.data_ptr(),
        start.data_ptr(),
        y.data_ptr(),
        reals,
        lanes,
        len(x) * rows,
        height,
        width,
    ]
    words += [x.stride(0), x.stride(1), y.nbytes >= past and y.data_ptr() % 64 == 0]
    loop.run(task_of([(-(-len(x) * rows // winograd_rows.ROWS), words)]))
    return y


_FILTERS = (
    winograd.OF_FILTER * torch.tensor([1.0, 1.0, 1.0, -1.0] * 4, device="cpu")[:, None]
)  # with the signs the loop wants


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
    return compiled(conv_tiles.convolve, _right_convolver)


@cache
def _minimal_convolver() -> Loop:
    return compiled(winograd_rows.convolve, _right_minimal_convolver)


@cache
def _correlator() -> Loop:
    return compiled(conv_tiles.correlate, _right_correlator)


@cache
def _distributor() -> Loop:
    return compiled(conv_tiles.distribute, _right_distributor)


def _examples() -> Iterator[tuple[Shape, Tensor, Tensor, Tensor, Tensor]]:
    """Inputs, weights, biases and output gradients that go through every tile: whole numbers, of which float32 loses nothing."""
    draw = torch.Generator().manual_seed(0)
    for channels in range(1, FEW + 1):
        sizes = (
            (2, channels, 3, 14),
            (56, channels, 3, 3),
            (56,),
            (2, 56, 3, 14),
        )  # 112 numbers an output: 4 + 2 + 1 vectors
        x, weight, bias, g = (
            torch.randint(-4, 5, (*size, 2), generator=draw).float() for size in sizes
        )
        same = Shape(56, channels, (3, 3), (1, 1), (1, 1), (1, 1))
        yield same, *(torch.view_as_complex(each) for each in (x, weight, bias, g))  # type: ignore[misc]


def _exact(x: Tensor) -> Tensor:
    return x.to(torch.complex128)


def _right_convolver(loop: Loop) -> bool:
    return all(
        torch.equal(_convolved(shape, x, weight, bias, loop), _same_size(x, weight, bias))
        for shape, x, weight, bias, _ in _examples()
    )


def _right_minimal_convolver(loop: Loop) -> bool:
    for shape, x, weight, bias, _ in _examples():
        own, (weight, bias) = replace(shape, outputs=48), (weight[:48], bias[:48])  # three panels
        if own.fewer_products:
            found = (
                _convolved_by_fewer_products(own, x, weight, bias, loop, past) for past in (0, PAST)
            )
            if not all(torch.equal(y, _same_size(x, weight, bias)) for y in found):
                return False
    return True


def _same_size(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.conv2d(_exact(x), _exact(weight), _exact(bias), padding=1).to(x.dtype)


def _right_correlator(loop: Loop) -> bool:
    for shape, x, _, _, g in _examples():
        met = F.pad(x, (1, 1, 1, 1)).unfold(2, 3, 1).unfold(3, 3, 1).conj()  # [B, C, H, W, *k]
        of_weight, of_bias = _folded(shape, _correlated(shape, x, g, loop).sum(dim=1))
        if not torch.equal(
            of_weight, torch.einsum("bohw,bchwij->bocij", _exact(g), _exact(met)).to(x.dtype)
        ):
            return False
        if not torch.equal(of_bias, g.sum(dim=(2, 3))):
            return False
    return True


def _right_distributor(loop: Loop) -> bool:
    return all(
        torch.equal(
            _input_gradient(shape, g, weight, x.shape[2:], loop),
            F.conv_transpose2d(_exact(g), _exact(weight.conj()), padding=1).to(x.dtype),
        )
        for shape, x, weight, _, g in _examples()
    )
