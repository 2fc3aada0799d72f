"""Evaluate a model on a whole public set, and write its scores into the run's folder."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor, nn

from zdp_bench import records, registry
from zdp_bench.config.schema import Run
from zdp_bench.data import Part, Source
from zdp_bench.errors import UserError, first_line
from zdp_bench.gradients import Batch
from zdp_bench.nn.memory_format import arrange
from zdp_bench.nn.precision import float32_forward
from zdp_bench.tasks import Condensing, Scoring, Task, mean_of
from zdp_bench.tasks.metric import Metric

DIVERGED = "diverged at"  # beginning of the error of a run that diverged
GROWTH = 100  # a loss of more than this many times its initial value has diverged
QUICK = 16  # number of examples in `quick_loss`
WATCHED = 50  # steps between two checks for divergence, in addition to evaluations
EVALUATION_BATCH = 1000  # default and maximum number of examples in a batch
# Maximum number of entries in a batch's inputs. A U-Net's feature maps have 64 times as many.
EVALUATION_NUMBERS = 2**21


def step_schedule(
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    model: nn.Module,
    task: Task,
    validation: Source | None,
    device: torch.device,
) -> None:
    """Step the schedule. `reduce_on_plateau` gets the loss on the public validation examples.

    Args:
        scheduler: the schedule.
        model: the model that is evaluated.
        task: the task, which defines the loss.
        validation: the validation set; None without one, in which case it must not be needed.
        device: where the model is.
    """
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        assert validation is not None
        scheduler.step(evaluate(model, task, validation, device)["loss"])
    else:
        scheduler.step()


def evaluate(
    model: nn.Module,
    task: Task,
    test: Source,
    device: torch.device,
    size: int | None = None,
) -> dict[str, float]:
    """Return the task's metrics over a whole set.

    If an output is not finite, the only metric is a loss of NaN.

    Args:
        model: the model.
        task: the task, which defines the metrics.
        test: the public set.
        device: where the model is.
        size: largest number of examples that are processed at once. Default: `EVALUATION_BATCH`.
    """
    outputs, targets = predict(model, task, test, device, size)
    if not torch.isfinite(outputs).all():
        return {"loss": math.nan}
    return task.metrics(outputs, targets, test.groups)


def check_metrics(
    config: Run,
    model: nn.Module,
    task: Task,
    test: Source,
) -> None:
    """Reject a task whose metrics could not be recorded, before any step spends ε on it.

    Metrics that fail on a few examples, such as those that need every class, are computed on the
    whole set. Our own tasks are tested, so that their metrics are not computed here.

    Args:
        config: the run's configuration.
        model: the initial model, on the CPU.
        task: the task, which defines the metrics.
        test: the public set.

    Raises:
        UserError: `metrics` fails, does not return the headline or the loss that a schedule needs,
            or returns a value that is not a float.
    """
    name = config.task.name
    if registry.package_of("task", name) == "zdp_bench":
        return

    def compute(examples: Source) -> dict[str, float]:
        outputs, targets = predict(model, task, examples, torch.device("cpu"))
        return task.metrics(outputs, targets, examples.groups)

    try:
        try:
            metrics = compute(Part(test, torch.arange(min(QUICK, len(test)))))
        except Exception:
            metrics = compute(test)
    except Exception as error:
        raise UserError(
            f"task={name}: its metrics cannot be computed before the first step: "
            f"{first_line(error)} Correct `{type(task).__name__}.metrics`."
        ) from error
    needed = {task.headline: "the task's headline"}
    if config.scheduler and config.scheduler.name == "reduce_on_plateau":
        needed |= {"loss": "by which scheduler=reduce_on_plateau sets the rate"}
    for metric, use in needed.items():
        if metric not in metrics:
            raise UserError(
                f"task={name}: `metrics` returns {', '.join(metrics)}, and not '{metric}', {use}. "
                "Return it as a float, or choose another."
            )
    for metric, value in metrics.items():
        if not isinstance(value, int | float):
            raise UserError(
                f"task={name}: `metrics` returns a {type(value).__name__} for '{metric}', which a "
                "record cannot hold. Return float(...) of it."
            )


class DivergedError(UserError):
    """The model's outputs or loss are not finite, so the run cannot continue."""


class UntrainedError(UserError):
    """A run's budget is spent before its first step, so its model would be untrained."""


def refuse_divergence(
    finite: bool,
    epoch: int | None,
    step: int,
    rate: object,
) -> None:
    """End a run whose model's outputs or loss are not finite, because no step recovers from this.

    Args:
        finite: whether they are finite.
        epoch: number of the epoch, for the error; None if unknown.
        step: number of steps that were taken.
        rate: the learning rate, for the advice.

    Raises:
        DivergedError: they are not finite.
    """
    if not finite:
        when = f"epoch {epoch}, step {step:,}" if epoch else f"step {step:,}"
        raise DivergedError(
            f"{DIVERGED} {when}: the model's outputs or loss are not finite. Lower "
            f"optimizer.lr (it is {rate}), the noise or the bound. No record is written, but the "
            "steps remain in the run's ledger."
        )


