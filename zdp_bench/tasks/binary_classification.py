"""Two classes from one logit: logistic loss, area under the ROC curve, accuracy."""

from __future__ import annotations

import math

import torch.nn.functional as F
from sklearn.metrics import accuracy_score, roc_auc_score
from torch import Tensor

from zdp_bench.registry import register


@register("task", "binary_classification")
class BinaryClassification:
    """Logits [B, 1], targets 0 or 1 [B].

    A magnitude as the logit (|z| before the sigmoid, as in Ziller et al. 2021, A.2.2) never says less than one half; the ROC
    curve does not mind, accuracy at one half does.
    """

    headline = "roc_auc"

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(outputs.squeeze(-1), targets.to(outputs.dtype), reduction="none")  # [B]

    def metrics(self, outputs: Tensor, targets: Tensor, groups: Tensor | None = None) -> dict[str, float]:
        scores, truth = outputs.squeeze(-1).cpu().numpy(), targets.cpu().numpy()
        return {
            "roc_auc": float(roc_auc_score(truth, scores)) if len(set(truth.tolist())) == 2 else math.nan,  # needs both classes
            "accuracy": float(accuracy_score(truth, scores > 0)),
            "loss": float(self.loss(outputs, targets).mean()),
        }
