"""Per-sample gradients of real convolutions whose maps lie channels first, by a loop of our own (`nn/tiles.py`).

Columns of what each position meets, as a matrix product wants them, are as many copies of the input as a kernel has taps. Here
the input is read where it lies (seen: a quarter to four fifths of the time for up to 160 entries; a product is faster beyond).
"""

from __future__ import annotations

import math
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from zdp_bench.kernels import conv_tiles
from zdp_bench.kernels.jit import Loop, compiled, task_of

ENTRIES = 160  # that an output position meets, at most
POSITIONS = 2**13  # of a map at most: a sum of so many numbers, in 16 parts, keeps its digits


def serve(x: Tensor, g: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the loop is for input [B, C, *] and output gradient [B, O, *] of a convolution in one group: float32 maps of one or
    two dimensions, channels first, on a processor with AVX-512."""
    if (
        len(kernel) > 2
        or any(step != 1 for step in stride)
        or g.shape[1] < conv_tiles.MET[0]
        or g.numel() == 0
    ):
        return False
    if (
        not conv_tiles.MET[1] <= x.shape[1] * math.prod(kernel) <= ENTRIES
        or math.prod(x.shape[2:]) > POSITIONS
    ):
        return False
    if not conv_tiles.have_their_registers():
        return False
    return all(
        each.dtype == torch.float32 and each.is_cpu and each.is_contiguous() for each in (x, g)
    )


def gradient_rows(
    x: Tensor,
    g: Tensor,
    kernel: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    """Each record's gradients of weight, [B, O, C, *k], and bias, [B, O]; of a convolution with a stride of 1."""
    return _gradient_rows(x, g, kernel, padding, dilation, _loop())


def _gradient_rows(
    x: Tensor,
    g: Tensor,
    kernel: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    loop: Loop,
) -> tuple[Tensor, Tensor]:
    if any(padding):
        x = F.pad(x, [p for size in reversed(padding) for p in (size, size)])
    records, outputs, *rows, width = g.shape
    channel, *steps = x.stride()[1:]
    places = conv_tiles.places(
        (x.shape[1], *kernel),
        (channel, *(by * step for by, step in zip(dilation, steps, strict=True))),
    )
    m, total = x.new_empty(records, outputs, *x.shape[1:2], *kernel), x.new_empty(records, outputs)
    words = [
        x.data_ptr(),
        g.data_ptr(),
        m.data_ptr(),
        total.data_ptr(),
        places.data_ptr(),
        len(places),
        outputs,
    ]
    words += [math.prod(rows), width, math.prod(x.shape[1:]), x.shape[-1]]
    loop.run(task_of([(records, words)]))
    return m, total


@cache
def _loop() -> Loop:
    return compiled(conv_tiles.correlate_planes)
