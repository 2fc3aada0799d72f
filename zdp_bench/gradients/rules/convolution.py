"""Convolutions of one to three dimensions, transposed or not, real or complex, torch's own and ours.

A complex convolution is a real one over interleaved channels (`nn/layout.py`), so its gradient is that real gradient, folded
(`nn.convolution.folded_gradient`).

Per-sample gradients come, where records are small, from one product a record of what each position meets and its output gradient:

    loops      of our own: complex, of whole vectors (`nn/few_channels.py`), of many channels and large maps (`nn/winograd.py`);
               real, of few entries, channels first (`planes.py`)
    patches    [O, T] · [T, k·D], real, of many channels that lie side by side
    columns    [D·k, T] · [T, O], of few channels; complex numbers as they are

and where records are large from oneDNN's or cuDNN's own weight gradient, record by record (seen: equal at 16 million products).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zdp_bench.gradients.rules import (
    Share,
    Terms,
    contract,
    ghost_is_cheaper,
    products,
    rule,
    weigh,
)
from zdp_bench.gradients.rules.linear import gram_norms
from zdp_bench.kernels import channels_first, few_channels, winograd
from zdp_bench.kernels.memory_format import as_real_channels, channels_last
from zdp_bench.nn.convolution import (
    ComplexConv1d,
    ComplexConv2d,
    ComplexConv3d,
    ComplexConvTranspose2d,
    folded_gradient,
)

LARGE_RECORD = (
    16_000_000  # multiplications of one record's weight gradient above which a call of its own pays
)
PATCH_BYTES = (
    4 * 2**20
)  # patches, likewise: so few that they stay in the cache until they are multiplied
COLUMN_BYTES = (
    32 * 2**20
)  # columns are built for so many records at a time: larger blocks are handed back to the system


@dataclass(frozen=True)
class Geometry:
    """A convolution's numbers, one a spatial dimension. `shape` is the real weight's: [O, C/groups, *k], or [C, O/groups, *k]."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool
    output_padding: tuple[int, ...]

    @property
    def kernel(self) -> tuple[int, ...]:
        return self.shape[2:]


