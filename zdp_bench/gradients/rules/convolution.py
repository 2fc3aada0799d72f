"""Convolutions of one to three dimensions, transposed or not, real or complex, torch's and ours.

A complex convolution is a real one over interleaved channels, so its gradient is that real
gradient, folded (`nn.convolution.folded_gradient`). `_real_weight` and `_complex_weight` choose
among the ways to per-sample gradients:

    kernels        a compiled loop, for the convolutions it serves (`zdp_bench.kernels`)
    one by one     large examples: the backend's own weight gradient, one after the other
                   (measured: as fast as the next two at 16 million products)
    patches        small examples: [O, T] · [T, k·C], of many channels that lie side by side
    columns        small examples: [C·k, T] · [T, O]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import prod

import torch.nn.functional as F
from torch import Tensor, nn

from zdp_bench.gradients.convolution_weights import (
    Geometry,
    by_columns,
    by_patches,
    ghost_norms,
    one_by_one,
    weight_gradient,
)
from zdp_bench.gradients.layer_gradient import (
    LayerGradient,
    Summands,
    bound_summands,
    ghost_is_cheaper,
    weigh,
)
from zdp_bench.gradients.rules import rule
from zdp_bench.kernels import channels_first, winograd
from zdp_bench.nn.convolution import (
    ComplexConv1d,
    ComplexConv2d,
    ComplexConv3d,
    ComplexConvTranspose2d,
    folded_gradient,
)
from zdp_bench.nn.memory_format import as_real_channels, channels_last

# Multiplications of one example's weight gradient from which the backend's own kernel pays.
LARGE_EXAMPLE = 16_000_000


@rule(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
def torch_convolution(layer: nn.Module, x: Tensor, g: Tensor) -> dict[str, LayerGradient]:
    """torch's own; string paddings and padding modes are applied to the input first."""
    assert isinstance(layer, nn.modules.conv._ConvNd)
    if layer.padding_mode == "zeros" and not isinstance(layer.padding, str):
        return _convolution(layer, x, g, tuple(layer.padding))
    return _convolution(layer, pad_input(layer, x), g, (0,) * len(layer.kernel_size))


@rule(ComplexConv1d, ComplexConv2d, ComplexConv3d, ComplexConvTranspose2d)
def complex_convolution(layer: nn.Module, x: Tensor, g: Tensor) -> dict[str, LayerGradient]:
    """Ours."""
    return _convolution(layer, x, g, layer.padding)  # type: ignore[arg-type]


def pad_input(layer: nn.modules.conv._ConvNd, x: Tensor) -> Tensor:
    """Pad x [B, C, *] as one of torch's layers pads it."""
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    return F.pad(x, layer._reversed_padding_repeated_twice, mode=mode)


def _convolution(
    layer: nn.Module, x: Tensor, g: Tensor, padding: tuple[int, ...]
) -> dict[str, LayerGradient]:
    weight: Tensor = layer.weight  # type: ignore[assignment]
    geometry = Geometry(
        tuple(weight.shape),
        layer.stride,  # type: ignore[arg-type]
        padding,
        layer.dilation,  # type: ignore[arg-type]
        bool(layer.transposed),
        layer.output_padding,  # type: ignore[arg-type]
        layer.groups,  # type: ignore[arg-type]
    )
    of_weight = _complex_weight if weight.is_complex() else _real_weight
    gradients = {"weight": of_weight(geometry, x, g)}
    if layer.bias is not None:
        gradients["bias"] = LayerGradient.of(g.flatten(2).sum(dim=2))
    return gradients


def _real_weight(geometry: Geometry, x: Tensor, g: Tensor) -> LayerGradient:
    """The weight of a real convolution, from x [B, C, *] and g [B, O, *]."""
    wide, narrow = geometry.wide_and_narrow(x, g)
    positions, outputs, inputs = geometry.sizes(wide, narrow)

    def by_kernel(start: int, stop: int) -> Tensor:
        numbers = geometry.kernel, geometry.padding, geometry.dilation
        return channels_first.per_sample_gradients(x[start:stop], g[start:stop], *numbers)

    def from_backend(start: int, stop: int) -> Tensor:
        return one_by_one(geometry, x[start:stop], g[start:stop])

    def from_patches(start: int, stop: int) -> Tensor:
        return by_patches(geometry, wide[start:stop], narrow[start:stop])

    def from_columns(start: int, stop: int) -> Tensor:
        return by_columns(geometry, wide[start:stop], narrow[start:stop])

    if geometry.work(x, g) >= LARGE_EXAMPLE or len(x) == 1:
        per_sample = from_backend
    elif (
        not geometry.transposed
        and geometry.groups == 1
        and channels_first.serves(x, g, geometry.kernel, geometry.stride)
    ):
        per_sample = by_kernel
    elif wide.movedim(1, -1).is_contiguous() and _suits_patches(geometry, wide, narrow, 1):
        per_sample = from_patches
    else:
        per_sample = from_columns
    ghost = geometry.groups == 1 and ghost_is_cheaper(positions, outputs, inputs, x.element_size())
    return LayerGradient(
        per_sample,
        lambda factors: weight_gradient(geometry, x, weigh(g, factors)),
        squared_norms=(lambda: ghost_norms(geometry, wide, narrow)) if ghost else None,
        summands=lambda: _summands(geometry, wide, narrow),
    )


