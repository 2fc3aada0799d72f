"""A task as another package brings it: one class, whose headline is an error."""

import pytest
import torch.nn.functional as F
from torch import Tensor

from zdp_bench import registry
from zdp_bench.tasks.metric import LOSS, Metric

MAE = Metric("mae", "mean error", unit="digits", less_is_better=True, lowest=0.0)
WORDS = ["task=reconstruction", "task.name=digit_by_number"]  # reconstruction has no keys


class DigitByNumber:
    """How far the likeliest digit is from the right one; logits [B, 10], targets [B]."""

    headline = "mae"
    measures: tuple[Metric, ...] = (MAE, LOSS)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="none")

    def metrics(
        self, outputs: Tensor, targets: Tensor, groups: Tensor | None = None
    ) -> dict[str, float]:
        error = (outputs.argmax(dim=1) - targets).abs().double().mean()
        return {"mae": float(error), "loss": float(self.loss(outputs, targets).mean())}


def register_task(patch: pytest.MonkeyPatch, task: type = DigitByNumber) -> None:
    registry.names("task")  # loads the others first
    patch.setitem(registry._builders["task"], "digit_by_number", task)
