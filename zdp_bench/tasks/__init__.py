"""Tasks: a loss per example, and metrics of a whole set."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from zdp_bench.tasks.metric import Metric

if TYPE_CHECKING:  # tables import this package for its metrics, and must not import torch
    import numpy as np
    from torch import Tensor

Loss = TypeVar("Loss", bound="Callable[..., Tensor]")
_proved: set[Any] = set()


def keeps_apart(loss: Loss) -> Loss:
    """Mark a loss that computes each example separately, so that it may be called on whole batches.

    `tests/tasks/test_losses.py` verifies this for every marked loss.
    """
    _proved.add(loss)
    return loss


def is_proved(loss: object) -> bool:
    """Return True if a task's loss is marked by `keeps_apart`.

    A function that wraps or overrides a marked loss is not marked.
    """
    return isinstance(loss, MethodType) and loss.__func__ in _proved


class Task(Protocol):
    """A loss for training, and metrics for the record of a run.

    Attributes:
        headline: name of the metric in a table's cells.
        measures: meaning of each metric that `metrics` returns.
        targets (str): optional; describes the targets that the task takes, for errors.
        outputs (int): optional; number of outputs of its model, whatever the data set states.
        min_side (int): optional; smallest height and width of the targets that `metrics` takes.
    """

    headline: str
    measures: tuple[Metric, ...]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return one loss per example, [B]; a mean would make per-sample gradients wrong."""

    def metrics(
        self, outputs: Tensor, targets: Tensor, groups: Tensor | None = None
    ) -> dict[str, float]:
        """Return the value of each metric over a whole set, as floats.

        Args:
            outputs: outputs for all examples, [n, ...].
            targets: targets of all examples, [n, ...].
            groups: index of each example's volume or patient, [n], for metrics of whole volumes.
        """


@runtime_checkable
class Scoring(Protocol):
    """A task of two classes whose ROC curves can be compared example by example."""

    def scores(self, outputs: Tensor) -> np.ndarray:
        """Return one score per example, [n]; a higher score indicates class 1."""


@runtime_checkable
class Condensing(Protocol):
    """A task whose `metrics` can be computed from the concatenated results of `condense`."""

    def condense(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Reduce outputs and targets [B, ...] to a few numbers per example, on the same device."""


def mean_of(losses: Tensor) -> float:
    """Return the mean of losses [n], in double precision if their sum overflows."""
    mean = losses.mean()
    return float(mean if mean.isfinite() else losses.double().mean())