def _complex_weight(geometry: Geometry, x: Tensor, g: Tensor) -> LayerGradient:
    """The weight of a complex convolution, from x [B, C, *] and g [B, O, *]."""
    wide, narrow = geometry.wide_and_narrow(x, g)
    outputs, inputs, *kernel = geometry.shape
    as_real = replace(geometry, shape=(2 * outputs, 2 * inputs, *kernel))
    kernel_arguments = (
        geometry.shape,
        geometry.stride,
        geometry.padding,
        geometry.dilation,
        geometry.transposed,
        geometry.groups,
    )
    shape = winograd.shape_of(*kernel_arguments)

    @cache
    def reals() -> tuple[Tensor, Tensor]:
        """Interleaved x and g, channels last: oneDNN takes them without a copy."""
        return as_real_channels(channels_last(x)), as_real_channels(channels_last(g))

    def fold(real: Tensor) -> Tensor:
        flat = folded_gradient(real.flatten(-len(kernel)), geometry.transposed)
        return flat.unflatten(-1, kernel)

    def summands() -> Summands:
        return _summands(geometry, wide, narrow)

    def from_backend(start: int, stop: int) -> Tensor:
        real_x, real_g = reals()
        return one_by_one(as_real, real_x[start:stop], real_g[start:stop], fold)

    def from_patches(start: int, stop: int) -> Tensor:
        real_wide, real_narrow = geometry.wide_and_narrow(*reals())
        return fold(by_patches(as_real, real_wide[start:stop], real_narrow[start:stop]))

    def from_columns(start: int, stop: int) -> Tensor:
        conjugate = x[start:stop].conj().resolve_conj()
        return by_columns(geometry, *geometry.wide_and_narrow(conjugate, g[start:stop]))

    if shape is not None and shape.serves(x, g):
        return _winograd_weight(shape, x, g, summands)
    if 4 * geometry.work(x, g) >= LARGE_EXAMPLE or len(x) == 1:
        per_sample = from_backend
    elif _suits_patches(geometry, wide, narrow, 2):
        per_sample = from_patches
    else:
        per_sample = from_columns

    def weighted_sum(factors: Tensor) -> Tensor:
        real_x, real_g = reals()
        return fold(weight_gradient(as_real, real_x, weigh(real_g, factors)))

    return LayerGradient(per_sample, weighted_sum, summands=summands)


def _winograd_weight(
    of: winograd.Shape, x: Tensor, g: Tensor, summands: Callable[[], Summands]
) -> LayerGradient:
    def per_sample_and_norms(start: int, stop: int) -> tuple[Tensor, Tensor]:
        return winograd.per_sample_gradients(of, x[start:stop], g[start:stop])

    return LayerGradient(
        lambda start, stop: per_sample_and_norms(start, stop)[0],
        lambda factors: winograd.weight_gradient(of, x, weigh(g, factors)),
        per_sample_and_norms=per_sample_and_norms,
        summands=summands,
    )


def _summands(geometry: Geometry, wide: Tensor, narrow: Tensor) -> Summands:
    """Every position of the smaller map meets a kernel of the larger."""
    positions, _, _ = geometry.sizes(wide, narrow)
    return bound_summands(narrow, wide, positions, prod(geometry.kernel))


def _suits_patches(geometry: Geometry, wide: Tensor, narrow: Tensor, parts: int) -> bool:
    """True if many real numbers lie side by side, and positions outweigh the folding.

    Measured, complex: 8 to 24 channels on 32² half the time of columns, 16 on 16² a tenth less;
    3 on 32² and 32 on 8² more.
    """
    positions, outputs, _ = geometry.sizes(wide, narrow)
    reals = parts * wide.shape[1]
    return geometry.groups == 1 and reals >= 16 and positions >= 4 * outputs
