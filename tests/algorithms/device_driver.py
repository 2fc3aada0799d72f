"""Private steps on a device that has no numbers: for `test_meta_device`, and as its process.

    python device_driver.py MODEL...

A backend written in Python, `other`, under torch's FakeTensorMode: an operation on its tensors and
one that was left on the CPU is an error, as on a GPU; forward, backward, vmap and hooks are real.
Prints one JSON line a model: algorithm -> the error, or an empty string. torch 2.11 ends such a
process by abort, so that it leaves without a farewell.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from tests.gradients.harness import loss
from tests.gradients.zoo import model_case
from zdp_bench.algorithms import Problem
from zdp_bench.errors import UserError
from zdp_bench.gradients import Batch
from zdp_bench.privacy.ledger import Ledger
from zdp_bench.privacy.mechanism import Sampling
from zdp_bench.privacy.noise import SeededNoise
from zdp_bench.registry import lookup, names
from zdp_bench.training.step import Training, private_step

DEVICE = "other"
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
    inputs, targets = case.batch(8, torch.float32)
    make = lookup("algorithm", algorithm_name)
    known = inspect.signature(make).parameters
    options = {k: 1.0 for k in ("noise_multiplier", "max_grad_norm") if k in known}
    algorithm = make(Problem(model, loss, POISSON, like=inputs[:0]), **options)
    ledger = Ledger(folder / f"{algorithm_name}.jsonl", algorithm.mechanism(), repeatable=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = Training(algorithm, model, optimizer, SeededNoise(5), ledger)
    return training, (inputs.to(device), targets.to(device))


class Answers(TorchDispatchMode):
    """Answers whatever number is read from the device with 1."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return args[0].dtype == torch.bool or 1.0
        return func(*args, **(kwargs or {}))


def attempt(model_name: str, algorithm_name: str, folder: Path) -> str | None:
    """Return the error of two steps; empty if there is none, None if the model is refused."""
    try:
        training, batch = prepare(model_name, algorithm_name, folder, DEVICE)
        with closing(training.ledger):
            for step in range(2):
                private_step(training, step, iter([batch]), expected_batch_size=8.0)
    except UserError:
        return None
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    return ""


def mixes() -> bool:
    """True if this torch lets an operation mix the two: nothing would be found then."""
    try:
        torch.ones(2, device=DEVICE) + torch.ones(2)
    except RuntimeError:
        return False
    return True


def main(models: list[str]) -> None:
    _setup_privateuseone_for_python_backend(DEVICE)
    generator = torch.Generator
    torch.Generator = lambda device=None: generator()  # type: ignore[assignment,misc]
    torch._C._get_accelerator = lambda *_: torch.device("cpu")
    with FakeTensorMode(), Answers(), tempfile.TemporaryDirectory() as folder:
        assert not mixes()
        for number, model_name in enumerate(models):
            place = Path(folder) / str(number)
            results = {name: attempt(model_name, name, place) for name in names("algorithm")}
            print(
                json.dumps({name: result for name, result in results.items() if result is not None})
            )
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
