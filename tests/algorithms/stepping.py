"""A model of the zoo and its algorithm on a device without numbers, ready to step."""

from __future__ import annotations

import inspect
from pathlib import Path

import torch
from torch import Tensor, nn

from tests.gradients.harness import loss
from tests.gradients.zoo import model_case
from zdp_bench.algorithms import Problem
from zdp_bench.gradients import Batch, trust
from zdp_bench.privacy.ledger import Ledger
from zdp_bench.privacy.mechanism import Sampling
from zdp_bench.privacy.noise import SeededNoise
from zdp_bench.registry import lookup
from zdp_bench.training.step import Training

POISSON = Sampling("poisson", 0.1, 8.0, 80)


def move(model: nn.Module, device: str) -> nn.Module:
    """Put the model on the device: what `to` does, also for tensors that are fake."""
    moved: dict[int, Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, value in held.items():
                if value is not None and id(value) not in moved:
                    there = value.detach().to(device)
                    is_parameter = isinstance(value, nn.Parameter)
                    moved[id(value)] = (
                        nn.Parameter(there, value.requires_grad) if is_parameter else there
                    )
                if value is not None:
                    held[name] = moved[id(value)]
    return model


def prepare(
    model_name: str, algorithm_name: str, folder: Path, device: str
) -> tuple[Training, Batch]:
    """Return what a step takes, and a batch for it."""
    case = model_case(model_name)
    model = move(case.module(torch.float32), device)
    trust(model)  # the comparison with the reference reads numbers, once in a run
    inputs, targets = case.batch(8, torch.float32)
    make = lookup("algorithm", algorithm_name)
    known = inspect.signature(make).parameters
    options = {k: 1.0 for k in ("noise_multiplier", "max_grad_norm") if k in known}
    algorithm = make(Problem(model, loss, POISSON, like=inputs[:0]), **options)
    ledger = Ledger(folder / f"{algorithm_name}.jsonl", algorithm.mechanism(), repeatable=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = Training(algorithm, model, optimizer, SeededNoise(5), ledger)
    return training, (inputs.to(device), targets.to(device))
