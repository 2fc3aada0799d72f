"""A small data set, network and loop that the tests of `make_private` share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import zdp_bench
from tests.accounting import by_dp_accounting
from zdp_bench import Private, UserError
from zdp_bench.library.examples import Items

EXAMPLES, CLASSES = 60, 3


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def data(changed: float = 0.0) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(EXAMPLES, 4, generator=generator)
    inputs[-1, -1] += changed
    return TensorDataset(inputs, torch.arange(EXAMPLES) % CLASSES)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, CLASSES))


def defaults(model: nn.Module) -> dict[str, Any]:
    """What the tests give `make_private` where nothing else matters."""
    return {
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.5),
        "dataset": data(),
        "loss": loss,
        "epochs": 2,
        "sample_rate": 0.2,
        "expected_batch": 12,
        "max_grad_norm": 0.8,
        "delta": 1e-3,
    }


def begin(model: nn.Module, ledger: Path, **changed: Any) -> Private:
    """`make_private` with defaults; close what it returns."""
    given = defaults(model) | {"ledger": ledger} | changed
    if "target_epsilon" not in given:
        given.setdefault("noise_multiplier", 1.2)
    return zdp_bench.make_private(model, **given)


def train(private: Private, most: int | None = None) -> list[Tensor]:
    """Take the steps that are left, or so many; return the first weights after each."""
    seen = []
    for batch in private.batches():
        private.step(batch)
        seen.append(next(private.model.parameters()).detach().clone())
        if len(seen) == most:
            break
    return seen


@contextmanager
def reading() -> Iterator[list[list[int]]]:
    """Yield what becomes the list of the batches that are read, each by its examples' indices."""
    seen: list[list[int]] = []
    read = Items.batch

    def batch(self: Items, indices: Any) -> Any:
        seen.append([int(index) for index in indices])
        return read(self, indices)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Items, "batch", batch)
        yield seen


def refusal(act: Callable[[], object]) -> str:
    """Return the sentence with which something is refused; '' if it is done."""
    try:
        act()
    except UserError as error:
        return str(error)
    return ""


def epsilon_of(noise: float, steps: int) -> float:
    """The ε of steps at the rate of the tests, at δ = 1e-3, by dp-accounting."""
    return by_dp_accounting((noise, 0.2, steps), delta=1e-3)
