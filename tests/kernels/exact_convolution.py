"""torch's complex convolution in complex128, and its gradients example by example."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from zdp_bench import kernels

needs_avx512 = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="the kernel needs AVX-512"
)
needs_kernels = pytest.mark.skipif(not kernels.enabled(), reason="kernels are off")


def convolve(
    x: Tensor, w: Tensor, bias: Tensor, g: Tensor, padding: tuple[int, ...]
) -> tuple[Tensor, ...]:
    """y, ∂x, and every example's ∂w, for an output gradient g."""
    x, w, bias = (each.detach().to(torch.complex128).requires_grad_() for each in (x, w, bias))
    y = F.conv2d(x, w, bias, padding=padding)
    (of_x,) = torch.autograd.grad(y, x, g.to(y.dtype), retain_graph=True)
    rows = [
        torch.autograd.grad(y[i], w, g[i].to(y.dtype), retain_graph=True)[0] for i in range(len(x))
    ]
    return y, of_x, torch.stack(rows)


def close(found: Tensor, exact: Tensor) -> None:
    assert found.shape == exact.shape
    assert (found - exact).norm() <= 1e-6 * exact.norm()
