"""Two classes from one logit: logistic loss, area under the ROC curve, accuracy."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.metrics import accuracy_score, roc_auc_score
from torch import Tensor

from zdp_bench.errors import require
from zdp_bench.registry import register
from zdp_bench.tasks import keeps_apart


@register("task", "binary_classification")
class BinaryClassification:
    """Logits [B, 1], targets 0 or 1 [B].

    With a magnitude as the logit (|z| before the sigmoid, as in Ziller et al. 2021, A.2.2) no
    probability is below one half: accuracy suffers, the ROC curve does not.

    Args:
        weights: of the loss of class 0 and of class 1; null: 1 and 1. Computed from training
            examples they would need an ε, so they are constants of the recipe.

    Raises:
        UserError: the weights are not two positive numbers.
    """

    headline = "roc_auc"
    targets = "one of two classes"
    outputs = 1

    def __init__(self, *, weights: list[float] | None = None) -> None:
        positive = weights is None or (len(weights) == 2 and min(weights) > 0)
        require(positive, "task.weights", weights, "must be two positive numbers")
        self.weights = torch.tensor(weights or [1.0, 1.0])

    @keeps_apart
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        logits, truth = outputs.squeeze(-1), targets.to(outputs.dtype)
        loss = F.binary_cross_entropy_with_logits(logits, truth, reduction="none")  # [B]
        return loss * self.weights.to(loss)[targets.long()]

    def scores(self, outputs: Tensor) -> np.ndarray:
        return outputs.squeeze(-1).cpu().numpy()

    def metrics(
        self, outputs: Tensor, targets: Tensor, groups: Tensor | None = None
    ) -> dict[str, float]:
        scores, truth = self.scores(outputs), targets.cpu().numpy()
        both = len(set(truth.tolist())) == 2
        return {
            "roc_auc": float(roc_auc_score(truth, scores)) if both else math.nan,
            "accuracy": float(accuracy_score(truth, scores > 0)),
            "loss": float(self.loss(outputs, targets).mean()),
        }
