"""Per-sample gradients of real convolutions of few inputs, whose maps are channels first.

A matrix product needs columns: as many copies of the input as a kernel has taps. This loop
(`loops.py`) reads the input where it is, which takes a quarter to four fifths of the
time if an output position meets up to 160 inputs; a product is faster beyond.
"""

from __future__ import annotations

import itertools
import math
from functools import cache, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zdp_bench.kernels import may_run

OUTPUTS, INPUTS = 4, 5  # of a tile: 20 sums are held in registers
MAX_INPUTS = 160  # that an output position meets
MAX_POSITIONS = 2**13  # of a map: float32 sums of so many numbers, in 16 parts, keep their digits


def serves(x: Tensor, g: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """True if the kernel may run, and pays, for a convolution in one group.

    Args:
        x: input [B, C, *] of one or two dimensions.
        g: output gradient [B, O, *].
    """
    met, positions = x.shape[1] * math.prod(kernel), math.prod(x.shape[2:])
    plain = len(kernel) <= 2 and all(step == 1 for step in stride)
    sizes = g.shape[1] >= OUTPUTS and INPUTS <= met <= MAX_INPUTS and positions <= MAX_POSITIONS
    in_order = x.is_contiguous() and g.is_contiguous()
    return plain and sizes and in_order and may_run(torch.float32, x, g)


def per_sample_gradients(
    x: Tensor,
    g: Tensor,
    kernel: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
) -> Tensor:
    """Each example's gradient of the weight, [B, O, C, *k]; the stride is 1."""
    if any(padding):
        x = F.pad(x, [p for size in reversed(padding) for p in (size, size)])
    examples, outputs, *rows, width = g.shape
    channel, *steps = x.stride()[1:]
    apart = (channel, *(by * step for by, step in zip(dilation, steps, strict=True)))
    met = _offsets((x.shape[1], *kernel), apart)
    gradients = x.new_empty(examples, outputs, *x.shape[1:2], *kernel)
    words = [x.data_ptr(), g.data_ptr(), gradients.data_ptr(), met.data_ptr()]
    words += [len(met), outputs, math.prod(rows), width, math.prod(x.shape[1:]), x.shape[-1]]
    _loop().run(examples, words)
    return gradients


@lru_cache(maxsize=256)
def _offsets(sizes: tuple[int, ...], steps: tuple[int, ...]) -> Tensor:
    """How far each number that a position meets is from the first one."""
    indices = itertools.product(*(range(size) for size in sizes))
    every = [sum(i * step for i, step in zip(index, steps, strict=True)) for index in indices]
    return torch.tensor(every, device="cpu")


@cache
def _loop() -> Any:
    """The compiled loop; numba is imported here, at the kernel's first call."""
    from zdp_bench.kernels.jit import compile_loop
    from zdp_bench.kernels.loops import correlate_channels_first

    return compile_loop(correlate_channels_first)
