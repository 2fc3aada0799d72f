"""Convolutions of one to three dimensions, transposed or not, real or complex, torch's and ours.

A complex convolution is a real one over interleaved channels, so its gradient is that real
gradient, folded (`nn.convolution.folded_gradient`). `_weight_gradients` chooses among the ways to
per-sample gradients:

    one by one     large examples: the backend's own weight gradient, one after the other
                   (measured: as fast as the next two at 40 million products)
    patches        small examples: [O, T] · [T, k·C], of many numbers that lie side by side
    columns        small examples: [C·k, T] · [T, O]

A transposed convolution is a convolution run backwards: in its weight gradient x and g change
places. The `wide` map is the one that kernels slide over, `narrow` has one entry per position.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zdp_bench.gradients.layer_gradient import (
    GPU_SCALE,
    LayerGradient,
    Summands,
    apply_factors,
    bound_summands,
    device_scale,
    ghost_is_cheaper,
    gram_norms,
    transform,
)
from zdp_bench.gradients.rules import rule
from zdp_bench.nn.convolution import (
    ComplexConv1d,
    ComplexConv2d,
    ComplexConv3d,
    ComplexConvTranspose2d,
    folded_gradient,
)
from zdp_bench.nn.memory_format import as_real_channels, channels_last
from zdp_bench.nn.surgery import STANDARDISED, pull_back

# Multiplications of one example's weight gradient from which the backend's own kernel pays.
LARGE_EXAMPLE = 40_000_000


@rule(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
def torch_convolution(
    layer: nn.Module,
    x: Tensor,
    g: Tensor,
) -> dict[str, LayerGradient]:
    """torch's own; string paddings and padding modes are applied to the input first."""
    assert isinstance(layer, nn.modules.conv._ConvNd)
    if layer.padding_mode == "zeros" and not isinstance(layer.padding, str):
        return _convolution(layer, x, g, tuple(layer.padding))
    unpadded = (0,) * len(layer.kernel_size)
    return _convolution(layer, pad_input(layer, x), g, unpadded)


@rule(ComplexConv1d, ComplexConv2d, ComplexConv3d, ComplexConvTranspose2d)
def complex_convolution(
    layer: nn.Module,
    x: Tensor,
    g: Tensor,
) -> dict[str, LayerGradient]:
    """Ours."""
    return _convolution(layer, x, g, layer.padding)  # type: ignore[arg-type]


def pad_input(
    layer: nn.modules.conv._ConvNd,
    x: Tensor,
) -> Tensor:
    """Pad x [B, C, *] as one of torch's layers pads it."""
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    return F.pad(x, layer._reversed_padding_repeated_twice, mode=mode)


def _convolution(
    layer: nn.Module,
    x: Tensor,
    g: Tensor,
    padding: tuple[int, ...],
) -> dict[str, LayerGradient]:
    weight: Tensor = layer.weight  # type: ignore[assignment]
    geometry = ConvolutionShape(
        tuple(weight.shape),
        layer.stride,  # type: ignore[arg-type]
        padding,
        layer.dilation,  # type: ignore[arg-type]
        bool(layer.transposed),
        layer.output_padding,  # type: ignore[arg-type]
        layer.groups,  # type: ignore[arg-type]
    )
    gradients = {"weight": _weight_gradients(geometry, x, g)}
    if layer.bias is not None:
        gradients["bias"] = LayerGradient.from_gradients(g.flatten(2).sum(dim=2))
    return gradients


