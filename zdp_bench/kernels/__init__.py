"""CPU kernels compiled by numba, behind one door: nothing else imports numba or llvmlite.

No result depends on a kernel. Each has a twin of torch or numpy, which GPUs, other CPUs and
`execution.kernels=off` use, and which tests hold it equal to:

    winograd        complex 3×3 convolutions of many channels; twin: `nn.convolution`

What each saves is measured in docs/performance.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor, nn

_enabled = True


def enable(on: bool) -> None:
    """Let kernels run, or leave everything to their twins."""
    global _enabled
    _enabled = on


def enabled() -> bool:
    """True if kernels may run: they were not turned off, and numba is installed."""
    return _enabled and _has_numba()


@contextmanager
def disabled() -> Iterator[None]:
    """Leave everything to the twins inside, so that compared gradients are rounded alike.

    torch's transforms cannot call kernels, and a badly conditioned network turns a map's last bits
    into 3 % of a gradient (measured with instance norms of 4 pixels).
    """
    before = _enabled
    enable(False)
    try:
        yield
    finally:
        enable(before)


def may_run(dtype: torch.dtype, *tensors: Tensor) -> bool:
    """True if a kernel of wide vectors may read these tensors.

    They must be plain, non-empty CPU tensors of this dtype on a processor with AVX-512, outside of
    torch's transforms, autocast, `torch.compile` and double backward.
    """
    if not enabled() or torch.compiler.is_compiling() or not _has_avx512():
        return False
    if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return False
    return all(
        type(x) in (Tensor, nn.Parameter)
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
        and x.dtype == dtype
        and x.is_cpu
        and x.numel() > 0
        for x in tensors
    )


@cache
def _has_numba() -> bool:
    return find_spec("numba") is not None


@cache
def _has_avx512() -> bool:
    """True if the processor has 32 registers of 16 float32 numbers, which the kernels fill."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512"
