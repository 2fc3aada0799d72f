"""Releases of Opacus itself, which claims more for complex networks than it gives."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from zdp_bench.audit.cases.algorithms import SIGMA
from zdp_bench.audit.cases.toy import as_rows
from zdp_bench.audit.release import Release


def release_opacus(seed: int, ghost: bool = False, secure_mode: bool = False) -> Release:
    """Opacus itself on one complex linear layer: its gradients, its clipping, its noise."""
    with warnings.catch_warnings(action="ignore"):
        sums, optimizer = _opacus_sums(seed, ghost, secure_mode)

    def release(present: bool, count: int) -> Tensor:
        (parameter,) = optimizer.params
        rows = torch.empty((count, *parameter.shape), dtype=parameter.dtype)
        with torch.no_grad():
            for i in range(count):
                parameter.summed_grad = sums[present].clone()
                optimizer.add_noise()
                rows[i] = parameter.grad
        return as_rows(rows)

    return release


def _opacus_sums(seed: int, ghost: bool, secure_mode: bool) -> tuple[tuple[Tensor, Tensor], Any]:
    """Opacus's sums without and with the example that moves them most, and its optimiser."""
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    generator = torch.Generator().manual_seed(seed % 2**63)
    layer = nn.Linear(2, 2, bias=False, dtype=torch.complex64)
    with torch.no_grad():
        layer.weight.copy_(
            torch.randn(layer.weight.shape, dtype=torch.complex64, generator=generator)
        )
    inputs = 100 * torch.randn(40, 2, dtype=torch.complex64, generator=generator)
    targets = torch.randint(0, 2, (40,), generator=generator)
    wrapped = GradSampleModuleFastGradientClipping if ghost else GradSampleModule
    optimizing = DPOptimizerFastGradientClipping if ghost else DPOptimizer
    more = {"max_grad_norm": 1.0, "use_ghost_clipping": True} if ghost else {}
    model = wrapped(layer, batch_first=True, loss_reduction="sum", **more)
    optimizer = optimizing(
        torch.optim.SGD(model.parameters(), lr=0.0),
        noise_multiplier=SIGMA,
        max_grad_norm=1.0,
        expected_batch_size=None,
        loss_reduction="sum",
        generator=generator,
        secure_mode=secure_mode,
    )
    criterion = nn.CrossEntropyLoss(reduction="sum")
    loss = (
        DPLossFastGradientClipping(model, optimizer, criterion, loss_reduction="sum")
        if ghost
        else criterion
    )

    def clipped_sum(batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss(model(inputs[batch]).abs(), targets[batch]).backward()
        if ghost:
            optimizer.accumulate()
        else:
            optimizer.clip_and_accumulate()
        (parameter,) = optimizer.params
        return parameter.summed_grad.detach().clone()

    rest = clipped_sum(torch.tensor([0, 1]))
    with_each = [clipped_sum(torch.tensor([0, 1, extra])) for extra in range(2, len(inputs))]
    return (rest, max(with_each, key=lambda moved: float((moved - rest).norm()))), optimizer
