"""Public architectures: their clipped sums are those of each example alone. A table has how they
run. `UPDATE=1 pytest --slow` writes it."""

import copy
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zdp_bench
from tests.gradients.harness import in_precision
from tests.library.architectures import (
    ARCHITECTURES,
    CLASSES,
    EXAMPLES,
    Build,
    loss,
    of_timm,
)
from zdp_bench.gradients.program import state_of

TABLE = Path(__file__).resolve().parents[2] / "results/tables/architectures.md"
BOUND = 0.5
TARGETS = torch.arange(EXAMPLES) % CLASSES
# What is tried by day, a ViT of two narrow blocks for timm's.
SMALL_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
QUICK = {"timm ViT": of_timm("vit_tiny_patch16_224", **SMALL_VIT)}
QUICK |= {n: ARCHITECTURES[n] for n in ("nn.TransformerEncoder, padding mask", "nn.LSTM, packed")}

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
]


def quiet(model: nn.Module) -> nn.Module:
    """The model without dropout, whose draws no two ways share."""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or name == "p"):
                setattr(module, name, 0.0)
    return model.train()


def sum_alone(model: nn.Module, inputs: Tensor) -> dict[str, Tensor]:
    """Σᵢ clip(gᵢ) by plain autograd in float64, one example after the other."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    total = {name: torch.zeros_like(p, requires_grad=False) for name, p in parameters.items()}
    for x, target in zip(inputs.split(1), TARGETS.split(1), strict=True):
        example_loss = loss(model(x), target).sum()
        gradients = torch.autograd.grad(example_loss, [*parameters.values()], allow_unused=True)
        pairs = [(n, g) for n, g in zip(parameters, gradients, strict=True) if g is not None]
        norm = torch.stack([g.abs().square().sum() for _, g in pairs]).sum().sqrt()
        for name, g in pairs:
            total[name] += g * (BOUND * (1 - 1e-5) / norm).clamp(max=1)
    return total


def wide(model: nn.Module) -> nn.Module:
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.double()
        elif tensor.is_complex():
            tensor.data = tensor.data.to(torch.complex128)
    return in_precision(model, torch.float64)


def compare(build: Build) -> tuple[nn.Module, Any]:
    """The model and its inputs, after its sum has been compared with each example's alone."""
    torch.manual_seed(0)
    model, inputs = build()
    model = quiet(model)
    exact, given = wide(copy.deepcopy(model)), inputs
    if not inputs.dtype.is_complex and inputs.is_floating_point():
        given = inputs.double()
    elif inputs.is_complex():
        given = inputs.to(torch.complex128)
    right = sum_alone(exact, given)
    sums = zdp_bench.clipped_sum(exact, loss, (given, TARGETS), BOUND).sums
    assert sums.keys() == right.keys()
    for key, value in right.items():
        torch.testing.assert_close(sums[key], value, rtol=1e-5, atol=1e-5, msg=key)
    return model, inputs


@pytest.mark.parametrize(
    ("name", "build"),
    [
        *(pytest.param(name, build, id=name) for name, build in QUICK.items()),
        *(
            pytest.param(name, build, id=f"{name}, whole", marks=pytest.mark.slow)
            for name, build in ARCHITECTURES.items()
        ),
    ],
)
def test_the_sum_is_that_of_each_example_alone(name: str, build: Build, tmp_path: Path) -> None:
    model, inputs = compare(build)
    dataset = [(inputs[i], TARGETS[i]) for i in range(EXAMPLES)] * 5
    complex_ = any(p.is_complex() for p in model.parameters())
    began = time.perf_counter()
    private = zdp_bench.make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        dataset,
        loss=loss,
        epochs=3,
        sample_rate=1.0,
        expected_batch=20,
        noise_multiplier=1.0,
        delta=1e-3,
        ledger=tmp_path / "ledger.jsonl",
        algorithm="zeta_dp_sgd" if complex_ else "dp_sgd",
    )
    made = time.perf_counter() - began
    steps = []
    with private:
        for batch in private.batches():
            began = time.perf_counter()
            private.step(batch)
            steps.append(time.perf_counter() - began)
    state = state_of(model, inputs)
    mode = "one at a time" if state.alone else "layers" if state.program is None else "program"
    row = f"| {name} | {mode} | {made:.1f} | {min(steps):.2f} |"
    if os.environ.get("UPDATE"):
        write(name, row)
    written = re.search(rf"^\| {re.escape(name)} \| ([\w ]+) \|", TABLE.read_text(), re.M)
    assert written is not None
    assert written[1] == mode


def write(name: str, row: str) -> None:
    """Put a row into the table, in the place of an earlier one of its name."""
    text = TABLE.read_text()
    earlier = rf"^\| {re.escape(name)} \|.*\n"
    if re.search(earlier, text, re.M):
        text = re.sub(earlier, lambda _: row + "\n", text, flags=re.M)
    else:
        text = f"{text}{row}\n"
    TABLE.write_text(text)
