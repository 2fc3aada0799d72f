"""Augmentation: training inputs only, drawn by (seed, step, example), for any micro-batch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tests.training.test_run import TINY
from zdp_bench.config import compose, parse
from zdp_bench.data import N_UNIFORMS, Examples
from zdp_bench.training.batches import micro_batches

RECORDS = Examples(torch.arange(20.0).reshape(10, 2), torch.zeros(10, dtype=torch.long))
CPU = torch.device("cpu")


def shifted(inputs: Tensor, uniforms: Tensor) -> Tensor:
    assert uniforms.shape == (len(inputs), N_UNIFORMS)
    return inputs + uniforms[:, :2]


def augmented(micro_batch: int, step: int = 3, key: str = "a run's") -> Tensor:
    config = parse(compose([*TINY, f"trainer.micro_batch={micro_batch}"]))
    drawn = np.array([7, 1, 4, 9])
    return torch.cat(
        [inputs for inputs, _ in micro_batches(RECORDS, drawn, config, CPU, key, step, shifted)]
    )


def test_the_micro_batch_does_not_matter() -> None:
    assert torch.equal(augmented(4), augmented(2))


def test_every_step_run_and_example_has_its_own_uniforms() -> None:
    first = augmented(4)
    assert not torch.equal(first, augmented(4, step=4))
    assert not torch.equal(first, augmented(4, key="another's"))
    moved = first - RECORDS.inputs[[7, 1, 4, 9]]
    assert len(moved.unique()) == moved.numel()
    assert torch.equal(first, augmented(4))
