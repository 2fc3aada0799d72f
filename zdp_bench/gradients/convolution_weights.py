"""Weight gradients of real and complex convolutions, of one batch or per sample, in plain torch.

A transposed convolution is a convolution run backwards: in its weight gradient x and g change
places. The `wide` map is the one that kernels slide over, `narrow` has one entry per position.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from zdp_bench.gradients.layer_gradient import gram_norms

# Patches of at most so many bytes are built at a time: they stay in the cache until multiplied.
PATCH_BYTES = 4 * 2**20
# Likewise columns: the system takes larger blocks back, and clears them each time.
COLUMN_BYTES = 32 * 2**20


@dataclass(frozen=True)
class Geometry:
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

    def wide_and_narrow(self, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        return (g, x) if self.transposed else (x, g)

    def sizes(self, wide: Tensor, narrow: Tensor) -> tuple[int, int, int]:
        """Return T, O and D of one group's product [D, T] · [T, O]."""
        inputs = wide.shape[1] // self.groups * prod(self.kernel)
        return prod(narrow.shape[2:]), narrow.shape[1] // self.groups, inputs

    def work(self, x: Tensor, g: Tensor) -> int:
        """Return the multiplications of one example's weight gradient."""
        return prod(self.sizes(*self.wide_and_narrow(x, g))) * self.groups


def weight_gradient(geometry: Geometry, x: Tensor, g: Tensor) -> Tensor:
    """Return Σᵢ gᵢ from the backend's own kernel; real x [B, C, *] and g [B, O, *]."""
    if x.dtype == torch.float64:
        # torch's slow kernels misread other layouts where a map is one pixel wide.
        x, g = (part.clone(memory_format=torch.contiguous_format) for part in (x, g))
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
    wanted = [False, True, False]
    return torch.ops.aten.convolution_backward(g, x, weight, None, *numbers, wanted)[1]


def _memory_format(geometry: Geometry, x: Tensor) -> torch.memory_format:
    """Return the format of the maps: a weight in another one would be copied first.

    A weight of one pixel has both formats, but only as a contiguous one is it read right (torch
    2.11: one example, several groups).
    """
    if x.is_contiguous() or x.dim() < 4 or prod(geometry.kernel) == 1:
        return torch.contiguous_format
    return torch.channels_last if x.dim() == 4 else torch.channels_last_3d


def one_by_one(
    geometry: Geometry,
    x: Tensor,
    g: Tensor,
    finish: Callable[[Tensor], Tensor] = lambda gradient: gradient,
) -> Tensor:
    """Return `finish(gᵢ)` of every example, [B, ...], each by the backend's own kernel.

    The result keeps the backend's memory format: another one costs a slow copy per example. Where
    a weight is larger than its maps, channels-first maps make the backend's format contiguous.
    """
    if prod(geometry.shape) > x[:1].numel() + g[:1].numel():
        x, g = _channels_first(x), _channels_first(g)
    first = finish(weight_gradient(geometry, x[:1], g[:1]))
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
        rows[i] = finish(weight_gradient(geometry, x[i : i + 1], g[i : i + 1]))
    return rows


def _channels_first(x: Tensor) -> Tensor:
    """Return [B, C, *] contiguous, each example copied as a matrix.

    torch copies matrices in blocks but maps line by line, which is four times as slow where lines
    are powers of two apart.
    """
    if x.is_contiguous():
        return x
    copy = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for to, of in zip(copy, x, strict=True):
        to.flatten(1).copy_(of.flatten(1))
    return copy


def by_patches(geometry: Geometry, wide: Tensor, narrow: Tensor) -> Tensor:
    """Return [B, *shape], a view; real channels-last maps, one group."""
    channels_end = _pad(geometry, wide).movedim(1, -1)
    patches = _unfold(geometry, channels_end, narrow.shape[2:])  # [B, *positions, C, *k]
    patches = patches.movedim(1 + len(geometry.kernel), -1)  # [B, *positions, *k, C]
    gradients = narrow.flatten(2)  # [B, O, T]
    outputs, positions = gradients.shape[1:]
    inputs = prod(geometry.kernel) * wide.shape[1]
    few = max(1, min(len(wide), PATCH_BYTES // (positions * inputs * wide.element_size())))
    copied = wide.new_empty(few, positions, inputs)
    product = wide.new_empty(len(wide), outputs, inputs)
    for start in range(0, len(wide), few):
        some = patches[start : start + few]
        right = copied[: len(some)]
        right.view(some.shape).copy_(some)
        torch.bmm(gradients[start : start + few], right, out=product[start : start + few])
    return product.unflatten(2, (*geometry.kernel, -1)).movedim(-1, 2)  # [B, O, C, *k]


def by_columns(geometry: Geometry, wide: Tensor, narrow: Tensor) -> Tensor:
    """Return [B, *shape], a view; also of complex maps, of which x is conjugated already."""
    per_example = wide.shape[1] * prod(geometry.kernel) * prod(narrow.shape[2:])
    few = max(1, COLUMN_BYTES // (per_example * wide.element_size()))
    products = [
        _multiply_columns(geometry, w, n)
        for w, n in zip(wide.split(few), narrow.split(few), strict=True)
    ]  # [b, groups, C·k/groups, O/groups] each
    product = products[0] if len(products) == 1 else torch.cat(products)
    return product.unflatten(2, (-1, *geometry.kernel)).movedim(-1, 2).flatten(1, 2)


def _multiply_columns(geometry: Geometry, wide: Tensor, narrow: Tensor) -> Tensor:
    groups = geometry.groups
    columns = _columns(geometry, wide, narrow.shape[2:])  # [b, C·k, T]
    columns = columns.reshape(len(wide) * groups, -1, columns.shape[2])
    gradients = narrow.reshape(len(wide) * groups, narrow.shape[1] // groups, -1)
    return torch.bmm(columns, gradients.transpose(1, 2)).unflatten(0, (-1, groups))


def ghost_norms(geometry: Geometry, wide: Tensor, narrow: Tensor) -> Tensor:
    """Return ‖gᵢ‖², [B] in float64, by Gram matrices; one group."""
    columns = _columns(geometry, wide, narrow.shape[2:])
    return gram_norms(narrow.flatten(2).transpose(1, 2), columns.transpose(1, 2))


def _columns(geometry: Geometry, wide: Tensor, positions: tuple[int, ...]) -> Tensor:
    """Return what each weight meets at each position: [B, C, *] -> [B, C·k, T]."""
    dimensions = len(geometry.kernel)
    channels_end = _pad(geometry, wide).contiguous().movedim(1, -1)
    met = _unfold(geometry, channels_end, positions)  # [B, *positions, C, *k]
    met = met.movedim(tuple(range(1, 1 + dimensions)), tuple(range(-dimensions, 0)))
    return met.reshape(len(wide), -1, prod(positions))


def _pad(geometry: Geometry, wide: Tensor) -> Tensor:
    if not any(geometry.padding):
        return wide
    return F.pad(wide, [p for size in reversed(geometry.padding) for p in (size, size)])


def _unfold(geometry: Geometry, wide: Tensor, positions: tuple[int, ...]) -> Tensor:
    """Return what each position meets: [B, *, C] -> [B, *positions, C, *k], a view."""
    of = zip(geometry.kernel, geometry.stride, geometry.dilation, positions, strict=True)
    for dim, (size, stride, dilation, number) in enumerate(of, 1):
        wide = wide.unfold(dim, (size - 1) * dilation + 1, stride)[..., ::dilation]
        wide = wide.narrow(dim, 0, number)
    return wide