def _weight_gradients(
    geometry: ConvolutionShape,
    x: Tensor,
    g: Tensor,
) -> LayerGradient:
    """Return the gradients of a weight, real or complex as x [B, C, *] and g [B, O, *] are."""
    wide, narrow = geometry.wide_and_narrow(x, g)
    is_complex = x.is_complex()
    outputs, inputs, *kernel = geometry.shape
    real_geometry = geometry
    if is_complex:
        real_geometry = replace(geometry, shape=(2 * outputs, 2 * inputs, *kernel))

    @cache
    def reals() -> tuple[Tensor, Tensor]:
        """Return x and g, interleaved and channels last: oneDNN takes them without a copy."""
        if not is_complex:
            return x, g
        return as_real_channels(channels_last(x)), as_real_channels(channels_last(g))

    def fold(real: Tensor) -> Tensor:
        """Return the weight's gradients, from those of the real convolution."""
        if not is_complex:
            return real
        flat = real.flatten(-len(kernel))
        return folded_gradient(flat, geometry.transposed).unflatten(-1, kernel)

    def from_backend(start: int, stop: int) -> Tensor:
        real_x, real_g = reals()
        return one_by_one(real_geometry, real_x[start:stop], real_g[start:stop], fold)

    def from_patches(start: int, stop: int) -> Tensor:
        real_wide, real_narrow = geometry.wide_and_narrow(*reals())
        gradients = by_patches(real_geometry, real_wide[start:stop], real_narrow[start:stop])
        return fold(gradients)

    def from_columns(start: int, stop: int) -> Tensor:
        conjugate = x[start:stop].conj().resolve_conj()
        maps = geometry.wide_and_narrow(conjugate, g[start:stop])
        return by_columns(geometry, *maps)

    products = 4 if is_complex else 1  # of real numbers, in one of x and g
    if _is_large(products * geometry.work(x, g), x):
        per_sample = from_backend
    elif _suits_patches(geometry, wide):
        per_sample = from_patches
    else:
        per_sample = from_columns

    def weighted_sum(factors: Tensor) -> Tensor:
        real_x, real_g = reals()
        weighted = apply_factors(real_g, factors)
        return fold(weight_gradient(real_geometry, real_x, weighted))

    return LayerGradient(
        per_sample,
        weighted_sum,
        squared_norms=_ghost(geometry, wide, narrow),
        summands=lambda: _summands(geometry, wide, narrow),
    )


def _ghost(
    geometry: ConvolutionShape,
    wide: Tensor,
    narrow: Tensor,
) -> Callable[[], Tensor] | None:
    """Return what takes the norms without the gradients; None where that costs more."""
    positions, outputs, inputs = geometry.sizes(wide, narrow)
    if geometry.groups > 1:
        return None
    if not ghost_is_cheaper(positions, outputs, inputs, wide.element_size()):
        return None
    return lambda: ghost_norms(geometry, wide, narrow)


def _is_large(work: int, x: Tensor) -> bool:
    """True if the backend's kernel pays for one example at a time; a GPU would run half empty."""
    least = LARGE_EXAMPLE * device_scale(x, 2 * GPU_SCALE)
    return len(x) == 1 or work >= least


def _summands(
    geometry: ConvolutionShape,
    wide: Tensor,
    narrow: Tensor,
) -> Summands:
    """Every position of the smaller map meets a kernel of the larger."""
    positions, _, _ = geometry.sizes(wide, narrow)
    return bound_summands(narrow, wide, positions, prod(geometry.kernel))


def _suits_patches(geometry: ConvolutionShape, wide: Tensor) -> bool:
    """True if the real numbers of one line of the kernel, side by side, are many enough to copy.

    Measured: of 30 to 400, a tenth to a half less time than columns; of 24, a quarter more.
    """
    parts = 2 if wide.is_complex() else 1
    line = parts * wide.shape[1] * geometry.kernel[-1]
    return geometry.groups == 1 and line >= 30


# ---------------------------------------------------------------- weight gradients in plain torch

# Patches of at most so many bytes are built at a time: they stay in the cache until multiplied.
PATCH_BYTES = 4 * 2**20
# Likewise columns: the system takes larger blocks back, and clears them each time.
COLUMN_BYTES = 32 * 2**20


@dataclass(frozen=True)
class ConvolutionShape:
    """A convolution's numbers, one per spatial dimension.

    `shape` is the weight's: [O, C/groups, *k], or transposed [C, O/groups, *k].
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int

    @property
    def kernel(self) -> tuple[int, ...]:
        return self.shape[2:]

    def wide_and_narrow(
        self,
        x: Tensor,
        g: Tensor,
    ) -> tuple[Tensor, Tensor]:
        return (g, x) if self.transposed else (x, g)

    def sizes(
        self,
        wide: Tensor,
        narrow: Tensor,
    ) -> tuple[int, int, int]:
        """Return T, O and D of one group's product [D, T] · [T, O]."""
        positions = prod(narrow.shape[2:])
        outputs = narrow.shape[1] // self.groups
        inputs = wide.shape[1] // self.groups * prod(self.kernel)
        return positions, outputs, inputs

    def work(self, x: Tensor, g: Tensor) -> int:
        """Return the multiplications of one example's weight gradient."""
        wide, narrow = self.wide_and_narrow(x, g)
        return prod(self.sizes(wide, narrow)) * self.groups

    def pad(
        self,
        wide: Tensor,
        channels_last: bool = False,
    ) -> Tensor:
        """Pad the wide map, [B, C, *] or [B, *, C], as the convolution does."""
        sides = [0, 0] if channels_last else []
        for size in reversed(self.padding):
            sides += [size, size]
        return F.pad(wide, sides) if any(sides) else wide


