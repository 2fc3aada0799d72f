"""Every rule computes on the device of its inputs: no tensor of a step is left on the CPU.

torch's meta device stands in for a GPU. It refuses to combine its tensors with those of the CPU,
and to read numbers from them, for which a GPU would have to wait.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.gradients.harness import CASES, Case
from zdp_bench.gradients import Shares, fast
from zdp_bench.gradients.clipping import defer_finite

# They read numbers, or torch has no such operation on this device.
READ_NUMBERS = ("standardised", "Embedding", "packed LSTM")
WITHOUT_READING = [case for case in CASES if not case.name.startswith(READ_NUMBERS)]


def weighted_modulus(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.abs().flatten(1).sum(dim=1) * targets


@pytest.mark.parametrize("shares", [None, (2, 1)], ids=["examples", "shares"])
@pytest.mark.parametrize("case", WITHOUT_READING, ids=lambda case: case.name)
def test_a_sum_is_computed_on_the_device_of_the_model(case: Case, shares: Shares | None) -> None:
    model = case.module(torch.float32).to("meta")
    inputs, targets = (tensor.to("meta") for tensor in case.batch(3, torch.float32))
    with defer_finite(torch.ones((), dtype=torch.bool, device="meta")):
        clipped = fast.clipped_sum(
            model, weighted_modulus, (inputs, targets), 1.0, shares=shares, per_layer=True
        )
    assert all(value.is_meta for value in clipped.sums.values())
