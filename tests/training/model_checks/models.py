"""Small models and layers to be checked, and the check itself with an algorithm that asks nothing
of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zdp_bench import registry
from zdp_bench.algorithms import Algorithm, Problem
from zdp_bench.config import compose, parse
from zdp_bench.nn import surgery
from zdp_bench.privacy.mechanism import Sampling
from zdp_bench.records import Record
from zdp_bench.registry import lookup, names
from zdp_bench.training import model_checks
from zdp_bench.training.progress import Watcher
from zdp_bench.training.run import execute

CLASSES = 4
IMAGES = torch.zeros(0, 2, 6, 6)
VECTORS = torch.zeros(0, 5)
COMPLEX = torch.zeros(0, 5, dtype=torch.complex64)
LABELS = torch.zeros(0, dtype=torch.int64)
NOTHING_FOUND: Any = model_checks.Checked([], None)  # type: ignore[arg-type]


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def algorithm_for(
    model: nn.Module, loss: Any = cross_entropy, kind: Any = None, bound: float = 1.0
) -> Algorithm:
    problem = Problem(model, loss, Sampling("poisson", 0.1, 8.0, 80))
    kind = kind or lookup("algorithm", "zeta_dp_sgd")
    return kind(problem, noise_multiplier=1.0, max_grad_norm=bound)


def check(
    model: nn.Module, inputs: Any = None, loss: Any = cross_entropy, targets: Tensor = LABELS
) -> list[str]:
    """What the check of a model returns: of one with convolutions, on images; else, on vectors."""
    if inputs is None:
        inputs = IMAGES if any(isinstance(of, nn.Conv2d) for of in model.modules()) else VECTORS
    algorithm = algorithm_for(model, loss)
    return model_checks.check(model, algorithm, loss, (inputs, targets)).fixed_state


def run_probe(
    monkeypatch: pytest.MonkeyPatch,
    build: Callable[[tuple[int, ...], int], nn.Module],
    results: Path,
    *overrides: str,
) -> Record:
    """Carry out a run with a model of this shape and so many outputs, which joins the others."""
    names("model")  # loads the real ones first
    monkeypatch.setitem(registry._builders["model"], "probe", build)
    words = ["recipe=quickstart", "trainer.epochs=1", "trainer.sample_rate=0.5"]
    words += ["model.name=probe", "~model.hidden", "~model.activation", "~model.init"]
    words += ["accountant=gdp_clt", "threads=1", f"paths.results={results}"]
    return execute(parse(compose([*words, *overrides])), Watcher()).record.document


def mlp(*middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), *middle, nn.Linear(8, CLASSES))


def convolutional(*middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 8, 3), nn.Sequential(*middle), nn.ReLU(), nn.Flatten(), nn.Linear(128, CLASSES)
    )


class Layer(nn.Module):
    """A layer made of a function, so that each sin is one line."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def clean() -> dict[str, tuple[nn.Module, Tensor]]:
    """Models that keep samples apart, each with inputs of its shape."""
    torch.manual_seed(0)
    return {
        "mlp": (mlp(nn.ReLU()), VECTORS),
        "layer norm": (mlp(nn.LayerNorm(8)), VECTORS),
        "dropout": (mlp(nn.Dropout(0.5)), VECTORS),
        "group norm": (convolutional(nn.GroupNorm(2, 8)), IMAGES),
        "instance norm": (convolutional(nn.InstanceNorm2d(8, affine=True)), IMAGES),
        "batch norm in evaluation": (
            convolutional(surgery.FrozenBatchNorm(nn.BatchNorm2d(8))),
            IMAGES,
        ),
        "fold and unfold": (mlp(Layer(lambda x: torch.tanh(x.view(-1, 2)).view(-1, 8))), VECTORS),
        "complex": (lookup("model", "complex_mlp")((5,), CLASSES, hidden=[6]), COMPLEX),
        "real": (lookup("model", "real_mlp")((5,), CLASSES, hidden=[6]), VECTORS),
    }
