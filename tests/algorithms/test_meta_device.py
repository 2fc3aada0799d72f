"""Private steps of every model with every algorithm on torch's `meta` device.

Tensors there have a shape and no numbers, so torch raises an error wherever a step mixes devices or
needs a number on the host. It is the nearest thing to a GPU that every machine has.
"""

from __future__ import annotations

import inspect
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.gradients.harness import loss
from tests.gradients.zoo import ZOO, model_case
from zdp_bench.algorithms import Problem
from zdp_bench.errors import UserError
from zdp_bench.gradients import Batch, trust
from zdp_bench.privacy.ledger import Ledger
from zdp_bench.privacy.mechanism import Sampling
from zdp_bench.privacy.noise import SeededNoise
from zdp_bench.registry import lookup, names
from zdp_bench.training.step import Training, private_step

POISSON = Sampling("poisson", 0.1, 8.0, 80)


class HostTraffic(TorchDispatchMode):
    """Counts numbers read from the device, each answered with 1, and tensors copied to the device.

    torch itself raises an error for every other way to wait for a device (nonzero, a mask as index,
    a copy to the host).
    """

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            self.count["read"] += 1
            return torch.ones((), dtype=args[0].dtype).item()
        result = func(*args, **(kwargs or {}))
        copies = {torch.ops.aten._to_copy.default: 0, torch.ops.aten.copy_.default: 1}
        if func in copies and args[copies[func]].device != result.device:
            self.count["copied"] += 1
        return result


def prepare(model_name: str, algorithm_name: str, folder: Path) -> tuple[Training, Batch]:
    """A model and its algorithm on the meta device, and a batch for them."""
    case = model_case(model_name)
    model = case.module(torch.float32).to("meta")
    trust(model)  # the comparison with the reference reads numbers, once in a run
    inputs, targets = case.batch(8, torch.float32)
    make = lookup("algorithm", algorithm_name)
    known = inspect.signature(make).parameters
    options = {k: 1.0 for k in ("noise_multiplier", "max_grad_norm") if k in known}
    algorithm = make(Problem(model, loss, POISSON, like=inputs[:0]), **options)
    ledger = Ledger(folder / f"{algorithm_name}.jsonl", algorithm.mechanism(), repeatable=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = Training(algorithm, model, optimizer, SeededNoise(5), ledger)
    return training, (inputs.to("meta"), targets.to("meta"))


# One of each kind: dense, convolutions, a U-Net, norms, circulant layers, feedback, spectra.
EIGHT = ("complex_mlp", "real_cnn", "complex_unet", "resnet20", "lenet5", "complex_dfa_cnn")
EIGHT += ("vgg11_unet", "speech_cnn")
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ZOO if name not in EIGHT]


@pytest.mark.parametrize("model_name", [*EIGHT, *OTHERS])
def test_a_step_waits_for_its_device_once_and_copies_nothing_to_it(
    model_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device=None: generator())  # meta has none
    found = {}
    for algorithm_name in names("algorithm"):
        try:
            training, batch = prepare(model_name, algorithm_name, tmp_path)
        except UserError:
            continue  # the algorithm refuses the model
        for step in range(2):  # the first also makes what later ones keep
            with HostTraffic() as traffic:
                private_step(training, step, iter([batch]), expected_batch_size=8.0)
        training.ledger.close()
        found[algorithm_name] = traffic.count
    assert {"sgd", "zeta_dp_sgd"} <= found.keys()
    for algorithm_name, count in found.items():
        assert count["copied"] == 0, algorithm_name
        assert count["read"] <= 1, algorithm_name
    assert found["zeta_dp_sgd"]["read"] == 1  # whether every norm is finite: the counter counts
