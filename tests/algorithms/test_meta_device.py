"""Private steps of every model with every algorithm on devices that have no numbers.

On torch's `meta` device nothing may wait for a number; on a backend of Python's own
(`device_driver`) nothing may be left on the CPU. They are the nearest to a GPU that every machine
has.
"""

from __future__ import annotations

import json
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.algorithms import device_driver
from tests.algorithms.device_driver import prepare
from tests.drivers import python
from tests.gradients.zoo import ZOO
from zdp_bench.errors import UserError
from zdp_bench.registry import names
from zdp_bench.training.step import private_step


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
        if func is torch.ops.aten.allclose.default and args[0].is_meta:
            self.count["read"] += 1
            return True
        result = func(*args, **(kwargs or {}))
        copies = {torch.ops.aten._to_copy.default: 0, torch.ops.aten.copy_.default: 1}
        if func in copies and args[copies[func]].device != result.device:
            self.count["copied"] += 1
        return result


# One of each kind: dense, convolutions, a U-Net, circulant layers, feedback, spectra; and others.
FEW = ("complex_mlp", "real_cnn", "complex_unet", "lenet5", "complex_dfa_cnn", "speech_cnn")
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ZOO if name not in FEW]


@pytest.mark.parametrize("model_name", [*FEW, *OTHERS])
def test_a_step_waits_for_its_device_once_and_copies_nothing_to_it(
    model_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator
    monkeypatch.setattr(torch, "Generator", lambda device=None: generator())  # meta has none
    counts = {}
    for algorithm_name in names("algorithm"):
        try:
            training, batch = prepare(model_name, algorithm_name, tmp_path, "meta")
            with closing(training.ledger):
                for step in range(2):  # the first also makes what later ones keep
                    with HostTraffic() as traffic:
                        private_step(training, step, iter([batch]), expected_batch_size=8.0)
        except UserError:
            continue  # the algorithm refuses the model, or what it is given
        counts[algorithm_name] = traffic.count
    assert {"sgd", "zeta_dp_sgd"} <= counts.keys()
    for algorithm_name, count in counts.items():
        assert count["copied"] == 0, algorithm_name
        assert count["read"] <= 1, algorithm_name
    assert counts["zeta_dp_sgd"]["read"] == 1  # whether every norm is finite: the counter counts


ALL = [name for name in ZOO if name != "resnet18_transfer"]  # which reads its weights from a file


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_no_tensor_of_a_step_is_left_on_the_cpu() -> None:
    printed = python(device_driver.__file__, *ALL).stdout
    lines = [json.loads(line) for line in printed.splitlines()]
    assert len(lines) == len(ALL)
    for model_name, results in zip(ALL, lines, strict=True):
        assert {"sgd", "zeta_dp_sgd"} <= results.keys()
        assert not any(results.values()), (model_name, results)
