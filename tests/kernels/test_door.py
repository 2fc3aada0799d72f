"""The switch: what it leaves to torch, and when a kernel may run at all."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from tests.kernels.exact_convolution import needs_avx512, needs_kernels
from zdp_bench import kernels
from zdp_bench.gradients import clipped_sum
from zdp_bench.nn.convolution import ComplexConv2d
from zdp_bench.nn.memory_format import channels_last
from zdp_bench.training.machine import execution_digest

PLAIN = torch.ones(2, dtype=torch.complex64)


@needs_avx512
@needs_kernels
def test_kernels_run_on_plain_tensors_only() -> None:
    with torch.no_grad():
        assert kernels.may_run(torch.complex64, PLAIN, nn.Parameter(PLAIN))
        for other in (PLAIN.to(torch.complex128), PLAIN[:0], PLAIN.to("meta")):
            assert not kernels.may_run(torch.complex64, PLAIN, other)
        with torch.autocast("cpu"):
            assert not kernels.may_run(torch.complex64, PLAIN)
        seen = torch.func.vmap(lambda z: torch.tensor(kernels.may_run(torch.complex64, z)))(PLAIN)
        assert not seen.any()
        with kernels.disabled():
            with kernels.disabled():
                pass
            assert not kernels.may_run(torch.complex64, PLAIN)
        assert kernels.may_run(torch.complex64, PLAIN)
    assert not kernels.may_run(torch.complex64, PLAIN)  # a gradient of theirs has none


@pytest.mark.parametrize("bias", [True, False])
def test_a_private_sum_is_the_same_on_and_off(bias: bool) -> None:
    """Of a network that every kernel of gradients has a part in."""
    torch.manual_seed(0)
    complex_net = nn.Sequential(
        ComplexConv2d(16, 16, 3, padding=1, bias=bias), ComplexConv2d(16, 32, 3, bias=bias)
    )
    real_net = nn.Sequential(nn.Conv2d(3, 6, 3, bias=bias), nn.Conv2d(6, 5, 3, bias=bias))
    for net, x in (
        (complex_net, channels_last(torch.randn(3, 16, 12, 10, dtype=torch.complex64))),
        (real_net, torch.randn(3, 3, 12, 10)),
    ):
        batch = x, torch.zeros(3)

        def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return outputs.abs().square().flatten(1).sum(dim=1)

        on = clipped_sum(net, loss, batch, 1.0, engine="fast")
        with kernels.disabled():
            off = clipped_sum(net, loss, batch, 1.0, engine="fast")
        torch.testing.assert_close(on.norms, off.norms, rtol=1e-5, atol=0)
        for name, sum_ in on.sums.items():
            torch.testing.assert_close(sum_, off.sums[name], rtol=1e-4, atol=1e-5)


def test_numba_is_imported_at_a_kernels_first_call() -> None:
    code = (
        "import sys, zdp_bench.training.run, zdp_bench.gradients.rules.convolution;"
        "assert not {'numba', 'llvmlite'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_run_is_execution_digest_kernels_or_without() -> None:
    """Steps that are taken again on the twins have other last bits, so they are new releases."""
    arguments = (), torch.device("cpu"), 16, 1, False
    with kernels.disabled():
        off = execution_digest(*arguments)
    kernels._enabled, before = True, kernels._enabled
    try:
        assert execution_digest(*arguments) != off
    finally:
        kernels._enabled = before