def weight_gradient(
    geometry: ConvolutionShape,
    x: Tensor,
    g: Tensor,
) -> Tensor:
    """Return Σᵢ gᵢ from the backend's own kernel; real x [B, C, *] and g [B, O, *]."""
    if x.dtype == torch.float64:
        # torch's slow kernels misread other layouts where a map is one pixel wide.
        x = x.clone(memory_format=torch.contiguous_format)
        g = g.clone(memory_format=torch.contiguous_format)
    like = x.new_empty(1).expand(geometry.shape)  # only its shape is read
    weight = torch.empty_like(like, memory_format=_memory_format(geometry, x))
    numbers = (
        geometry.stride,
        geometry.padding,
        geometry.dilation,
        geometry.transposed,
        geometry.output_padding,
        geometry.groups,
    )
    of_input_weight_bias = [False, True, False]
    _, gradient, _ = torch.ops.aten.convolution_backward(
        g,
        x,
        weight,
        None,
        *numbers,
        of_input_weight_bias,
    )
    return gradient


def _memory_format(geometry: ConvolutionShape, x: Tensor) -> torch.memory_format:
    """Return the format of the maps: a weight in another one would be copied first.

    A weight of one pixel has both formats, but only as a contiguous one is it read right (torch
    2.11: one example, several groups).
    """
    if x.is_contiguous() or x.dim() < 4 or prod(geometry.kernel) == 1:
        return torch.contiguous_format
    return torch.channels_last if x.dim() == 4 else torch.channels_last_3d


