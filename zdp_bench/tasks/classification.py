"""Classification: cross-entropy, accuracy, ROC-AUC."""

from __future__ import annotations

import math

import torch.nn.functional as F
from sklearn.metrics import accuracy_score, roc_auc_score
from torch import Tensor

from zdp_bench.errors import unknown
from zdp_bench.registry import register
from zdp_bench.tasks import keeps_apart

METRICS = ("accuracy", "roc_auc")


@register("task", "classification")
class Classification:
    """Softmax cross-entropy over real logits [B, classes]; targets are class indices [B].

    ROC-AUC is by softmax scores: of two classes the usual one, of more the macro average of one
    class against the rest; NaN if a class is missing.

    Raises:
        UserError: `headline` is no metric of this task.
    """

    targets = "a class"

    def __init__(self, *, headline: str | None = None) -> None:
        self.headline = headline or "accuracy"
        if self.headline not in METRICS:
            raise unknown("task.headline", self.headline, METRICS)

    @keeps_apart
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="none")  # [B]

    def metrics(
        self, outputs: Tensor, targets: Tensor, groups: Tensor | None = None
    ) -> dict[str, float]:
        truth, classes = targets.cpu().numpy(), outputs.shape[1]
        scores = outputs.double().softmax(dim=1).cpu().numpy()
        area = math.nan
        if len(set(truth.tolist())) == classes == 2:
            area = float(roc_auc_score(truth, scores[:, 1]))
        elif len(set(truth.tolist())) == classes > 2:
            area = float(roc_auc_score(truth, scores, multi_class="ovr", average="macro"))
        return {
            "accuracy": float(accuracy_score(truth, scores.argmax(axis=1))),
            "roc_auc": area,
            "loss": float(self.loss(outputs, targets).mean()),
        }
