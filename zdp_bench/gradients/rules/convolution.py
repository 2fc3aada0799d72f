"""Convolutions of one to three dimensions, plain or transposed, real or complex.

A complex convolution is a real convolution over interleaved channels, so its gradient is the real
gradient, folded (`nn.convolution.folded_gradient`). `_weight_gradients` chooses among three methods
for per-sample gradients:

    one by one     for large examples: the backend's weight gradient, for one example at a time. At
                   40 million multiplications per example, it is as fast as the other two.
    patches        for small examples with long contiguous rows: [O, T] · [T, k·C]
    columns        for other small examples: [C·k, T] · [T, O]

A transposed convolution is a convolution with input and output exchanged, so x and g change places
in its weight gradient. `wide` is the map that kernels slide over, and `narrow` is the map with one
entry per position.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

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
    ConvArguments,
    folded_gradient,
)
from zdp_bench.nn.memory_format import as_real_channels, channels_last
from zdp_bench.nn.surgery import STANDARDISED, pull_back

# Multiplications in an example's weight gradient from which on the backend's kernel is fastest.
LARGE_EXAMPLE = 40_000_000


@rule(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
def torch_convolution(
    layer: nn.Module,
    x: Tensor,
    g: Tensor,
) -> dict[str, LayerGradient]:
    """Return the gradients of one of torch's convolutions.

    A padding mode, or a padding given as a string, is applied to the input first.
    """
    assert isinstance(layer, _ConvNd)
    padding = layer.padding
    if layer.padding_mode != "zeros" or isinstance(padding, str):
        x = pad_input(layer, x)
        padding = (0,)
    arguments = ConvArguments(
        per_dimension(layer, layer.stride),
        per_dimension(layer, padding),
        per_dimension(layer, layer.dilation),
        layer.transposed,
        per_dimension(layer, layer.output_padding),
        layer.groups,
    )
    return _convolution(layer, x, g, arguments)


@rule(ComplexConv1d, ComplexConv2d, ComplexConv3d, ComplexConvTranspose2d)
def complex_convolution(
    layer: nn.Module,
    x: Tensor,
    g: Tensor,
) -> dict[str, LayerGradient]:
    """Return the gradients of one of this package's complex convolutions."""
    return _convolution(layer, x, g, layer.arguments)  # type: ignore[arg-type]


def pad_input(
    layer: _ConvNd,
    x: Tensor,
) -> Tensor:
    """Pad x [B, C, *] as the layer does."""
    padding = layer._reversed_padding_repeated_twice
    if layer.padding_mode != "zeros":
        return F.pad(x, padding, mode=layer.padding_mode)
    if len(padding) == 2:  # one number for all dimensions
        padding = [*padding] * len(layer.kernel_size)
    return F.pad(x, padding)


