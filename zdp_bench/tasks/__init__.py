"""Tasks: what a model is asked, as a loss per record and metrics over a set."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Task(Protocol):
    """A loss for training, metrics for the record."""

    headline: str  # the metric that fills a table's cell

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """One loss per record, [B]; never a mean, so that per-sample gradients are what they say."""

    def metrics(self, outputs: Tensor, targets: Tensor, groups: Tensor | None = None) -> dict[str, float]:
        """Metrics over a whole set, each a fraction or in the unit its name gives.

        Args:
            groups: the volume or patient of each record [n], where the data has them; a task of single records ignores it.
        """
