"""Metrics: direction, range and unit of each number that a task's `metrics` returns.

Tasks declare their metrics; code that compares or displays values uses these declarations. This
module does not import torch, because tables are printed without it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from zdp_bench import registry
from zdp_bench.errors import UserError

if TYPE_CHECKING:
    from zdp_bench.tasks import Task


@dataclass(frozen=True)
class Metric:
    """A metric's direction, range and unit.

    Attributes:
        name: its key in the result of `Task.metrics`, such as "roc_auc".
        title: name in tables and figures. Default: `name` with spaces for underscores.
        unit: unit of the displayed value, such as "dB". With "%", values are displayed times 100.
        less_is_better: True for an error. Default: False.
        lowest: smallest possible value.
        highest: largest possible value; 1 for a fraction.
        guess: trivial baseline, the score of a model that learns nothing; None if it depends on the
            data.
    """

    name: str
    title: str = ""
    unit: str = ""
    less_is_better: bool = False
    lowest: float = -math.inf
    highest: float = math.inf
    guess: float | None = None

    @property
    def label(self) -> str:
        """The name in tables and figures, such as "ROC AUC" or "dice worst"."""
        return self.title or self.name.replace("_", " ")

    @property
    def axis(self) -> str:
        """The label of a figure's axis, such as "test accuracy, %"."""
        unit = f", {self.unit}" if self.unit else ""
        return f"test {self.label}{unit}"

    @property
    def scale(self) -> float:
        """The factor from a recorded value to a displayed one."""
        return 100.0 if self.unit == "%" else 1.0

    @property
    def is_fraction(self) -> bool:
        """True if the largest value is 1: differences are then absolute rather than relative."""
        return self.highest == 1.0

    def gain(self, value: float, baseline: float) -> float:
        """Return by how much `value` is better than `baseline`; negative if it is worse."""
        return baseline - value if self.less_is_better else value - baseline

    def is_above(self, value: float, guess: float, margin: float) -> bool:
        """Return True if a value is better than a guess by more than a margin.

        NaN is above nothing, and any other value is above a guess of NaN.
        """
        return not (math.isnan(value) or self.gain(value, guess) <= margin)

    def point(self, number: float) -> float:
        """Return the size of a point: 0.01 for a metric between 0 and 1, else 2 % of the number."""
        return 0.01 if self.is_fraction else 0.02 * abs(number)


ACCURACY = Metric("accuracy", unit="%", lowest=0.0, highest=1.0)
ROC_AUC = Metric("roc_auc", "ROC AUC", lowest=0.0, highest=1.0, guess=0.5)
DICE = Metric("dice", "Dice", lowest=0.0, highest=1.0, guess=0.0)
DICE_WORST = Metric("dice_worst", lowest=0.0, highest=1.0, guess=0.0)
SSIM = Metric("ssim", "SSIM", lowest=-1.0, highest=1.0)
PSNR = Metric("psnr", "PSNR", unit="dB")
NMSE = Metric("nmse", "NMSE", less_is_better=True, lowest=0.0)
ZERO_FILLED = tuple(  # metrics of the zero-filled image, from which a reconstruction starts
    replace(metric, name=f"zero_filled_{metric.name}", title="") for metric in (NMSE, PSNR, SSIM)
)
LOSS = Metric("loss", less_is_better=True, lowest=0.0)
BUILT_IN = (ACCURACY, ROC_AUC, SSIM, PSNR, NMSE, DICE, DICE_WORST, *ZERO_FILLED, LOSS)


def describe(name: str) -> Metric:
    """Return the metric of this name that a task declares.

    If no installed task declares one, the result has no unit, and a higher value is better.
    """
    return _find(name, BUILT_IN) or _find_in_tasks(name) or Metric(name)


def _find(name: str, metrics: Iterable[Metric]) -> Metric | None:
    for metric in metrics:
        if metric.name == name:
            return metric
    return None


def _find_in_tasks(name: str) -> Metric | None:
    """Return the metric of this name that a registered task declares.

    This imports the task's module, and torch with it.
    """
    declared: list[Metric] = []
    for task in registry.names("task"):
        declared += getattr(registry.lookup("task", task), "measures", ())
    return _find(name, declared)


def metric_of(task: Task, name: str) -> Metric:
    """Return one of a task's metrics by name.

    Raises:
        UserError: the task does not declare it, or another task declares a different metric of this
            name.
    """
    kind = type(task).__name__
    metric = _find(name, getattr(task, "measures", ()))
    if metric is None:
        raise UserError(
            f"task {kind}: does not declare its metric '{name}'. Add Metric('{name}'), with "
            "less_is_better=True for an error, to the task's `measures`."
        )
    first_declared = _find(name, BUILT_IN) or _find_in_tasks(name)
    if first_declared is not None and first_declared != metric:
        raise UserError(
            f"task {kind}: declares its metric '{name}' differently from another task. "
            "Choose another name, or declare it with the same attributes."
        )
    return metric
