"""Tasks: what a model is asked, as a loss per record and metrics over a set."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
from torch import Tensor


class Task(Protocol):
    """A loss for training, metrics for the record."""

    headline: str  # the metric that fills a table's cell

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """One loss per record, [B]; never a mean, so that per-sample gradients are what they say."""

    def metrics(
        self, outputs: Tensor, targets: Tensor, groups: Tensor | None = None
    ) -> dict[str, float]:
        """Metrics over a whole set, each a fraction or in the unit its name gives.

        Args:
            groups: the volume or patient of each record [n], where the data has them; a task of single records ignores it.
        """


@runtime_checkable
class Scoring(Protocol):
    """A task of two classes whose ROC curves can be compared record by record."""

    def scores(self, outputs: Tensor) -> np.ndarray:
        """One number a record [n], higher for class 1."""


@runtime_checkable
class Condensing(Protocol):
    """A task that needs little of each output: its `metrics` takes what `condense` made of the batches, put together."""

    def condense(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """[B, ...] -> [B, few], on the outputs' device."""