def per_dimension(layer: _ConvNd, entries: tuple[int, ...]) -> tuple[int, ...]:
    """Return an argument's value for each dimension; torch's layers keep (2,) for all of them."""
    dimensions = len(layer.kernel_size)
    return tuple(entries) * (dimensions // len(entries))


def _convolution(
    layer: nn.Module,
    x: Tensor,
    g: Tensor,
    arguments: ConvArguments,
) -> dict[str, LayerGradient]:
    weight: Tensor = layer.weight  # type: ignore[assignment]
    geometry = ConvolutionShape(tuple(weight.shape), arguments)
    gradients = {"weight": _weight_gradients(geometry, x, g)}
    if layer.bias is not None:
        gradients["bias"] = LayerGradient.from_gradients(g.flatten(2).sum(dim=2))
    return gradients


def _weight_gradients(
    geometry: ConvolutionShape,
    x: Tensor,
    g: Tensor,
) -> LayerGradient:
    """Return the gradients of a weight, for real or complex x [B, C, *] and g [B, O, *]."""
    wide, narrow = geometry.wide_and_narrow(x, g)
    is_complex = x.is_complex()
    outputs, inputs, *kernel = geometry.shape
    real_geometry = geometry
    if is_complex:
        real_geometry = replace(geometry, shape=(2 * outputs, 2 * inputs, *kernel))

    @cache
    def reals() -> tuple[Tensor, Tensor]:
        """Return x and g as real maps; complex ones channels-last, which oneDNN does not copy."""
        if not is_complex:
            return x, g
        return as_real_channels(channels_last(x)), as_real_channels(channels_last(g))

    def fold(real: Tensor) -> Tensor:
        """Convert gradients of the real convolution to those of the weight."""
        if not is_complex:
            return real
        flat = real.flatten(-len(kernel))
        return folded_gradient(flat, geometry.arguments.transposed).unflatten(-1, kernel)

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

    products = 4 if is_complex else 1  # real multiplications in one of an entry of x and one of g
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
    """Return a function that computes norms without gradients, or None if that costs more."""
    positions, outputs, inputs = geometry.sizes(wide, narrow)
    if geometry.groups > 1:
        return None
    if not ghost_is_cheaper(positions, outputs, inputs, wide.element_size()):
        return None
    return lambda: ghost_norms(geometry, wide, narrow)


def _is_large(work: int, x: Tensor) -> bool:
    """Return True if the backend's kernel is fastest, although it processes one example at a time.

    The limit is higher on a GPU, which small examples do not use to capacity.
    """
    min_work = LARGE_EXAMPLE * device_scale(x, 2 * GPU_SCALE)
    return len(x) == 1 or work >= min_work


def _summands(
    geometry: ConvolutionShape,
    wide: Tensor,
    narrow: Tensor,
) -> Summands:
    """Bound the terms of the gradient: one for each position of the narrow map."""
    positions, _, _ = geometry.sizes(wide, narrow)
    return bound_summands(narrow, wide, positions, prod(geometry.kernel))


def _suits_patches(geometry: ConvolutionShape, wide: Tensor) -> bool:
    """Return True if a row of a kernel has enough contiguous real numbers for patches.

    With 30 to 400 numbers, patches take 10 to 50 % less time than columns; with 24, 25 % more.
    """
    parts = 2 if wide.is_complex() else 1
    row_length = parts * wide.shape[1] * geometry.kernel[-1]
    return geometry.groups == 1 and row_length >= 30


# ---------------------------------------------------------------- weight gradients in plain torch

# Memory for patches at any one time. They stay in the cache until they are multiplied.
PATCH_BYTES = 4 * 2**20
# Memory for columns at any one time. The operating system reclaims larger blocks, and clears them
# at each allocation.
COLUMN_BYTES = 32 * 2**20


@dataclass(frozen=True)
class ConvolutionShape:
    """The shape of a convolution's weight, and the convolution's arguments.

    `shape` is [O, C/groups, *k], or [C, O/groups, *k] if transposed.
    """

    shape: tuple[int, ...]
    arguments: ConvArguments

    @property
    def groups(self) -> int:
        return self.arguments.groups

    @property
    def kernel(self) -> tuple[int, ...]:
        return self.shape[2:]

    def wide_and_narrow(
        self,
        x: Tensor,
        g: Tensor,
    ) -> tuple[Tensor, Tensor]:
        return (g, x) if self.arguments.transposed else (x, g)

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
        """Return the number of multiplications in one example's weight gradient."""
        wide, narrow = self.wide_and_narrow(x, g)
        return prod(self.sizes(wide, narrow)) * self.groups

    def pad(
        self,
        wide: Tensor,
        channels_last: bool = False,
    ) -> Tensor:
        """Pad the wide map, [B, C, *] or [B, *, C], as the convolution does."""
        sides = [0, 0] if channels_last else []
        for size in reversed(self.arguments.padding):
            sides += [size, size]
        return F.pad(wide, sides) if any(sides) else wide


def weight_gradient(
    geometry: ConvolutionShape,
    x: Tensor,
    g: Tensor,
) -> Tensor:
    """Return Σᵢ gᵢ for real x [B, C, *] and g [B, O, *], by the backend's kernel."""
    if x.dtype == torch.float64:
        # For maps one pixel wide, torch's fallback kernels read other memory formats wrongly.
        x = x.clone(memory_format=torch.contiguous_format)
        g = g.clone(memory_format=torch.contiguous_format)
    like = x.new_empty(1).expand(geometry.shape)  # only its shape is read
    weight = torch.empty_like(like, memory_format=_memory_format(geometry, x))
    output_mask = [False, True, False]  # the gradient of the weight, not of input and bias
    _, gradient, _ = torch.ops.aten.convolution_backward(
        g,
        x,
        weight,
        None,
        *geometry.arguments,
        output_mask,
    )
    return gradient


def _memory_format(geometry: ConvolutionShape, x: Tensor) -> torch.memory_format:
    """Return the memory format of the maps, because a weight in another one would be copied.

    A weight with a kernel of one pixel has both formats, but torch 2.11 reads it correctly only as
    a contiguous one (for one example and several groups).
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
    """Return `finish(gᵢ)` of each example, [B, ...], by the backend's kernel.

    The result has the backend's memory format, because another one would need a slow copy of each
    example. If a weight is larger than its maps, the maps are copied to channels-first format, so
    that the backend's result is contiguous.
    """
    map_entries = x[:1].numel() + g[:1].numel()
    if prod(geometry.shape) > map_entries:
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
    """Return x [B, C, *] in contiguous format.

    Each example is copied as a matrix, which torch does in blocks. Maps would be copied row by row,
    which takes four times as long if the distance between rows is a power of two.
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
    """Return the gradients [B, *shape] of real maps and one group, by patches. They are a view."""
    padded = geometry.pad(wide.movedim(1, -1), channels_last=True)
    contiguous = padded.contiguous()  # at most one copy
    patches = _unfold(geometry, contiguous, narrow.shape[2:])  # [B, *positions, C, *k]
    patches = patches.movedim(1 + len(geometry.kernel), -1)  # [B, *positions, *k, C]
    gradients = narrow.flatten(2)  # [B, O, T]
    outputs, positions = gradients.shape[1:]
    inputs = prod(geometry.kernel) * wide.shape[1]
    max_bytes = PATCH_BYTES * device_scale(wide, 2 * GPU_SCALE)
    bytes_per_example = positions * inputs * wide.element_size()
    chunk = max(1, min(len(wide), max_bytes // bytes_per_example))
    buffer = wide.new_empty(chunk, positions, inputs)
    product = wide.new_empty(len(wide), outputs, inputs)
    chunks = zip(patches.split(chunk), gradients.split(chunk), product.split(chunk), strict=True)
    for chunk_patches, chunk_gradients, chunk_product in chunks:
        copy = buffer[: len(chunk_patches)]
        copy.view(chunk_patches.shape).copy_(chunk_patches)
        torch.bmm(chunk_gradients, copy, out=chunk_product)
    kernels = product.unflatten(2, (*geometry.kernel, -1))  # [B, O, *k, C]
    return kernels.movedim(-1, 2)


def by_columns(
    geometry: ConvolutionShape,
    wide: Tensor,
    narrow: Tensor,
) -> Tensor:
    """Return the gradients [B, *shape] by columns. They are a view.

    Maps may be complex; x must then be conjugated.
    """
    positions, _, inputs = geometry.sizes(wide, narrow)
    bytes_per_example = positions * inputs * geometry.groups * wide.element_size()
    max_bytes = COLUMN_BYTES * device_scale(wide, 2 * GPU_SCALE)
    chunk = max(1, max_bytes // bytes_per_example)
    chunks = zip(wide.split(chunk), narrow.split(chunk), strict=True)
    products = [_multiply_columns(geometry, *maps) for maps in chunks]
    product = products[0] if len(products) == 1 else torch.cat(products)
    kernels = product.unflatten(2, (-1, *geometry.kernel))  # [B, groups, C/groups, *k, O/groups]
    return kernels.movedim(-1, 2).flatten(1, 2)


def _multiply_columns(
    geometry: ConvolutionShape,
    wide: Tensor,
    narrow: Tensor,
) -> Tensor:
    """Return the product of each group, [b, groups, C·k/groups, O/groups]."""
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
    """Return ‖gᵢ‖², [B] in float64, by Gram matrices, for one group."""
    columns = _columns(geometry, wide, narrow.shape[2:])
    return gram_norms(narrow.flatten(2).mT, columns.mT)


def _columns(
    geometry: ConvolutionShape,
    wide: Tensor,
    positions: tuple[int, ...],
) -> Tensor:
    """Return the entries that each weight multiplies at each position, [B, C, *] -> [B, C·k, T]."""
    dimensions = len(geometry.kernel)
    channels_at_end = geometry.pad(wide).contiguous().movedim(1, -1)
    patches = _unfold(geometry, channels_at_end, positions)  # [B, *positions, C, *k]
    first_dims = tuple(range(1, 1 + dimensions))
    last_dims = tuple(range(-dimensions, 0))
    columns = patches.movedim(first_dims, last_dims)  # [B, C, *k, *positions]
    return columns.reshape(len(wide), -1, prod(positions))


def _unfold(
    geometry: ConvolutionShape,
    wide: Tensor,
    positions: tuple[int, ...],
) -> Tensor:
    """Return a view of the patch at each position, [B, *, C] -> [B, *positions, C, *k]."""
    arguments = geometry.arguments
    sizes = zip(geometry.kernel, arguments.stride, arguments.dilation, positions, strict=True)
    for dim, (kernel_size, stride, dilation, count) in enumerate(sizes, 1):
        extent = (kernel_size - 1) * dilation + 1
        windows = wide.unfold(dim, extent, stride)
        wide = windows[..., ::dilation].narrow(dim, 0, count)
    return wide


@rule(*STANDARDISED.values())
def standardised_convolution(
    layer: nn.Module,
    x: Tensor,
    g: Tensor,
) -> dict[str, LayerGradient]:
    """Return the gradients of a convolution with a standardised weight.

    The rule of the plain convolution does not read the weight, so it returns the gradient of the
    standardised weight. That is then pulled back to the layer's weight.
    """
    weight: Tensor = layer.weight  # type: ignore[assignment]
    is_torch_layer = isinstance(layer, _ConvNd)  # with a complex dtype, too
    plain_rule = torch_convolution if is_torch_layer else complex_convolution
    gradients = plain_rule(layer, x, g)
    pull_gradient_back, max_gain = pull_back(weight.detach())
    filter_size = weight[0].numel()
    gradients["weight"] = transform(gradients["weight"], pull_gradient_back, max_gain, filter_size)
    return gradients