def one_by_one(
    geometry: ConvolutionShape,
    x: Tensor,
    g: Tensor,
    finish: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return `finish(gᵢ)` of every example, [B, ...], each by the backend's own kernel.

    The result keeps the backend's memory format: another one costs a slow copy per example. Where
    a weight is larger than its maps, channels-first maps make the backend's format contiguous.
    """
    numbers_of_maps = x[:1].numel() + g[:1].numel()
    if prod(geometry.shape) > numbers_of_maps:
        x, g = _channels_first(x), _channels_first(g)
    x_parts, g_parts = x.split(1), g.split(1)
    first = finish(weight_gradient(geometry, x_parts[0], g_parts[0]))
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
        rows[i] = finish(weight_gradient(geometry, x_parts[i], g_parts[i]))
    return rows


def _channels_first(x: Tensor) -> Tensor:
    """Return [B, C, *] contiguous, each example copied as a matrix, which torch does in blocks.

    It copies maps line by line, four times as slow where lines are powers of two apart.
    """
    if x.is_contiguous():
        return x
    copy = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for target, example in zip(copy, x, strict=True):
        target.flatten(1).copy_(example.flatten(1))
    return copy


def by_patches(
    geometry: ConvolutionShape,
    wide: Tensor,
    narrow: Tensor,
) -> Tensor:
    """Return [B, *shape], a view; real maps, one group."""
    padded = geometry.pad(wide.movedim(1, -1), channels_last=True)
    channels_end = padded.contiguous()  # one copy at most
    patches = _unfold(geometry, channels_end, narrow.shape[2:])  # [B, *positions, C, *k]
    patches = patches.movedim(1 + len(geometry.kernel), -1)  # [B, *positions, *k, C]
    gradients = narrow.flatten(2)  # [B, O, T]
    outputs, positions = gradients.shape[1:]
    inputs = prod(geometry.kernel) * wide.shape[1]
    most = PATCH_BYTES * device_scale(wide, 2 * GPU_SCALE)
    per_example = positions * inputs * wide.element_size()
    few = max(1, min(len(wide), most // per_example))
    copies = wide.new_empty(few, positions, inputs)
    product = wide.new_empty(len(wide), outputs, inputs)
    pieces = zip(patches.split(few), gradients.split(few), product.split(few), strict=True)
    for own_patches, own_gradients, own_product in pieces:
        copy = copies[: len(own_patches)]
        copy.view(own_patches.shape).copy_(own_patches)
        torch.bmm(own_gradients, copy, out=own_product)
    kernels = product.unflatten(2, (*geometry.kernel, -1))  # [B, O, *k, C]
    return kernels.movedim(-1, 2)


def by_columns(
    geometry: ConvolutionShape,
    wide: Tensor,
    narrow: Tensor,
) -> Tensor:
    """Return [B, *shape], a view; also of complex maps, of which x is conjugated already."""
    positions, _, inputs = geometry.sizes(wide, narrow)
    per_example = positions * inputs * geometry.groups * wide.element_size()
    most = COLUMN_BYTES * device_scale(wide, 2 * GPU_SCALE)
    few = max(1, most // per_example)
    pieces = zip(wide.split(few), narrow.split(few), strict=True)
    products = [_multiply_columns(geometry, *maps) for maps in pieces]
    product = products[0] if len(products) == 1 else torch.cat(products)
    kernels = product.unflatten(2, (-1, *geometry.kernel))  # [B, groups, C/groups, *k, O/groups]
    return kernels.movedim(-1, 2).flatten(1, 2)


def _multiply_columns(
    geometry: ConvolutionShape,
    wide: Tensor,
    narrow: Tensor,
) -> Tensor:
    """Return one product for every group, [b, groups, C·k/groups, O/groups]."""
    positions, outputs, inputs = geometry.sizes(wide, narrow)
    columns = _columns(geometry, wide, narrow.shape[2:])  # [b, C·k, T]
    columns = columns.reshape(-1, inputs, positions)
    gradients = narrow.reshape(-1, outputs, positions)
    product = torch.bmm(columns, gradients.mT)
    return product.unflatten(0, (-1, geometry.groups))


def ghost_norms(
    geometry: ConvolutionShape,
    wide: Tensor,
    narrow: Tensor,
) -> Tensor:
    """Return ‖gᵢ‖², [B] in float64, by Gram matrices; one group."""
    columns = _columns(geometry, wide, narrow.shape[2:])
    return gram_norms(narrow.flatten(2).mT, columns.mT)


def _columns(
    geometry: ConvolutionShape,
    wide: Tensor,
    positions: tuple[int, ...],
) -> Tensor:
    """Return what each weight meets at each position: [B, C, *] -> [B, C·k, T]."""
    dimensions = len(geometry.kernel)
    channels_end = geometry.pad(wide).contiguous().movedim(1, -1)
    patches = _unfold(geometry, channels_end, positions)  # [B, *positions, C, *k]
    first_dims = tuple(range(1, 1 + dimensions))
    last_dims = tuple(range(-dimensions, 0))
    columns = patches.movedim(first_dims, last_dims)  # [B, C, *k, *positions]
    return columns.reshape(len(wide), -1, prod(positions))


def _unfold(
    geometry: ConvolutionShape,
    wide: Tensor,
    positions: tuple[int, ...],
) -> Tensor:
    """Return what each position meets: [B, *, C] -> [B, *positions, C, *k], a view."""
    numbers = zip(geometry.kernel, geometry.stride, geometry.dilation, positions, strict=True)
    for dim, (size, stride, dilation, number) in enumerate(numbers, 1):
        extent = (size - 1) * dilation + 1
        windows = wide.unfold(dim, extent, stride)
        wide = windows[..., ::dilation].narrow(dim, 0, number)
    return wide


@rule(*STANDARDISED.values())
def standardised_convolution(
    layer: nn.Module,
    x: Tensor,
    g: Tensor,
) -> dict[str, LayerGradient]:
    """The convolution's rule reads no weight, so it gives the gradient of the standardised one."""
    weight: Tensor = layer.weight  # type: ignore[assignment]
    plain = complex_convolution if weight.is_complex() else torch_convolution
    gradients = plain(layer, x, g)
    back, most = pull_back(weight.detach())
    filter_size = weight[0].numel()
    gradients["weight"] = transform(gradients["weight"], back, most, filter_size)
    return gradients
