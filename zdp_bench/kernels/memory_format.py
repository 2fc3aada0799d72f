"""How maps lie in memory: in which order, and complex channels as interleaved real ones.

Channel c becomes 2c (real part) and 2c + 1 (imaginary part). In channels-last memory the two are the very same bytes, so neither
direction copies. Real kernels (convolution, pooling) then do complex work, and no complex kernel, all of them slow, stands in the
path.

Gradients pass without a copy too where `view_as_real` and its inverse see contiguous numbers: torch makes theirs contiguous. So
the channels are moved to the end before, and back behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def in_transform(x: Tensor) -> bool:
    """Whether one of torch.func's transforms looks on x. While torch compiles that cannot be asked: the question would cut the
    compiled code in two, at a map whose memory `torch.compile` (2.11) does not understand."""
    return not torch.compiler.is_compiling() and torch._C._functorch.is_functorch_wrapped_tensor(x)


def channels_last(x: Tensor) -> Tensor:
    """x [B, C, *] with the channels of one position side by side in memory; copied only if they are not yet."""
    if x.dim() == 4 and not in_transform(x):  # vmap knows no torch.channels_last
        return (
            x
            if x.is_contiguous(memory_format=torch.channels_last)
            else x.contiguous(memory_format=torch.channels_last)
        )
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def as_real_channels(x: Tensor) -> Tensor:
    """Complex [B, C, *] -> real [B, 2C, *]; a view where x is channels-last."""
    parts = torch.view_as_real(x.resolve_conj().movedim(1, -1))  # [B, *, C, 2]
    return parts.flatten(-2).movedim(-1, 1)


def as_complex_channels(x: Tensor) -> Tensor:
    """Real [B, 2C, *] -> complex [B, C, *]; a view where x is channels-last."""
    return torch.view_as_complex(channels_last(x).movedim(1, -1).unflatten(-1, (-1, 2))).movedim(
        -1, 1
    )


def by_positions(x: Tensor) -> Tensor:
    """Complex [B, C, H, W] as compiled loops read it: channels-last, with no bar that waits; x itself where it lies so."""
    if x.is_conj():
        x = x.resolve_conj()
    return (
        x
        if x.is_contiguous(memory_format=torch.channels_last)
        else x.contiguous(memory_format=torch.channels_last)
    )


def room_for(records: int, channels: int, height: int, width: int) -> Tensor:
    """A complex map [B, C, H, W] for compiled loops to fill, channels-last."""
    layout = torch.channels_last
    return torch.empty(
        records, channels, height, width, dtype=torch.complex64, device="cpu", memory_format=layout
    )


_rounded_alike: list[None] = []  # an entry for every context that wants it


@contextmanager
def rounded_alike() -> Iterator[None]:
    """Inside, no convolution takes loops of our own, which torch's transforms cannot: for gradients that are compared. A badly
    conditioned network makes 3 % of a gradient of a map's last bits (seen: instance norms of 4 pixels)."""
    _rounded_alike.append(None)
    try:
        yield
    finally:
        _rounded_alike.pop()


def lie_plainly(*tensors: Tensor) -> bool:
    """Whether they are complex64 numbers in a CPU's memory, outside of torch's transforms and autocast, and no gradient of a
    gradient is wanted; nor that all be `rounded_alike`."""
    if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or _rounded_alike:
        return False
    return all(
        type(x) in (Tensor, nn.Parameter)
        and not in_transform(x)
        and x.dtype == torch.complex64
        and x.is_cpu
        and x.numel() > 0
        for x in tensors
    )


def memory_order(x: Tensor) -> list[int]:
    """The dimensions of x [B, *map] but the first, from the one whose neighbours lie farthest apart in memory to the nearest."""
    return sorted(range(1, x.dim()), key=x.stride, reverse=True)


def in_memory_order(x: Tensor) -> Tensor:
    """[B, *map] -> [B, n]; a view where x has no gaps."""
    return x.permute(0, *memory_order(x)).flatten(1)


def in_own_order(flat: Tensor, x: Tensor) -> Tensor:
    """Numbers [*, n] in the order in which x [B, *map] lies in memory -> [*, n] in the map's own."""
    order = memory_order(x)
    before = flat.dim() - 1
    mapped = flat.unflatten(-1, [x.shape[dim] for dim in order])
    return mapped.permute(
        *range(before), *(before + order.index(dim) for dim in range(1, x.dim()))
    ).flatten(before)
