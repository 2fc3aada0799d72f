"""What the number of a metric means. A task declares it, and whoever judges or shows it asks here.

This module imports no torch, for tables are printed without it.
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
        name: its key in what `Task.metrics` returns, such as "roc_auc".
        title: as tables and figures show it; empty: the name with spaces.
        unit: of the number, such as "dB"; "%" for a share that is shown times 100.
        less_is_better: True for an error.
        lowest: the lowest number that it can have.
        highest: the highest number that it can have; 1 for a share.
        guess: what a model that learns nothing scores; None where that depends on the data.
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
        """'ROC AUC', 'dice worst'."""
        return self.title or self.name.replace("_", " ")

    @property
    def axis(self) -> str:
        """'test accuracy, %': the label of an axis that shows it."""
        unit = f", {self.unit}" if self.unit else ""
        return f"test {self.label}{unit}"

    @property
    def scale(self) -> float:
        """The factor from a recorded number to its unit."""
        return 100.0 if self.unit == "%" else 1.0

    @property
    def is_share(self) -> bool:
        """True if 1 is the highest number: differences are judged as they are, not relatively."""
        return self.highest == 1.0

    def gain(self, value: float, baseline: float) -> float:
        """Return by how much a number is better than another; negative if it is worse."""
        return baseline - value if self.less_is_better else value - baseline


ACCURACY = Metric("accuracy", unit="%", lowest=0.0, highest=1.0)
ROC_AUC = Metric("roc_auc", "ROC AUC", lowest=0.0, highest=1.0, guess=0.5)
DICE = Metric("dice", "Dice", lowest=0.0, highest=1.0, guess=0.0)
DICE_WORST = Metric("dice_worst", lowest=0.0, highest=1.0, guess=0.0)
SSIM = Metric("ssim", "SSIM", lowest=-1.0, highest=1.0)
PSNR = Metric("psnr", "PSNR", unit="dB")
NMSE = Metric("nmse", "NMSE", less_is_better=True, lowest=0.0)
ZERO_FILLED = tuple(  # of the image that a reconstruction starts from
    replace(metric, name=f"zero_filled_{metric.name}", title="") for metric in (NMSE, PSNR, SSIM)
)
LOSS = Metric("loss", less_is_better=True, lowest=0.0)
BUILT_IN = (ACCURACY, ROC_AUC, SSIM, PSNR, NMSE, DICE, DICE_WORST, *ZERO_FILLED, LOSS)


def describe(name: str) -> Metric:
    """Return what a task declares of a metric, by its name.

    A metric that no installed task declares has no unit, and more of it is better.
    """
    return _find(name, BUILT_IN) or _find_in_tasks(name) or Metric(name)


def _find(name: str, metrics: Iterable[Metric]) -> Metric | None:
    for metric in metrics:
        if metric.name == name:
            return metric
    return None


def _find_in_tasks(name: str) -> Metric | None:
    """Return what a registered task declares; its module, and so torch, is imported."""
    declared: list[Metric] = []
    for task in registry.names("task"):
        declared += getattr(registry.lookup("task", task), "measures", ())
    return _find(name, declared)


def metric_of(task: Task, name: str) -> Metric:
    """Return what a task declares of one of its metrics.

    Raises:
        UserError: the task does not declare it, or a metric of ours has its name.
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
            f"task {kind}: declares its metric '{name}' otherwise than another task does. "
            "Choose another name, or declare it in the same words."
        )
    return metric
