"""A model on a whole public set: its outputs, its metrics, and what a run's folder keeps of them."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import nn

from zdp_bench import records
from zdp_bench.data import Source
from zdp_bench.errors import UserError
from zdp_bench.gradients import Batch
from zdp_bench.tasks import Condensing, Scoring, Task

WATCHED = 50  # steps: after so many, a run looks whether it has diverged, and not at the end of an epoch only
EVALUATION_BATCH = 1000
EVALUATION_NUMBERS = (
    2**21
)  # fewer records at once where they are images: a U-Net's maps take 64 times as much as its input


def step_schedule(
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    model: nn.Module,
    task: Task,
    validation: Source | None,
    device: torch.device,
) -> None:
    """Step the schedule; `reduce_on_plateau` watches the loss over validation examples, which are public."""
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        assert validation is not None
        scheduler.step(evaluate(model, task, validation, device)["loss"])
    else:
        scheduler.step()


def evaluate(
    model: nn.Module, task: Task, test: Source, device: torch.device, size: int | None = None
) -> dict[str, float]:
    """The task's metrics over a whole set; of outputs that are no finite numbers there is but a loss, and it is NaN."""
    outputs, targets = predict(model, task, test, device, size)
    if not torch.isfinite(outputs).all():
        return {"loss": math.nan}
    return task.metrics(outputs, targets, test.groups)


def refuse_divergence(
    metrics: dict[str, float], epoch: int | None, step: int, rate: object
) -> None:
    """End a run whose model answers with no finite numbers any more: no step leads back from there.

    Raises:
        UserError: it does.
    """
    if not math.isfinite(metrics.get("loss", 0.0)):
        at = f"epoch {epoch}, step {step:,}" if epoch else f"step {step:,}"
        raise UserError(
            f"diverged at {at}: the model's outputs or loss are no finite numbers any more. Lower optimizer.lr (it is {rate}), "
            "the noise or the bound. Nothing is recorded, but the steps stay counted in the run's ledger."
        )


@torch.no_grad()
def outputs_are_finite(model: nn.Module, test: Source, device: torch.device) -> bool:
    """Whether the model answers one record of a public set with finite numbers.

    A single forward pass, and on a GPU a wait for it: cheap, but not at every step. The loss of a step would cost less and tell
    more, but of training records, which no ε covers; and the parameters may be finite where nothing that comes out is.
    """
    model.eval()
    output = model(test.batch(torch.arange(1))[0].to(device))
    model.train()
    return bool(torch.isfinite(output).all())


@torch.no_grad()
def predict(
    model: nn.Module, task: Task, test: Source, device: torch.device, size: int | None = None
) -> Batch:
    """The model's outputs over a whole set, [n, ...], and the targets beside them, at most `size` records at a time.

    A task with maps condenses its outputs batch by batch, and needs no targets afterwards: then neither piles up in memory.
    """
    model.eval()
    one = max(1, test.batch(torch.arange(min(1, len(test))))[0].numel())
    at_once = max(1, min(size or EVALUATION_BATCH, EVALUATION_BATCH, EVALUATION_NUMBERS // one))
    outputs, kept = [], []
    for part in torch.arange(len(test)).split(at_once):
        inputs, targets = test.batch(part)
        answer = model(inputs.to(device))
        outputs.append(
            (
                task.condense(answer, targets.to(device))
                if isinstance(task, Condensing)
                else answer
            ).cpu()
        )
        kept.append(targets[:0] if isinstance(task, Condensing) else targets)
    model.train()
    return torch.cat(outputs), torch.cat(kept)


def evaluate_trained(
    home: Path, model: nn.Module, task: Task, test: Source, device: torch.device, size: int
) -> dict[str, float]:
    """The trained model on the test set; what the task keeps of it beside the metrics is written into the run's folder."""
    outputs, targets = predict(model, task, test, device, size)
    if isinstance(task, Scoring):
        records.write_scores(home / "scores.csv", targets.numpy(), task.scores(outputs))
    if example := getattr(task, "example", None):  # something to look at, of the test set
        records.write_arrays(home / "example.npz", example(outputs, targets))
    return task.metrics(outputs, targets, test.groups)