@rule(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
def torch_convolution(layer: nn.Module, x: Tensor, g: Tensor) -> dict[str, Share]:
    """torch's own layers: string paddings and padding modes are applied to the input first."""
    assert isinstance(layer, nn.modules.conv._ConvNd)
    padding = layer.padding
    if layer.padding_mode != "zeros":
        x, padding = (
            F.pad(x, layer._reversed_padding_repeated_twice, mode=layer.padding_mode),
            (0,) * len(layer.kernel_size),
        )
    elif isinstance(padding, str):
        x, padding = F.pad(x, layer._reversed_padding_repeated_twice), (0,) * len(layer.kernel_size)
    return _convolution(layer, x, g, tuple(padding))


@rule(ComplexConv1d, ComplexConv2d, ComplexConv3d, ComplexConvTranspose2d)
def complex_convolution(layer: nn.Module, x: Tensor, g: Tensor) -> dict[str, Share]:
    """Ours."""
    return _convolution(layer, x, g, layer.padding)  # type: ignore[arg-type]


def _convolution(
    layer: nn.Module, x: Tensor, g: Tensor, padding: tuple[int, ...]
) -> dict[str, Share]:
    """The shares of weight and bias; `layer` has the attributes all convolutions share."""
    weight: Tensor = layer.weight  # type: ignore[assignment]
    numbers = (
        layer.stride,
        padding,
        layer.dilation,
        layer.groups,
        bool(layer.transposed),
        layer.output_padding,
    )
    geometry = Geometry(tuple(weight.shape), *numbers)  # type: ignore[arg-type]
    bias = _Bias(g)
    beside = (
        bias
        if layer.bias is not None and geometry.groups == 1 and not geometry.transposed
        else None
    )
    share = _complex_weight if weight.is_complex() else _real_weight
    return {"weight": share(geometry, x, g, beside), "bias": bias.share()}


class _Bias:
    """A bias's per-sample gradients Σ_t g_t, [B, O]: those the weight's product brought along, or a sum of their own."""

    def __init__(self, g: Tensor) -> None:
        self.g: Tensor | None = g  # [B, O, *], until it is summed
        self.formed: Tensor | None = None

    def awaits(self, records: int) -> bool:
        """Whether gradients of so many records, the whole batch, would spare a sum."""
        return self.g is not None and len(self.g) == records

    def take(self, formed: Tensor) -> None:
        self.g, self.formed = None, formed

    def rows(self) -> Tensor:
        if self.g is not None:
            self.take(self.g.flatten(2).sum(dim=2))
        assert self.formed is not None
        return self.formed

    def share(self) -> Share:
        """Asked last, after the weight's rows."""
        return Share(
            lambda a, b: self.rows()[a:b],
            lambda factors: contract(self.rows(), factors),
            product=lambda: (self.rows(),),
        )


def _weights_of(beside: _Bias | None, of_weight: Tensor, of_bias: Tensor) -> Tensor:
    """The weight's gradients, of the two that a loop gives together; the bias's wait for the bias."""
    if beside is not None and beside.awaits(len(of_bias)):
        beside.take(of_bias)
    return of_weight


def _complex_weight(geometry: Geometry, x: Tensor, g: Tensor, beside: _Bias | None) -> Share:
    """The share of a complex convolution's weight: small records by loops, patches or columns, all else as reals."""
    rows_, columns_, *kernel = geometry.shape
    interleaved = replace(geometry, shape=(2 * rows_, 2 * columns_, *kernel))
    sizes = (
        geometry.shape,
        geometry.stride,
        geometry.padding,
        geometry.dilation,
        geometry.transposed,
        geometry.groups,
    )
    few, many = few_channels.shape_of(*sizes), winograd.shape_of(*sizes)
    by_tiles = many if many is not None and many.serves(x, g) else None
    reals = cache(
        lambda: [as_real_channels(channels_last(part)) for part in (x, g)]
    )  # as oneDNN takes them without a copy

    def folded(real: Tensor) -> Tensor:
        return folded_gradient(real.flatten(-len(kernel)), geometry.transposed).unflatten(
            -1, kernel
        )

    def measured(start: int, stop: int) -> tuple[Tensor, Tensor]:
        assert by_tiles is not None
        return winograd.gradient_rows(
            by_tiles, *(part if stop - start == len(part) else part[start:stop] for part in (x, g))
        )

    def rows(start: int, stop: int) -> Tensor:
        if by_tiles is not None:
            return measured(start, stop)[0]
        large = 4 * _work(geometry, x, g) >= LARGE_RECORD or len(x) == 1
        if few is not None and (few.serves(x, g) or (not large and few.serves_rows(x, g))):
            return _weights_of(
                beside, *few_channels.gradient_rows(few, x[start:stop], g[start:stop])
            )
        if large:
            real_x, real_g = reals()
            return _rows_one_by_one(interleaved, real_x[start:stop], real_g[start:stop], folded)
        wide, narrow = _wide_and_narrow(geometry, x, g)
        if _patches_are_cheaper(geometry, 2 * wide.shape[1], wide, narrow):
            wide, narrow = _wide_and_narrow(geometry, *reals())
            return folded(_rows_by_patches(interleaved, wide[start:stop], narrow[start:stop]))
        conjugate = x[start:stop].conj().resolve_conj()
        return _rows_by_columns(
            geometry, *_wide_and_narrow(geometry, conjugate, g[start:stop]), beside
        )

    def weighted_sum(factors: Tensor) -> Tensor:
        if by_tiles is not None:
            return winograd.gradient(by_tiles, x, weigh(g, factors))
        real_x, real_g = reals()
        return folded(weight_gradient(interleaved, real_x, weigh(real_g, factors)))

    return Share(
        rows,
        weighted_sum,
        measured=measured if by_tiles is not None else None,
        terms=lambda: _terms(geometry, *_wide_and_narrow(geometry, x, g)),
    )


def _real_weight(geometry: Geometry, x: Tensor, g: Tensor, beside: _Bias | None) -> Share:
    """The share of a real convolution's weight, from its input [B, C, *] and output gradient [B, O, *]."""
    wide, narrow = _wide_and_narrow(geometry, x, g)
    positions, outputs, inputs = _sizes(geometry, wide, narrow)
    ghost = geometry.groups == 1 and ghost_is_cheaper(positions, outputs, inputs, x.element_size())

    def rows(start: int, stop: int) -> Tensor:
        if _work(geometry, x, g) >= LARGE_RECORD or len(x) == 1:
            return _rows_one_by_one(geometry, x[start:stop], g[start:stop])
        if (
            not geometry.transposed
            and geometry.groups == 1
            and channels_first.serve(x, g, geometry.kernel, geometry.stride)
        ):
            numbers = geometry.kernel, geometry.padding, geometry.dilation
            return _weights_of(
                beside, *channels_first.gradient_rows(x[start:stop], g[start:stop], *numbers)
            )
        if wide.movedim(1, -1).is_contiguous() and _patches_are_cheaper(
            geometry, wide.shape[1], wide, narrow
        ):
            return _rows_by_patches(geometry, wide[start:stop], narrow[start:stop])
        return _rows_by_columns(geometry, wide[start:stop], narrow[start:stop], beside)

    return Share(
        rows,
        weighted_sum=lambda factors: weight_gradient(geometry, x, weigh(g, factors)),
        ghost=(lambda: _gram_norms(geometry, wide, narrow)) if ghost else None,
        terms=lambda: _terms(geometry, wide, narrow),
    )


def _wide_and_narrow(geometry: Geometry, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """A transposed convolution is a convolution run backwards: its weight gradient has the parts of x and g exchanged."""
    return (g, x) if geometry.transposed else (x, g)


def _sizes(geometry: Geometry, wide: Tensor, narrow: Tensor) -> tuple[int, int, int]:
    """Positions T, outputs O and inputs D of one group's product [D, T] · [T, O]."""
    inputs = wide.shape[1] // geometry.groups * prod(geometry.kernel)
    return prod(narrow.shape[2:]), narrow.shape[1] // geometry.groups, inputs


def _terms(geometry: Geometry, wide: Tensor, narrow: Tensor) -> Terms:
    """What a record's weight gradient is summed up from: every position of the smaller map, each with a kernel of the larger."""
    return products(narrow, wide, prod(narrow.shape[2:]), prod(geometry.kernel))


def _work(geometry: Geometry, x: Tensor, g: Tensor) -> int:
    """Multiplications of one record's weight gradient."""
    return prod(_sizes(geometry, *_wide_and_narrow(geometry, x, g))) * geometry.groups


def weight_gradient(geometry: Geometry, x: Tensor, g: Tensor) -> Tensor:
    """Σᵢ gᵢ, by the backend's own kernel."""
    if (
        x.dtype == torch.float64
    ):  # torch's slow kernels, which read other layouts wrongly where a map is one pixel wide
        x, g = (part.clone(memory_format=torch.contiguous_format) for part in (x, g))
    weight = torch.empty_like(
        x.new_empty(1).expand(geometry.shape), memory_format=_layout(geometry, x)
    )  # only its shape is read
    numbers = (
        geometry.stride,
        geometry.padding,
        geometry.dilation,
        geometry.transposed,
        geometry.output_padding,
        geometry.groups,
    )
    return torch.ops.aten.convolution_backward(g, x, weight, None, *numbers, [False, True, False])[
        1
    ]


def _layout(geometry: Geometry, x: Tensor) -> torch.memory_format:
    """How maps [B, C, *] lie in memory; a weight that lies otherwise would be copied first.

    Of one pixel a weight lies both ways at once, and only told as contiguous is it read rightly (seen in torch 2.11: one record,
    several groups).
    """
    if x.is_contiguous() or x.dim() < 4 or prod(geometry.kernel) == 1:
        return torch.contiguous_format
    return torch.channels_last if x.dim() == 4 else torch.channels_last_3d


def _rows_one_by_one(
    geometry: Geometry,
    x: Tensor,
    g: Tensor,
    finished: Callable[[Tensor], Tensor] = lambda gradient: gradient,
) -> Tensor:
    """[b, *shape], each `finished`, and in the layout that the backend gives it: another one costs a slow copy of every record's.

    Where a weight is larger than a record's maps the maps are put channels first, so that the weight comes so without a copy.
    """
    if prod(geometry.shape) > x[:1].numel() + g[:1].numel():
        x, g = _channels_first(x), _channels_first(g)
    first = finished(weight_gradient(geometry, x[:1], g[:1]))
    if len(x) == 1:
        return first.unsqueeze(0)
    rows = torch.empty_strided(
        (len(x), *first.shape),
        (first.numel(), *first.stride()),
        dtype=first.dtype,
        device=first.device,
    )
    rows[0] = first
    for i in range(1, len(x)):
        rows[i] = finished(weight_gradient(geometry, x[i : i + 1], g[i : i + 1]))
    return rows


def _channels_first(x: Tensor) -> Tensor:
    """[B, C, *], contiguous. A record at a time, as a matrix: torch turns those in blocks, and maps line by line, four times as
    slowly where lines are powers of two apart."""
    if x.is_contiguous():
        return x
    first = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for record, turned in zip(first, x, strict=True):
        record.flatten(1).copy_(turned.flatten(1))
    return first


def _patches_are_cheaper(geometry: Geometry, reals: int, wide: Tensor, narrow: Tensor) -> bool:
    """Whether enough real numbers lie side by side, and positions are enough to make up for folding (seen, complex: 8 to 24
    channels on 32² half the time of columns, 16 on 16² a tenth less; 3 on 32², 32 on 8² more)."""
    positions, outputs, _ = _sizes(geometry, wide, narrow)
    return geometry.groups == 1 and reals >= 16 and positions >= 4 * outputs


def _rows_by_patches(geometry: Geometry, wide: Tensor, narrow: Tensor) -> Tensor:
    """[b, *shape], as `_rows_by_columns`, of real maps that lie channels-last: what a position meets lies together there."""
    met = _unfolded(
        geometry, _padded(geometry, wide).movedim(1, -1), narrow.shape[2:]
    )  # [b, *positions, C, *k]
    met = met.movedim(1 + len(geometry.kernel), -1)  # [b, *positions, *k, C]
    gradients = narrow.flatten(2)  # [b, O, T]
    inputs = prod(geometry.kernel) * wide.shape[1]
    few = max(1, min(len(wide), PATCH_BYTES // (gradients.shape[2] * inputs * wide.element_size())))
    patches = wide.new_empty(few, gradients.shape[2], inputs)
    product = wide.new_empty(len(wide), gradients.shape[1], inputs)
    for start in range(0, len(wide), few):
        some = met[start : start + few]
        patches[: len(some)].view(some.shape).copy_(some)
        torch.bmm(
            gradients[start : start + few], patches[: len(some)], out=product[start : start + few]
        )
    return product.unflatten(2, (*geometry.kernel, -1)).movedim(-1, 2)  # [b, O, C, *k], a view


def _rows_by_columns(
    geometry: Geometry, wide: Tensor, narrow: Tensor, beside: _Bias | None
) -> Tensor:
    """[b, *shape]; columns of a few records at a time. A row of ones among them gives the bias's gradients, where it wants them
    `beside`: the same product, and no pass over the output gradient of their own."""
    a_record = wide.shape[1] * prod(geometry.kernel) * prod(narrow.shape[2:]) * wide.element_size()
    few = max(1, COLUMN_BYTES // a_record)
    ones = beside is not None and beside.awaits(len(wide))
    products = (
        _product(geometry, w, n, ones)
        for w, n in zip(wide.split(few), narrow.split(few), strict=True)
    )
    product = (
        next(products) if few >= len(wide) else torch.cat([*products])
    )  # [b, groups, C·k (and 1), O/groups]
    if ones and beside is not None:
        beside.take(product[:, 0, -1])
        product = product[:, :, :-1]
    return (
        product.unflatten(2, (-1, *geometry.kernel)).movedim(-1, 2).flatten(1, 2)
    )  # [b, O, C/groups, *k], a view


def _product(geometry: Geometry, wide: Tensor, narrow: Tensor, ones: bool) -> Tensor:
    """Columns times output gradients, group by group: [b, groups, C·k/groups (and 1), O/groups]."""
    groups = geometry.groups
    columns = _columns(geometry, wide, narrow.shape[2:], ones)  # [b, C·k (and 1), T]
    columns = columns.reshape(len(wide) * groups, -1, columns.shape[2])  # [b·groups, C·k/groups, T]
    gradients = narrow.reshape(len(wide) * groups, narrow.shape[1] // groups, -1).transpose(
        1, 2
    )  # [b·groups, T, O/groups]
    return torch.bmm(columns, gradients).unflatten(0, (-1, groups))


def _gram_norms(geometry: Geometry, wide: Tensor, narrow: Tensor) -> Tensor:
    columns = _columns(geometry, wide, narrow.shape[2:])
    return gram_norms(narrow.flatten(2).transpose(1, 2), columns.transpose(1, 2))


def _columns(
    geometry: Geometry, wide: Tensor, positions: tuple[int, ...], ones: bool = False
) -> Tensor:
    """What each weight meets at each position: [b, C, *] -> [b, C·k, T]; with `ones`, one more row, of ones: the bias's."""
    dimensions = len(geometry.kernel)
    wide = _unfolded(
        geometry, _padded(geometry, wide).contiguous().movedim(1, -1), positions
    )  # [b, *positions, C, *k]
    met = wide.movedim(
        tuple(range(1, 1 + dimensions)), tuple(range(-dimensions, 0))
    )  # [b, C, *k, *positions]
    if not ones:
        return met.reshape(len(wide), -1, prod(positions))
    columns = wide.new_empty(len(wide), prod(met.shape[1 : 2 + dimensions]) + 1, prod(positions))
    columns[:, :-1].view(met.shape).copy_(met)
    columns[:, -1] = 1
    return columns


def _padded(geometry: Geometry, wide: Tensor) -> Tensor:
    if not any(geometry.padding):
        return wide
    return F.pad(wide, [p for size in reversed(geometry.padding) for p in (size, size)])


def _unfolded(geometry: Geometry, wide: Tensor, positions: tuple[int, ...]) -> Tensor:
    """[b, *, C] -> [b, *positions, C, *k], a view: what each position meets."""
    for dim, (size, stride, dilation) in enumerate(
        zip(geometry.kernel, geometry.stride, geometry.dilation, strict=True), 1
    ):
        wide = wide.unfold(dim, (size - 1) * dilation + 1, stride)[..., ::dilation].narrow(
            dim, 0, positions[dim - 1]
        )
    return wide
