"""Classification: cross-entropy, or logistic loss for two classes with one logit; ROC-AUC."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from zdp_bench.errors import require, unknown
from zdp_bench.registry import register
from zdp_bench.tasks import keeps_apart, mean_of
from zdp_bench.tasks.metric import ACCURACY, LOSS, ROC_AUC

HEADLINES = (ACCURACY.name, ROC_AUC.name)


@register("task", "classification")
class Classification:
    """Softmax cross-entropy of real logits [B, classes]; targets are class indices [B].

    ROC-AUC ranks examples by the log-odds of the softmax probabilities. For more than two classes,
    it is the macro average of each class against the rest. It is NaN if a class is missing.

    Args:
        headline: metric in a table's cells, "accuracy" or "roc_auc". Default: "accuracy".
    """

    measures = (ACCURACY, ROC_AUC, LOSS)
    targets = "a class"

    def __init__(self, *, headline: str | None = None) -> None:
        self.headline = headline or ACCURACY.name
        if self.headline not in HEADLINES:
            raise unknown("task.headline", self.headline, HEADLINES)

    @keeps_apart
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="none")  # [B]

    def metrics(
        self, outputs: Tensor, targets: Tensor, groups: Tensor | None = None
    ) -> dict[str, float]:
        from sklearn.metrics import accuracy_score, roc_auc_score  # takes half a second

        truth = targets.cpu().numpy()
        predicted = outputs.cpu().argmax(dim=1).numpy()
        odds = log_odds(outputs).cpu().numpy()
        classes = outputs.shape[1]
        has_all_classes = len(np.unique(truth)) == classes
        area = math.nan
        if has_all_classes and classes == 2:
            area = float(roc_auc_score(truth, odds[:, 1]))
        elif has_all_classes and classes > 2:
            is_class = np.eye(classes, dtype=int)[truth]  # [n, classes]
            area = float(roc_auc_score(is_class, odds, average="macro"))
        return {
            "accuracy": float(accuracy_score(truth, predicted)),
            "roc_auc": area,
            "loss": mean_of(self.loss(outputs, targets)),
        }


def log_odds(logits: Tensor) -> Tensor:
    """Return log(p / (1 - p)) of the softmax probability p of each class.

    Log-odds rank examples as p does, but p rounds to 1 if a logit is 37 above the others. Rows that
    are equal up to a shift and the order of classes have bit-identical odds: logits are shifted so
    that the largest is 0, and the other classes are added up in order of size.

    Args:
        logits: real logits, [n, classes].

    Returns:
        Log-odds in double precision, [n, classes].
    """
    logits = logits.double()
    below_largest = logits - logits.amax(dim=1, keepdim=True)
    ordered, classes = below_largest.sort(dim=1, descending=True)
    odds = torch.empty_like(ordered)
    for rank in range(ordered.shape[1]):
        larger, smaller = ordered[:, :rank], ordered[:, rank + 1 :]
        others = torch.cat([larger, smaller], dim=1)
        odds[:, rank] = ordered[:, rank] - others.logsumexp(dim=1)
    return torch.empty_like(odds).scatter(1, classes, odds)


@register("task", "binary_classification")
class BinaryClassification:
    """Logistic loss of logits [B, 1]; targets are 0 or 1, [B].

    If the logit is a magnitude (|z| before the sigmoid, as in Ziller et al. 2021, A.2.2), no
    probability is below one half. This affects the accuracy, but not the ROC curve.

    Args:
        weights: factors on the loss of class 0 and class 1. Default: 1 and 1. They are constants of
            the recipe, because computing them from training examples would cost ε.
    """

    headline = ROC_AUC.name
    measures = (ROC_AUC, ACCURACY, LOSS)
    targets = "one of two classes"
    outputs = 1

    def __init__(
        self,
        *,
        weights: list[float] | None = None,
    ) -> None:
        weights = [1.0, 1.0] if weights is None else weights
        is_valid = len(weights) == 2 and all(0 < weight < math.inf for weight in weights)
        require(is_valid, "task.weights", weights, "must be two positive numbers")
        self.weights = torch.tensor(weights)

    @keeps_apart
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        logits = outputs.squeeze(-1)
        truth = targets.to(outputs.dtype)
        loss = F.binary_cross_entropy_with_logits(logits, truth, reduction="none")  # [B]
        weights = self.weights.to(loss)
        return loss * weights[targets.long()]

    def scores(self, outputs: Tensor) -> np.ndarray:
        dtype = torch.promote_types(outputs.dtype, torch.float32)  # NumPy has no bfloat16
        logits = outputs.squeeze(-1)
        return logits.to(dtype).cpu().numpy()

    def metrics(
        self, outputs: Tensor, targets: Tensor, groups: Tensor | None = None
    ) -> dict[str, float]:
        from sklearn.metrics import accuracy_score, roc_auc_score

        scores = self.scores(outputs)
        truth = targets.cpu().numpy()
        area = math.nan
        if len(np.unique(truth)) == 2:
            area = float(roc_auc_score(truth, scores))
        return {
            "roc_auc": area,
            "accuracy": float(accuracy_score(truth, scores > 0)),
            "loss": mean_of(self.loss(outputs, targets)),
        }