@torch.no_grad()
@float32_forward()
def quick_loss(
    model: nn.Module,
    task: Task,
    test: Source,
    device: torch.device,
) -> float:
    """Return the mean loss over the first `QUICK` examples of a public set.

    On a GPU, this waits for the device, so it is not computed at every step. A step's own loss
    would be cheaper, but it depends on training examples, and no ε covers looking at it.
    """
    model.eval()
    inputs, targets = test.batch(torch.arange(min(QUICK, len(test))))
    losses = task.loss(model(inputs.to(device)), targets.to(device))
    model.train()
    return mean_of(losses)


@torch.no_grad()
def forward(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return outputs [n, ...] for inputs [n, ...] on the model's device, computed in batches."""
    parts = inputs.split(_batch_size(inputs[:1]))
    return torch.cat([model(arrange(model, part)) for part in parts])


def _batch_size(example: Tensor, size: int | None = None) -> int:
    """Return the number of examples like `example` that are evaluated at once, at most `size`."""
    max_size = min(size or EVALUATION_BATCH, EVALUATION_BATCH)
    fitting = EVALUATION_NUMBERS // max(1, example.numel())
    return max(1, min(max_size, fitting))


@torch.no_grad()
@float32_forward()
def predict(
    model: nn.Module,
    task: Task,
    test: Source,
    device: torch.device,
    size: int | None = None,
) -> Batch:
    """Return outputs [n, ...] and targets for a whole set, computed in float32.

    A `Condensing` task reduces the outputs of each batch at once, so that memory never holds all of
    them. No targets are returned then.

    Args:
        model: the model.
        task: the task.
        test: the public set.
        device: where the model is.
        size: largest number of examples that are processed at once. Default: `EVALUATION_BATCH`.
    """
    model.eval()
    example, _ = test.batch(torch.arange(min(1, len(test))))
    outputs, kept_targets = [], []
    for part in torch.arange(len(test)).split(_batch_size(example, size)):
        inputs, targets = test.batch(part)
        output = model(arrange(model, inputs.to(device)))
        if isinstance(task, Condensing):
            output = task.condense(output, targets.to(device))
            targets = targets[:0]
        outputs.append(output.cpu())
        kept_targets.append(targets)
    model.train()
    return torch.cat(outputs), torch.cat(kept_targets)


def evaluate_trained(
    home: Path,
    model: nn.Module,
    task: Task,
    test: Source,
    device: torch.device,
    size: int,
) -> tuple[dict[str, float], float | None]:
    """Return the trained model's test metrics, and its headline metric with shuffled targets.

    Scores and an example of the outputs are written into the folder, if the task has them.

    Args:
        home: the run's folder.
        model: the trained model.
        task: the task, which defines the metrics.
        test: the public set.
        device: where the model is.
        size: largest number of examples that are processed at once.

    Returns:
        The metrics, and the headline metric with shuffled targets or None if the task keeps no
        targets.
    """
    outputs, targets = predict(model, task, test, device, size)
    if isinstance(task, Scoring):
        records.write_scores(home / "scores.csv", targets.numpy(), task.scores(outputs))
    example = getattr(task, "example", None)
    if example:
        records.write_arrays(home / "example.npz", example(outputs, targets))
    chance = None
    if len(targets):
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(len(targets), generator=generator)
        chance = task.metrics(outputs, targets[order], test.groups)[task.headline]
    return task.metrics(outputs, targets, test.groups), chance


def doubt(
    headline: Metric,
    metrics: dict[str, float],
    chance: float | None,
    count: int,
    rate: object,
    start: float,
) -> str:
    """Return a sentence on why a run seems to have learned nothing, or '' if it learned something.

    Args:
        headline: the task's headline metric.
        metrics: test metrics of the trained model.
        chance: the headline metric with shuffled targets; None if the task keeps no targets.
        count: number of test examples.
        rate: the learning rate, for the advice.
        start: loss of the initial model.
    """
    value = metrics[headline.name]
    loss = metrics.get("loss", 0.0)
    reason = ""
    if chance is not None:
        # By chance, a share varies by about 1/√count, and other metrics by that part of it.
        size = 1.0 if headline.is_fraction else abs(chance)
        if not headline.is_above(value, chance, size * count**-0.5):
            reason = f"test {headline.name} is {value:.4f}, and {chance:.4f} with shuffled labels"
    elif headline.guess is not None:
        guess = headline.guess
        if not headline.is_above(value, guess, headline.point(guess)):
            reason = f"test {headline.name} is {value:.4f}, and {guess:.4f} with a constant answer"
    if math.isnan(value):
        reason = f"test {headline.name} is not a number"
    if loss > GROWTH * start > 0:
        reason = f"training diverged, the test loss rose from {start:.3g} to {loss:.3g}"
    if rate == 0:
        reason = "optimizer.lr is 0"
    if not reason:
        return ""
    advice = f" Change optimizer.lr (it is {rate}), the noise or the bound." if rate else ""
    return f"the model does not seem to learn: {reason}.{advice}"
