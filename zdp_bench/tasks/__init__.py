"""Tasks: a loss for each example, and metrics over a set."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from zdp_bench.tasks.metric import Metric

if TYPE_CHECKING:  # tables ask what metrics mean, and do without torch
    import numpy as np
    from torch import Tensor

Loss = TypeVar("Loss", bound="Callable[..., Tensor]")
_proved: set[Any] = set()


def keeps_apart(loss: Loss) -> Loss:
    """Mark a task's loss that is proved to keep examples apart: it may see whole batches.

    `tests/tasks/test_losses.py` proves it of every loss that is marked.
    """
    _proved.add(loss)
    return loss


def is_proved(loss: object) -> bool:
    """True if a task's loss is marked itself: what wraps or overrides it is not."""
    return isinstance(loss, MethodType) and loss.__func__ in _proved


class Task(Protocol):
    """A loss for training, and metrics for the record of a run."""

    headline: str  # the metric that fills a table's cell
    measures: tuple[Metric, ...]  # what the numbers of `metrics` mean
    # A task may also say in `targets` what it takes, for an error, and in `outputs` how many
    # numbers its model returns, whatever the data set says.

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return one loss per example, [B]; a mean would make per-sample gradients wrong."""

    def metrics(
        self, outputs: Tensor, targets: Tensor, groups: Tensor | None = None
    ) -> dict[str, float]:
        """Measure a whole set: a number for each of `measures`.

        Args:
            groups: the volume or patient of each example [n], for metrics of whole volumes.
        """


@runtime_checkable
class Scoring(Protocol):
    """A task of two classes whose ROC curves can be compared example by example."""

    def scores(self, outputs: Tensor) -> np.ndarray:
        """Return one number per example [n], higher for class 1."""


@runtime_checkable
class Condensing(Protocol):
    """A task whose `metrics` takes the concatenated results of `condense`."""

    def condense(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Reduce [B, ...] to [B, few], on the outputs' device."""


def mean_of(losses: Tensor) -> float:
    """Return the mean of losses [n], in double precision where their sum exceeds float32."""
    mean = losses.mean()
    return float(mean if mean.isfinite() else losses.double().mean())
