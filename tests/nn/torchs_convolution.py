"""What loops of our own are held against: torch's complex convolution in complex128, and its gradients record by record."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

needs_wide_vectors = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512",
    reason="the loops are for processors with AVX-512",
)


def expected(
    x: Tensor, w: Tensor, bias: Tensor, g: Tensor, *numbers: tuple[int, ...]
) -> tuple[Tensor, ...]:
    """y, ∂x, and ∂w and ∂bias of every record, for an output gradient g; `numbers` are stride, padding and dilation."""
    x, w, bias = (each.detach().to(torch.complex128).requires_grad_() for each in (x, w, bias))
    y = F.conv2d(x, w, bias, *numbers)
    of_x = torch.autograd.grad(y, x, g.to(y.dtype), retain_graph=True)[0]
    rows = [
        torch.autograd.grad(y[i], [w, bias], g[i].to(y.dtype), retain_graph=True)
        for i in range(len(x))
    ]
    return (
        y,
        of_x,
        torch.stack([of_w for of_w, _ in rows]),
        torch.stack([of_bias for _, of_bias in rows]),
    )


def close(found: Tensor, exact: Tensor) -> None:
    assert found.shape == exact.shape
    assert (found - exact).norm() <= 1e-6 * exact.norm()
