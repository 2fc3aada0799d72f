"""One step of a whole training loop, as a user writes it: examples out of a dataset, one by one,
forward, backward, clipping, noise, update, and whatever a library counts and keeps beside.

Every loop draws all examples at each step, so that all steps are of one size.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal
from weakref import finalize

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from zdp_bench.extras.bench.measure import Step
from zdp_bench.extras.bench.workload import BOUND, Criterion, Workload, flat
from zdp_bench.library import clipped_sum, make_private

MEMORY = Path("/dev/shm")
MANY = 10**6  # steps: more than are ever timed


class _All:
    """A batch sampler that draws all examples, again and again."""

    def __init__(self, examples: int) -> None:
        self.examples = examples

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield list(range(self.examples))


def _in_order(tensors: dict[str, Tensor]) -> Tensor:
    """Join tensors in the order of their names: Opacus's LSTM has its parameters in another."""
    return flat(dict(sorted(tensors.items())))


def _take_step(optimizer: torch.optim.Optimizer, backward: Callable[[], None]) -> None:
    """Take a step with the gradients that `backward` leaves."""
    optimizer.zero_grad()
    backward()
    optimizer.step()


def non_private(workload: Workload) -> Step:
    """torch alone."""
    model, dataset = workload.build(), TensorDataset(*workload.examples(last=False))
    optimizer = workload.optimizer_of(model.parameters())
    batches = iter(DataLoader(dataset, batch_sampler=_All(workload.batch)))

    def backward() -> None:
        inputs, targets = next(batches)
        workload.loss_of(model(inputs), targets).mean().backward()

    def answer() -> Tensor:
        optimizer.zero_grad()
        backward()
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return _in_order(found) * workload.batch

    return Step(lambda: _take_step(optimizer, backward), answer)


def library(workload: Workload) -> Step:
    """`make_private`, its ledger in memory: what a disk takes to keep a line is the disk's."""
    model, examples = workload.build(), workload.examples(last=False)
    folder = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None))
    private = make_private(
        model,
        workload.optimizer_of(model.parameters()),
        TensorDataset(*examples),
        loss=workload.loss_of,
        epochs=MANY,
        sample_rate=1.0,
        expected_batch=workload.batch,
        noise_multiplier=1.0,
        max_grad_norm=BOUND,
        delta=1e-5,
        algorithm="zeta_dp_sgd" if workload.is_complex else "dp_sgd",
        ledger=folder / "ledger.jsonl",
    )
    finalize(private, shutil.rmtree, folder, ignore_errors=True)
    batches = private.batches()

    def run() -> None:
        private.step(next(batches))

    return Step(run, lambda: _in_order(clipped_sum(model, workload.loss_of, examples, BOUND).sums))


def opacus(workload: Workload, mode: Literal["hooks", "ghost"]) -> Step:
    """Opacus's `PrivacyEngine`, with its own LSTM in place of torch's."""
    # from Opacus's own hooks on a first layer
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    warnings.filterwarnings("ignore", message="Secure RNG turned off")
    from opacus import PrivacyEngine
    from opacus.validators import ModuleValidator

    model = ModuleValidator.fix(workload.build())
    dataset = TensorDataset(*workload.examples(last=False))
    criterion: Any = Criterion(workload)
    criterion.reduction = "mean"
    made = PrivacyEngine().make_private(
        module=model,
        optimizer=workload.optimizer_of(model.parameters()),
        criterion=criterion,
        data_loader=DataLoader(dataset, batch_size=workload.batch),
        noise_multiplier=1.0,
        max_grad_norm=BOUND,
        grad_sample_mode=mode,
    )
    module, optimizer, loader = made[0], made[1], made[-1]
    loader.batch_sampler.steps = MANY  # rather than a new iterator for each step
    batches = iter(loader)

    def backward() -> None:
        inputs, targets = next(batches)
        if mode == "ghost":
            made[2](module(inputs), targets).backward()
        else:
            workload.loss_of(module(inputs), targets).mean().backward()

    def answer() -> Tensor:
        optimizer.zero_grad()
        backward()
        if mode == "hooks":
            optimizer.clip_and_accumulate()
        found = _in_order(
            {
                name: p.grad if mode == "ghost" else p.summed_grad
                for name, p in module._module.named_parameters()
            }
        )
        optimizer.zero_grad()
        return found

    return Step(lambda: _take_step(optimizer, backward), answer)
